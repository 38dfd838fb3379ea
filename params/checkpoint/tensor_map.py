"""The mapping between our parameter paths and the names of tensors in Hugging Face checkpoints."""

import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import UnsupportedError
from fnmodels.models.common.family import DecoderConfig, function_of, traits_of
from fnmodels.models.common.registry import family_of, hf_names, stack_configs
from fnmodels.models.common.spec import Leaf
from fnmodels.models.common.storage import Single, Stack, Stored, TensorSlice, disk_name, disk_names, disk_shape


@dataclass(frozen=True)
class StoredLeaf:
    """One parameter: its path in our tree, its spec, and how it is stored on disk."""

    path: str
    leaf: Leaf
    stored: Stored


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one tensor on disk holds: all of it, or the entries `index` of a `Stack`."""

    path: str
    leaf: Leaf  # of a stacked parameter without the first dimension
    stored: Single
    index: int | slice | None = None

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """The shape of the tensor on disk, of which this may be a slice."""
        return disk_shape(self.stored, self.leaf.shape)

    @property
    def dtype_class(self) -> str:
        """The class of the dtype of the tensor on disk."""
        numbers = isinstance(self.stored, TensorSlice) and self.stored.experts
        return "integer" if numbers else dtype_class(self.leaf.dtype)

    def value(self, flat: Mapping[str, Tensor]) -> Tensor:
        """The piece's values, given all parameters by path."""
        return flat[self.path] if self.index is None else flat[self.path][self.index]


def stored_leaves(
    config: DecoderConfig, prefix: str = "", named: Mapping[str, Stored] | None = None
) -> tuple[StoredLeaf, ...]:
    """All parameters, in the order of the spec.

    prefix: is removed from the names on disk (see `missing_prefix`). named: other names, by path, in their place.
    """
    names, leaves = named or hf_names(config), tree.flatten(family_of(config).spec(config))
    return tuple(StoredLeaf(path, leaf, _strip_prefix(names[path], prefix)) for path, leaf in leaves.items())


def with_stacked_experts(parameters: Iterable[StoredLeaf], on_disk: Container[str]) -> tuple[StoredLeaf, ...]:
    """The parameters, those of experts in the form in memory where files have that and not a tensor of each expert.

    Published files of Qwen 3.5 and later have it, and transformers reads both; quantized ones have a tensor of each.
    """
    parameters = tuple(parameters)
    leaves = {parameter.path: parameter.leaf for parameter in parameters}

    def found(parameter: StoredLeaf) -> StoredLeaf:
        stored = parameter.stored
        if not isinstance(stored, Stack) or stored.rows or any(name in on_disk for name in disk_names(stored)):
            return parameter
        whole = stacked(parameter.path, stored, leaves)
        return replace(parameter, stored=whole) if disk_names(whole)[0] in on_disk else parameter

    return tuple(map(found, parameters))


def stacked(path: str, stored: Stored, leaves: Mapping[str, Leaf]) -> Stored:
    """The tensor of all experts for one that files hold expert by expert, or with gate and up apart (Step 3.5)."""
    if isinstance(stored, Stack) and stored.rows:  # one tensor, whose name the family's `in_memory` makes of a part's
        return stored.tensors[0]
    where, _, leaf = path.rpartition(".")
    match = _EXPERT.fullmatch(disk_name(stored.tensors[0])) if isinstance(stored, Stack) else None
    if match is not None:
        experts = match[1]
    elif isinstance(stored, str) and where.endswith(".experts") and stored.endswith(f".{leaf}.weight"):
        experts = stored.removesuffix(f".{leaf}.weight") + ".experts"
    else:
        return stored
    if leaf == "down_proj" or f"{where}.gate_proj" not in leaves:
        return f"{experts}.{leaf}"
    inner = leaves[path].shape[1]
    start = inner if leaf == "up_proj" else 0
    return TensorSlice(f"{experts}.gate_up_proj", start, start + inner, 2 * inner, batched=True)


_EXPERT = re.compile(r"(.*\.experts)\.0\..*")


def pieces(parameter: StoredLeaf) -> list[Piece]:
    """One piece for each tensor on disk that holds some of the parameter."""
    path, leaf, stored = parameter.path, parameter.leaf, parameter.stored
    if not isinstance(stored, Stack):
        return [Piece(path, leaf, stored)]
    if stored.entries != leaf.shape[0]:
        what = "rows in tensors" if stored.rows else "tensors"
        raise ValueError(f"{path} has {leaf.shape[0]} entries, but {stored.entries} {what} on disk.")
    if stored.rows:
        parts = stored.places(slice(0, leaf.shape[0]))
        return [Piece(path, replace(leaf, shape=_rows(leaf, at)), single, at) for single, _, at in parts]
    entry = replace(leaf, shape=leaf.shape[1:], axes=leaf.axes[1:])
    return [Piece(path, entry, single, index) for index, single in enumerate(stored.tensors)]


def _rows(leaf: Leaf, rows: slice) -> tuple[int, ...]:
    return (rows.stop - rows.start, *leaf.shape[1:])


def by_name(parameters: Iterable[StoredLeaf]) -> dict[str, list[Piece]]:
    """{name of a tensor on disk: the pieces it consists of}, usually one."""
    grouped: dict[str, list[Piece]] = {}
    for parameter in parameters:
        for piece in pieces(parameter):
            grouped.setdefault(disk_name(piece.stored), []).append(piece)
    return grouped


def missing_prefix(parameters: Iterable[StoredLeaf], on_disk: Container[str]) -> str:
    """The first component of all names on disk, with its dot, if the names `on_disk` omit it; else "".

    Names in OpenAI's GPT-2 and in models saved without a head begin with `wte` or `layers`, not `transformer` or
    `model`.
    """
    heads = ("lm_head", "score", "score_bias")
    bodies = [parameter.stored for parameter in parameters if parameter.path.rpartition(".")[2] not in heads]
    if any(name in on_disk for stored in bodies for name in disk_names(stored)):  # usually the first one
        return ""
    names = [name for stored in bodies for name in disk_names(stored)]
    prefix = names[0].partition(".")[0] + "."
    common = all(name.startswith(prefix) for name in names)
    return prefix if common and any(name.removeprefix(prefix) in on_disk for name in names) else ""


def is_leftover(config: DecoderConfig, name: str) -> bool:
    """Whether `name` is no parameter, such as a buffer in old files of the family."""
    family = family_of(config)
    of_config = function_of(family, "leftovers")(config)
    return any(re.fullmatch(pattern, name) for pattern in (*traits_of(family).leftovers, *of_config))


def unread_part(config: DecoderConfig, name: str) -> str | None:
    """The unread part of the family that the tensor `name` belongs to, such as "vision"; None for another tensor."""
    unread = traits_of(family_of(config)).unread
    return next((part for part, pattern in unread.items() if re.fullmatch(pattern, name)), None)


def refuse_unread(
    config: DecoderConfig, names: Iterable[str], drop: Collection[str], part: str | None, folder: Path
) -> None:
    """UnsupportedError where files have tensors of one of the family's unread parts, which `drop` does not name.

    part: the one that is loaded alone; MTP heads are of the text.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if (other := unread_part(config, name)) and other not in drop and (part is None or other == "mtp"):
            found.setdefault(other, []).append(name)
    for other, unread in found.items():
        what = "an MTP part" if other == "mtp" else f"a part for {other}"
        alone = "" if other == "mtp" else ', and part="text" its text model alone'
        raise UnsupportedError(
            f"{folder}: the model has {what}, {len(unread)} tensors such as {min(unread)}, which is not read: "
            f"drop=({other!r},) loads the model without it{alone}."
        )


def names_of_head(declared: DecoderConfig, config: DecoderConfig, on_disk: Iterable[str]) -> set[str]:
    """The names on disk that a config read without its head does not expect, but the `declared` one knows."""
    if declared == config:
        return set()
    known = by_name(stored_leaves(declared)).keys() | tied_names(declared).keys()
    return {name for name in on_disk if name in known or is_leftover(declared, name) or unread_part(declared, name)}


def published_names(
    config: DecoderConfig, expected: Container[str], on_disk: Collection[str], prefix: str = ""
) -> list[str]:
    """The names `on_disk`, with the published one for a name in the trait `resaved`.

    A wrapper's class without a head (Gemma3Model) has in memory the names of that with one but for the first part.
    Only where the published one is expected and not there too, so that no two tensors get one name.
    """
    patterns = traits_of(family_of(config)).resaved

    def published(name: str) -> str:
        whole = [prefix + name, f"model.{name}"] if name not in expected else []
        for form, pattern, replacement in ((form, *rule) for form in whole for rule in patterns.items()):
            if match := re.fullmatch(pattern, form):
                other = match.expand(replacement).removeprefix(prefix)
                if other in expected and other not in on_disk:
                    return other
        return name

    return [published(name) for name in on_disk]


def why_wrong(config: DecoderConfig, names: Iterable[str]) -> str:
    """The end of an error about tensors of other shapes that the trait `equal_parts` explains; "" if it does not."""
    wrong = tuple(names)
    for parts in traits_of(family_of(config)).equal_parts:
        if any(name.endswith(tuple(f".{part}" for part in parts)) for name in wrong):
            return (
                f"\ntransformers 5.23 saves {', '.join(parts)} as equal parts of what they are together, whatever "
                "their shapes: use the file that the model was loaded from."
            )
    return ""


def tied_names(config: DecoderConfig, prefix: str = "") -> dict[str, str]:
    """{name of a redundant tensor, which files may hold or not: name of the tensor it must equal}.

    A tied head, and everything in `duplicate_names`. prefix: as in `stored_leaves`.
    """
    tied, (untied, at) = duplicate_names(config, prefix), untied_config(config)
    if untied == config:
        return tied
    names = hf_names(untied)
    if not names.keys() >= {f"{at}lm_head", f"{at}embed_tokens"}:  # a family outside this package, with other names
        return tied
    (head,), (embedding,) = disk_names(names[f"{at}lm_head"]), disk_names(names[f"{at}embed_tokens"])
    return tied | {head: embedding.removeprefix(prefix)}


def untied_config(config: Any) -> tuple[Any, str]:
    """(the config with a head of its own, the beginning of the paths of embedding and head)."""
    if hasattr(family_of(config), "towers"):  # the text's, inside of the model's names
        if not getattr(getattr(config, "text", None), "tie_word_embeddings", False):
            return config, "text."
        return replace(config, text=replace(config.text, tie_word_embeddings=False)), "text."
    if not getattr(config, "tie_word_embeddings", False):
        return config, ""
    untied = replace(config, tie_word_embeddings=False)
    inside = stack_configs(config) and "decoder.lm_head" in hf_names(untied)  # the decoder has an embedding of its own
    return untied, "decoder." if inside else ""


def duplicate_names(config: DecoderConfig, prefix: str = "") -> dict[str, str]:
    """{name of a duplicate tensor: name of the original} by the family's `hf_copies`; prefix as in `stored_leaves`.

    Files may omit them. A save writes them unless the family's trait `copies_saved` is False.
    """
    named: dict[str, str] = function_of(family_of(config), "hf_copies")(config)
    names = hf_names(config) if named else {}
    return {copy.removeprefix(prefix): disk_names(names[path])[0].removeprefix(prefix) for copy, path in named.items()}


def drop_optional(
    config: DecoderConfig, drop: Collection[str], found: Container[str], prefix: str = ""
) -> tuple[Any, frozenset[str]]:
    """(config without the optional parts that are not loaded, names on disk that are skipped for it).

    The trait `optional` lists the optional parts of a model, {key of the tree: config field that counts them}. Parts in
    `drop` are left out, and so are those of which the files hold no tensor. A model of several parts has those of its
    text too. ValueError for other names in `drop`.
    """
    optional, of_text = traits_of(family_of(config)).optional, _optional_of_text(config)
    known = dict.fromkeys((*optional, *of_text, *traits_of(family_of(config)).unread))
    if unknown := sorted(set(drop) - set(known)):
        raise ValueError(
            f"drop names {', '.join(map(repr, unknown))}; what can be left out of this model is "
            f"{', '.join(map(repr, known)) or 'nothing'}."
        )
    counts = {**optional, **of_text}
    # computed only if needed: it dominates the time
    parameters = with_stacked_experts(stored_leaves(config, prefix), found) if counts else ()
    dropped: set[str] = set()
    for name, count in counts.items():
        where = f"text.{name}." if name in of_text else f"{name}."
        names = {
            one
            for parameter in parameters
            if f"{parameter.path}.".startswith(where)
            for one in disk_names(parameter.stored)
        }
        if name in drop or not any(one in found for one in names):
            smaller = _without(config, count, inside=name in of_text)
            if name in drop:
                dropped |= names | (duplicate_names(config, prefix).keys() - duplicate_names(smaller, prefix).keys())
            config = smaller
    return config, frozenset(dropped)


def _optional_of_text(config: Any) -> dict[str, str]:
    """{optional part of the text inside of a model of several parts: the field of the text's Config that counts it}."""
    text = getattr(config, "text", None) if hasattr(family_of(config), "towers") else None
    known = {} if text is None else traits_of(family_of(text)).optional
    return {part: count for part, count in known.items() if getattr(text, count)}


def _without(config: Any, count: str, *, inside: bool) -> Any:
    """The config with 0 in a field of its own, or of its text's."""
    return replace(config, text=_without(config.text, count, inside=False)) if inside else replace(config, **{count: 0})


def _strip_prefix(stored: Stored, prefix: str) -> Stored:
    def one(single: Single) -> Single:
        if isinstance(single, str):
            return single.removeprefix(prefix)
        return replace(single, name=single.name.removeprefix(prefix))

    return replace(stored, tensors=tuple(map(one, stored.tensors))) if isinstance(stored, Stack) else one(stored)


def dtype_class(dtype: torch.dtype) -> str:
    """The class of a dtype. A tensor on disk may differ from its Leaf in dtype (bf16, say) but not in class."""
    if dtype == torch.bool:
        return "boolean"
    if dtype.is_complex:
        return "complex"
    if not dtype.is_floating_point:
        return "integer"
    return "floating" if dtype.itemsize > 1 else "8-bit floating"

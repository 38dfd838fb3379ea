"""What a checkpoint of a configuration holds: the one place where our paths and the names on disk meet."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import Leaf
from fnmodels.models.common.storage import Single, Stack, Stored, disk_name, disk_names, disk_shape


@dataclass(frozen=True)
class StoredLeaf:
    """One parameter: its path in our tree, its declaration, and how it lies on disk."""

    path: str
    leaf: Leaf
    stored: Stored


@dataclass(frozen=True)
class Piece:
    """What one tensor on disk has of a parameter: all of it, or entry `index` of its first dimension, of a `Stack`."""

    path: str
    leaf: Leaf  # of this piece
    stored: Single
    index: int | None = None

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """The shape of the tensor on disk, of which this may be a part."""
        return disk_shape(self.stored, self.leaf.shape)

    def value(self, flat: Mapping[str, Tensor]) -> Tensor:
        """It, from all parameters by path."""
        return flat[self.path] if self.index is None else flat[self.path][self.index]


def stored_leaves(config: Any, prefix: str = "") -> tuple[StoredLeaf, ...]:
    """All parameters, in the order of the spec. prefix: what the names in the files lack (`missing_prefix`)."""
    family = family_of(config)
    names, leaves = family.hf_names(config), tree.flatten(family.spec(config))
    return tuple(StoredLeaf(path, leaf, _strip_prefix(names[path], prefix)) for path, leaf in leaves.items())


def pieces(parameter: StoredLeaf) -> list[Piece]:
    """One for each tensor on disk that it is made of."""
    path, leaf, stored = parameter.path, parameter.leaf, parameter.stored
    if not isinstance(stored, Stack):
        return [Piece(path, leaf, stored)]
    if len(stored.tensors) != leaf.shape[0]:
        raise ValueError(f"{path} has {leaf.shape[0]} entries, but {len(stored.tensors)} tensors on disk.")
    one = replace(leaf, shape=leaf.shape[1:], axes=leaf.axes[1:])
    return [Piece(path, one, single, index) for index, single in enumerate(stored.tensors)]


def by_name(parameters: Iterable[StoredLeaf]) -> dict[str, list[Piece]]:
    """{name of a tensor on disk: what it consists of}, usually one parameter."""
    grouped: dict[str, list[Piece]] = {}
    for parameter in parameters:
        for piece in pieces(parameter):
            grouped.setdefault(disk_name(piece.stored), []).append(piece)
    return grouped


def missing_prefix(parameters: Iterable[StoredLeaf], found: Container[str]) -> str:
    """The first part of the names of all `parameters`, with its dot, if the files `found` go without it; else "".

    OpenAI's GPT-2 and models that were saved without a head begin at `wte` or `layers`, not `transformer` or `model`.
    """
    names = [name for parameter in parameters if parameter.path != "lm_head" for name in disk_names(parameter.stored)]
    prefix = names[0].partition(".")[0] + "."
    common = all(name.startswith(prefix) for name in names)
    bare = not any(name in found for name in names) and any(name.removeprefix(prefix) in found for name in names)
    return prefix if common and bare else ""


def is_leftover(config: Any, name: str) -> bool:
    """Whether `name` is a buffer that old files of the family hold and nobody reads: see its LEFTOVERS, if any."""
    return any(re.fullmatch(pattern, name) for pattern in getattr(family_of(config), "LEFTOVERS", ()))


def tied_names(config: Any, prefix: str = "") -> dict[str, str]:
    """{name that a tied head may have on disk all the same: name of the tensor it must equal}; prefix as there.

    What `duplicate_names` says is among them.
    """
    tied = duplicate_names(config, prefix)
    if not getattr(config, "tie_word_embeddings", False):
        return tied
    names = family_of(config).hf_names(replace(config, tie_word_embeddings=False))
    if not names.keys() >= {"lm_head", "embed_tokens"}:  # a family of someone's own, with a head of its own
        return tied
    (head,), (embedding,) = disk_names(names["lm_head"]), disk_names(names["embed_tokens"])
    return tied | {head: embedding.removeprefix(prefix)}


def duplicate_names(config: Any, prefix: str = "") -> dict[str, str]:
    """{name of a tensor that repeats another: the other's}, if the family's `hf_copies` says so; prefix as there.

    Files may lack them. A save writes them, for other programs read them.
    """
    family = family_of(config)
    named = family.hf_copies(config) if hasattr(family, "hf_copies") else {}
    names = family.hf_names(config) if named else {}
    return {copy.removeprefix(prefix): disk_names(names[path])[0].removeprefix(prefix) for copy, path in named.items()}


def drop_optional(
    config: Any, drop: Collection[str], found: Container[str], prefix: str = ""
) -> tuple[Any, frozenset[str]]:
    """(the config of what is to be loaded, the names of what is on disk and is not).

    The parts of a model that files may hold or not are in its family's OPTIONAL, {key of the tree: field of the config
    that counts them}. Those in `drop` are left out, and those of which the files have nothing.
    """
    optional = getattr(family_of(config), "OPTIONAL", {})
    if unknown := sorted(set(drop) - set(optional)):
        raise ValueError(
            f"drop names {', '.join(map(repr, unknown))}; what can be left out of this model is "
            f"{', '.join(map(repr, optional)) or 'nothing'}."
        )
    whole = stored_leaves(config, prefix) if optional else ()  # which takes as long as all the rest
    dropped: set[str] = set()
    for part, count in optional.items():
        names = {
            name
            for parameter in whole
            if parameter.path.startswith(f"{part}.")
            for name in disk_names(parameter.stored)
        }
        if part in drop or not any(name in found for name in names):
            smaller = replace(config, **{count: 0})
            if part in drop:
                dropped |= names | (duplicate_names(config, prefix).keys() - duplicate_names(smaller, prefix).keys())
            config = smaller
    return config, frozenset(dropped)


def _strip_prefix(stored: Stored, prefix: str) -> Stored:
    if isinstance(stored, Stack):
        return Stack(tuple(_strip_prefix_of_one(single, prefix) for single in stored.tensors))
    return _strip_prefix_of_one(stored, prefix)


def _strip_prefix_of_one(stored: Single, prefix: str) -> Single:
    if isinstance(stored, str):
        return stored.removeprefix(prefix)
    return replace(stored, name=stored.name.removeprefix(prefix))


def dtype_class(dtype: torch.dtype) -> str:
    """Within a class a file may have another dtype than the Leaf declares (a bf16 weight); across, it is a mistake."""
    if dtype == torch.bool:
        return "boolean"
    if dtype.is_complex:
        return "complex"
    if not dtype.is_floating_point:
        return "integer"
    return "floating" if dtype.itemsize > 1 else "8-bit floating"

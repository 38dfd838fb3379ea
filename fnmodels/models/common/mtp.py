"""Parameters of multi-token prediction (MTP) heads (arXiv 2412.19437, section 2.2) and their names on disk."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fnmodels.errors import ConfigError
from fnmodels.models.common.family import LayerKind, field_of, function_of
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import Leaf, norm, weight
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.tree import Tree

_APART = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}


def blocks(config: Any) -> tuple[Any, int]:
    """(config, first): the layers of an MTP head's block are those from `first` on of a model of this config.

    That is the model itself and its last layer, or a model of the family's `mtp_kinds` and all of its layers.
    """
    family = family_of(config)
    kinds = function_of(family, "mtp_kinds")
    if kinds is None:
        return config, len(family.kinds(config)) - 1
    own = tuple(kinds(config))
    no_ngrams = {"ngram_size": 0} if field_of(config, "ngram_size") else {}
    return replace(config, num_hidden_layers=len(own), layer_kinds=own, num_nextn_predict_layers=0, **no_ngrams), 0


def kinds_of(config: Any) -> tuple[str, ...]:
    """The kinds of the layers of an MTP head's block."""
    own, first = blocks(config)
    return tuple(family_of(own).kinds(own)[first:])


def like(kind: str, kinds: Iterable[str]) -> str | None:
    """The one of `kinds` whose mask and rotary table layers of `kind` read; None: there is none.

    Itself, or one that differs in having experts, or in whose choice of keys it takes.
    """
    wanted, known = LayerKind.parse(kind), list(kinds)
    alike = [name for name in known if _reads(LayerKind.parse(name)) == _reads(wanted)]
    return kind if kind in known else alike[0] if alike else None


def _reads(kind: LayerKind) -> tuple[Any, ...]:
    return kind.attends, kind.rotates, kind.source


def check_kinds(config: Any, kinds: Sequence[str], *, most: int | None = None) -> None:
    """ConfigError for MTP heads whose block has a layer with a mask or rotary table that no layer of the model has.

    Or for a number of heads that is negative, or above `most`; or for several layers with experts, of whose counts one
    head would return the last.
    """
    count = config.num_nextn_predict_layers
    if count < 0 or (most is not None and count > most):
        allowed = "at least 0" if most is None else f"from 0 to {most}"
        raise ConfigError(f"num_nextn_predict_layers is {count}; the MTP heads of this family are {allowed}.")
    if count and sum(LayerKind.parse(kind).routed for kind in kinds) > 1:
        raise ConfigError(
            f"The block of an MTP head has the layers {tuple(kinds)}; one of them at most may have experts."
        )
    if count:
        for kind in kinds:
            if like(kind, config.layer_kinds) is None:
                raise ConfigError(
                    f"num_nextn_predict_layers is {config.num_nextn_predict_layers}, but the block of MTP heads has a "
                    f"layer of the kind {kind!r}, and layer_kinds {config.layer_kinds} has none that attends like it."
                )


def heads(
    config: Any,
    block: Tree | list[Tree],
    *,
    norm_value: float = 1.0,
    own_norm: bool = True,
    own_output: bool = False,
) -> Tree:
    """{"mtp": [the parameters of each MTP head]} around those of a `block`; {} for a config without MTP heads.

    block: the parameters of its layer, or a list of those of its layers. norm_value: with which norms of the residual
    stream begin. own_norm, own_output: whether a head has a final norm and an output head of its own; else they are
    the model's.
    """
    D, std = config.hidden_size, config.initializer_range
    of_stream = norm(D, "embed", norm_value)
    head = {
        "enorm": of_stream,
        "hnorm": of_stream,
        "eh_proj": weight((D, 2 * D), ("embed", "token_and_state"), std),
        "block": block,
        **({"norm": of_stream} if own_norm else {}),
        **({"lm_head": weight((config.vocab_size, D), ("vocab", "embed"), std)} if own_output else {}),
    }
    return {"mtp": [head] * config.num_nextn_predict_layers} if config.num_nextn_predict_layers else {}


def stream_heads(config: Any, block: Tree, norms: Mapping[str, Leaf]) -> Tree:
    """`heads` that read residual streams: a projection of the embedding, and one of each row of the streams.

    block: the parameters of its layer, with "fold", which makes one row of its result. norms: "enorm" of the embedding,
    "hnorm" of the streams, of each row or of all together, and "norm" where a head has a final norm of its own.
    """
    D, std = config.hidden_size, config.initializer_range
    project = weight((D, D), ("embed", "token_and_state"), std)
    head = {**norms, "e_proj": project, "h_proj": project, "block": block}
    return {"mtp": [head] * config.num_nextn_predict_layers} if config.num_nextn_predict_layers else {}


def layer_path(path: str, layers: int) -> str:
    """The path as on disk: MTP head k is layer `layers` + k, its final norm `shared_head.norm`; others unchanged."""
    match = re.fullmatch(r"mtp\.(\d+)\.(.*)", path)
    if not match:
        return path
    rest = "shared_head.norm" if match[2] == "norm" else match[2].removeprefix("block.")
    return f"layers.{layers + int(match[1])}.{rest}"


def names_apart(
    names: Mapping[str, Stored], layers: int, *, around: Mapping[str, str] = MappingProxyType(_APART)
) -> dict[str, Stored]:
    """{path: name on disk} of one MTP head that stands in a part "mtp" of its own, as in Qwen3-Next's files.

    names: of the model's layers; the block's are those of the last one, under mtp.layers.0, and those outside of layers
    under mtp. around: {parameter around the block: its name}.
    """
    at = f"layers.{layers - 1}."
    names_of_head: dict[str, Stored] = {f"mtp.0.{ours}": f"mtp.{theirs}.weight" for ours, theirs in around.items()}
    inside = {path.removeprefix(at): stored for path, stored in names.items() if path.startswith(at)}
    return names_of_head | {
        f"mtp.0.block.{path}": renamed(
            renamed(stored, rf"^.*?layers\.{layers - 1}\.", "mtp.layers.0."), r"^model\.", "mtp."
        )
        for path, stored in inside.items()
    }


def names_of(
    config: Any, names: Mapping[str, Stored], where: str, *, first: int = 0, around: Mapping[str, str] | None = None
) -> dict[str, Stored]:
    """{path: name on disk} of MTP heads whose layers stand one after the other.

    names: those of a model of one head's layers alone, the config `blocks(config)`. where: how the names of a layer
    begin, {} for its number, from `first` on. around: {part of a head: its name} where that is another than
    {"norm": "final_layernorm"} and the part's own.
    """
    layers, found = len(kinds_of(config)), dict[str, Stored]()
    parts = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "final_layernorm"} | dict(around or {})
    for head in range(config.num_nextn_predict_layers):
        number = first + head * layers
        for ours, theirs in parts.items():
            at = number + (layers - 1 if ours == "norm" else 0)
            found[f"mtp.{head}.{ours}"] = f"{where.format(at)}{theirs}.weight"
        for path, stored in names.items():
            if match := re.fullmatch(r"layers\.(\d+)\.(.*)", path):
                inner = match[2] if layers == 1 else f"{match[1]}.{match[2]}"
                there = where.format(number + int(match[1]))
                found[f"mtp.{head}.block.{inner}"] = renamed(stored, rf"^.*?layers\.{match[1]}\.", there)
    return found


def copies(config: Any) -> dict[str, str]:
    """{name on disk: path} of the copies of the model's embedding and output head that the files hold per MTP head."""
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    return {
        f"model.layers.{i}.{name}.weight": path
        for i in layers
        for name, path in (("embed_tokens", "embed_tokens"), ("shared_head.head", head))
    }

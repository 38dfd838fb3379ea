"""Parameters of multi-token prediction (MTP) heads (arXiv 2412.19437, section 2.2) and their names on disk."""

import re
from collections.abc import Mapping
from typing import Any

from fnmodels.models.common.spec import norm, weight
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.tree import Tree

_APART = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}


def heads(config: Any, block: Tree, *, norm_value: float = 1.0) -> Tree:
    """{"mtp": [the parameters of each MTP head]} around those of a `block`; {} for a config without MTP heads.

    norm_value: with which norms of the residual stream begin.
    """
    D, std = config.hidden_size, config.initializer_range
    of_stream = norm(D, "embed", norm_value)
    head = {
        "enorm": of_stream,
        "hnorm": of_stream,
        "eh_proj": weight((D, 2 * D), ("embed", "token_and_state"), std),
        "block": block,
        "norm": of_stream,
    }
    return {"mtp": [head] * config.num_nextn_predict_layers} if config.num_nextn_predict_layers else {}


def layer_path(path: str, layers: int) -> str:
    """The path as on disk: MTP head k is layer `layers` + k, its final norm `shared_head.norm`; others unchanged."""
    match = re.fullmatch(r"mtp\.(\d+)\.(.*)", path)
    if not match:
        return path
    rest = "shared_head.norm" if match[2] == "norm" else match[2].removeprefix("block.")
    return f"layers.{layers + int(match[1])}.{rest}"


def names_apart(names: Mapping[str, Stored], layers: int) -> dict[str, Stored]:
    """{path: name on disk} of one MTP head that stands in a part "mtp" of its own, as in Qwen3-Next's files.

    names: of the model's layers; the block's are those of the last one, under mtp.layers.0.
    """
    at = f"layers.{layers - 1}."
    names_of_head: dict[str, Stored] = {f"mtp.0.{ours}": f"mtp.{theirs}.weight" for ours, theirs in _APART.items()}
    inside = {path.removeprefix(at): stored for path, stored in names.items() if path.startswith(at)}
    return names_of_head | {
        f"mtp.0.block.{path}": renamed(stored, rf"^.*?layers\.{layers - 1}\.", "mtp.layers.0.")
        for path, stored in inside.items()
    }


def copies(config: Any) -> dict[str, str]:
    """{name on disk: path} of the copies of the model's embedding and output head that the files hold per MTP head."""
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    return {
        f"model.layers.{i}.{name}.weight": path
        for i in layers
        for name, path in (("embed_tokens", "embed_tokens"), ("shared_head.head", head))
    }

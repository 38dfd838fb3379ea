"""Parameters of multi-token prediction (MTP) heads (arXiv 2412.19437, section 2.2) and their names on disk."""

import re
from typing import Any

from fnmodels.models.common.spec import norm, weight
from fnmodels.tree import Tree


def heads(config: Any, block: Tree) -> Tree:
    """{"mtp": [the parameters of each MTP head]} around those of a `block`; {} for a config without MTP heads."""
    D, std = config.hidden_size, config.initializer_range
    head = {
        "enorm": norm(D, "embed"),
        "hnorm": norm(D, "embed"),
        "eh_proj": weight((D, 2 * D), ("embed", "token_and_state"), std),
        "block": block,
        "norm": norm(D, "embed"),
    }
    return {"mtp": [head] * config.num_nextn_predict_layers} if config.num_nextn_predict_layers else {}


def layer_path(path: str, layers: int) -> str:
    """The path as on disk: MTP head k is layer `layers` + k, its final norm `shared_head.norm`; others unchanged."""
    found = re.fullmatch(r"mtp\.(\d+)\.(.*)", path)
    if not found:
        return path
    rest = "shared_head.norm" if found[2] == "norm" else found[2].removeprefix("block.")
    return f"layers.{layers + int(found[1])}.{rest}"


def copies(config: Any) -> dict[str, str]:
    """{name on disk: path} of the copies of the model's embedding and output head that the files hold per MTP head."""
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    return {
        f"model.layers.{i}.{name}.weight": path
        for i in layers
        for name, path in (("embed_tokens", "embed_tokens"), ("shared_head.head", head))
    }

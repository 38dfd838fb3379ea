"""The parameters of GLM 5.3 Flash and their names on disk; what transformers keeps in fp32 stays so here."""

from dataclasses import replace
from typing import Any

import torch

from fnmodels.tree import Tree, flatten

from .. import mla, mtp
from .. import moe as mixture
from ..deepseek_v4.streams import hyper_leaves
from ..family import LayerKind, parsed
from ..layers import delta, indexed
from ..registry import family_of
from ..spec import Constant, Leaf, Normal, latent_attention_leaves, layer_leaves, weight
from ..storage import Stored, renamed

_CONNECTIONS = {"attention_hyper": "hc_attn", "mlp_hyper": "hc_ffn"}
_POOLS = {"pool_gate": "index_kpool_compress_gate", "pool_bias": "index_kpool_compress_ape"}


def leaves_of(config: Any, kind: LayerKind) -> Tree:
    """The parameters of a layer of this kind: weights [out, in]."""
    n = config.residual_streams
    connection = hyper_leaves(config, (2 + n) * n, 3)
    connection["fn"] = replace(connection["fn"], keep_dtype=False, init=Normal(0.02))
    return plain_leaves(config, kind) | dict.fromkeys(_CONNECTIONS, connection)


def plain_leaves(config: Any, kind: LayerKind) -> Tree:
    """Those of a layer of this kind without hyper-connections: of one residual stream."""
    attention: Tree = _delta_leaves(config) if kind.ordered else latent_attention_leaves(config)
    if kind.indexed and not kind.shares_choice:
        attention = attention | {"indexer": _indexer_leaves(config)}
    mlp = mixture.grouped_leaves(config, kind, selection_bias=True, wide_router=True)
    return layer_leaves(config.hidden_size, attention, mlp)


def _delta_leaves(config: Any) -> dict[str, Leaf]:
    leaves = delta.narrow_leaves(config)
    for name in ("q_conv", "k_conv", "v_conv", "dt_bias", "A_log"):
        leaves[name] = replace(leaves[name], keep_dtype=True)
    if config.linear_lower_bound is not None:
        leaves["A_log"] = replace(leaves["A_log"], init=Constant(0.0))
    return leaves


def _indexer_leaves(config: Any) -> dict[str, Leaf]:
    """Parameters of `ops.indexers.gated_pools`; every process of tensor parallelism has all heads, to choose alike."""
    width, size, axes = config.index_head_dim, config.indexer_compress_ratio, ("one", "latent")
    leaves = indexed.indexer_leaves(config)
    leaves["pool_gate"] = weight((width, config.hidden_size), ("latent", "embed"), config.initializer_range)
    leaves["pool_bias"] = Leaf((size, width), torch.float32, axes, Constant(0.0), decay=False)
    return {name: replace(leaf, trainable=False) for name, leaf in leaves.items()}


def hf_names(config: Any) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert, and MTP heads as layers after the last."""
    paths = flatten(family_of(config).spec(config))
    names = indexed.indexer_names(mla.latent_names(mixture.grouped_names(config, paths)))
    for index, kind in enumerate(parsed(config.layer_kinds)):
        at, there = f"layers.{index}", f"model.layers.{index}"
        if kind.ordered:
            names |= delta.separate_names(f"{at}.attention", f"{there}.self_attn", delta.narrow_leaves(config))
        for ours, theirs in _CONNECTIONS.items():
            names |= {f"{at}.{ours}.{leaf}": f"{there}.{theirs}_{leaf}" for leaf in ("fn", "base", "scale")}
    for path in (path for path in paths if path.rpartition(".")[2] in _POOLS):
        there, _, leaf = mtp.layer_path(path, config.num_hidden_layers).rpartition(".")
        names[path] = f"model.{there.replace('.attention.', '.self_attn.')}.{_POOLS[leaf]}"
    if config.model_type == "glm5_next":
        names = {path: renamed(name, r"^model\.", "model.language_model.") for path, name in names.items()}
    return names

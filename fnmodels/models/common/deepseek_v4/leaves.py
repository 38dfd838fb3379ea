"""The parameters of DeepSeek V4's attention, compressors, indexers and experts."""

from dataclasses import replace
from typing import Any

import torch

from fnmodels.models.common.family import LayerKind
from fnmodels.models.common.spec import Constant, InTurn, Leaf, Normal, moe_leaves, norm, weight
from fnmodels.tree import Tree


def wide_norm(size: int, axis: str) -> Leaf:
    """The weight of an RMSNorm, which stays fp32."""
    return replace(norm(size, axis), keep_dtype=True)


def attention_leaves(config: Any, kind: LayerKind) -> Tree:
    """Parameters of attention, of the compressor of keys and of the indexer, where a layer of this kind has them."""
    leaves, H = near_leaves(config), config.head_dim
    if kind.attends == "compressed":
        leaves["compressor"] = _compressor_leaves(config, H, config.compressed_ratio, overlap=False)
    if kind.indexed:
        leaves["compressor"] = _compressor_leaves(config, H, config.indexed_ratio, overlap=True)
        leaves["indexer"] = _indexer_leaves(config)
    return leaves


def near_leaves(config: Any) -> Tree:
    """Parameters of attention to the last tokens, which all layers have."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, rank = config.num_attention_heads, config.o_groups * config.o_lora_rank
    return {
        "q_a_proj": weight((config.q_lora_rank, D), ("latent", "embed"), std),
        "q_a_layernorm": wide_norm(config.q_lora_rank, "latent"),
        "q_b_proj": weight((heads * H, config.q_lora_rank), ("heads", "latent"), std, unit=H),
        "kv_proj": weight((H, D), ("latent", "embed"), std),
        "kv_a_layernorm": wide_norm(H, "latent"),
        "sinks": Leaf((heads,), torch.float32, ("heads",), Normal(std), decay=False, keep_dtype=True),
        "o_a": weight((rank, heads * H // config.o_groups), ("head_groups", "latent"), std, unit=config.o_lora_rank),
        "o_b_proj": weight((D, rank), ("embed", "head_groups"), std, unit=config.o_lora_rank),
    }


def _compressor_leaves(config: Any, width: int, ratio: int, *, overlap: bool) -> dict[str, Leaf]:
    D, std, rows = config.hidden_size, config.initializer_range, width * (1 + overlap)
    kept: dict[str, Any] = {"dtype": torch.float32, "decay": False, "keep_dtype": True}
    return {
        "kv_proj": weight((rows, D), ("latent", "embed"), std),
        "gate_proj": weight((rows, D), ("latent", "embed"), std),
        "bias": Leaf((ratio, rows), axes=("one", "latent"), init=Constant(0.0), **kept),
        "key_scale": wide_norm(width, "latent"),
    }


def _indexer_leaves(config: Any) -> Tree:
    """Parameters of the indexer; every process of tensor parallelism has all heads, to choose alike."""
    width, heads, std = config.index_head_dim, config.index_n_heads, config.initializer_range
    of_keys = _compressor_leaves(config, width, config.indexed_ratio, overlap=True)
    return {
        "q_b_proj": replace(weight((heads * width, config.q_lora_rank), ("latent", "latent"), std), trainable=False),
        "weights_proj": replace(weight((heads, config.hidden_size), ("latent", "embed"), std), trainable=False),
        "compressor": {name: replace(leaf, trainable=False) for name, leaf in of_keys.items()},
    }


def experts_leaves(config: Any, kind: LayerKind) -> Tree:
    """Parameters of the mixture of experts, with the experts of each token id in a hash layer."""
    experts, inner, k = config.n_routed_experts, config.moe_intermediate_size, config.num_experts_per_tok
    shared, hashed = config.n_shared_experts * inner, "_hash" in kind.name
    flags: dict[str, Any] = {"std": config.initializer_range, "shared": shared, "selection_bias": not hashed}
    leaves = moe_leaves(config.hidden_size, experts, inner, **flags)
    if hashed:  # numbers of experts, floating so that the tree has gradients
        kept: dict[str, Any] = {"trainable": False, "decay": False, "keep_dtype": True}
        leaves["tid2eid"] = Leaf((config.vocab_size, k), torch.float32, ("router", "one"), InTurn(experts), **kept)
    return leaves

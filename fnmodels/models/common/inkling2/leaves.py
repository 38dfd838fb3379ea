"""The parameters of Inkling 2's layers; those that transformers keeps in fp32 stay so here."""

from dataclasses import replace
from typing import Any

import torch

from fnmodels.tree import Tree

from ..family import LayerKind
from ..spec import Constant, Leaf, moe_leaves, norm, weight

MESSAGES = ("q", "k", "v", "mlp")  # what a layer of a loop reads of the pass before


def query(width: int, rows: int = 0) -> Leaf:
    """A learned query of attention over depth [D], or several of them [rows, D]."""
    shape, axes = ((rows, width), ("one", "embed")) if rows else ((width,), ("embed",))
    return Leaf(shape, torch.float32, axes, Constant(0.0), decay=False, keep_dtype=True)


def _conv(channels: int, axis: str, taps: int, std: float, unit: int = 1) -> Leaf:
    return replace(weight((channels, 1, taps), (axis, "one", "kernel"), std, unit=unit), keep_dtype=True)


def attention_leaves(config: Any, kind: LayerKind) -> Tree:
    """Projections, the bias of scores by distance, and the convolutions of keys and values."""
    D, std, K, R = config.hidden_size, config.initializer_range, config.conv_kernel, config.relative_dim
    N, G, H, extent = config.heads_of(kind)
    of_q: Any = {"axes": ("heads", "embed"), "std": std}
    leaves: Tree = {
        "q_proj": weight((N * H, D), **of_q, unit=H),
        **{f"{name}_proj": weight((G * H, D), ("kv_heads", "embed"), std, unit=H) for name in "kv"},
        "gate_proj": weight((N * H, D), **of_q, unit=H),
        "sink_proj": weight((N, D), **of_q),
        "relative_proj": weight((N * R, D), **of_q, unit=R),
        "relative_bank": weight((R, extent), ("latent", "distance"), std),
        "q_scale": Leaf((N, H), torch.float32, ("heads", "head_dim"), Constant(1.0), decay=False),
        "relative_scale": Leaf((N, R), torch.float32, ("heads", "latent"), Constant(1.0), decay=False),
    }
    for name in "kv":
        if kind.slides:
            leaves[f"{name}_conv"] = _conv(G * H, "kv_heads", K, std, H)
            continue
        static = weight((K, G * H), ("kernel", "kv_heads"), unit=H)
        leaves[f"{name}_conv"] = replace(static, init=Constant(0.0))
        leaves[f"{name}_taps_proj"] = weight((G * K, D), ("kv_heads", "embed"), std, unit=K)
    return leaves | {"o_proj": weight((D, N * H), ("embed", "heads"), std, unit=H)}


def layer_leaves(config: Any, kind: LayerKind, index: int) -> Tree:
    """The parameters of the stored layer `index`."""
    D, std, K = config.hidden_size, config.initializer_range, config.conv_kernel
    norms = ["input"] if kind.slides else [f"{name}_input" for name in "qkv"]
    leaves: Tree = {} if index == 0 else {"attention_query": query(D, 0 if kind.slides else 3)}
    leaves |= {f"{name}_layernorm": norm(D, "embed") for name in (*norms, "post_attention")}
    leaves |= {"attention": attention_leaves(config, kind), "attention_conv": _conv(D, "convolved", K, std)}
    experts = config.num_experts, config.moe_intermediate_size
    leaves |= {"mlp_query": query(D), "mlp": moe_leaves(D, *experts, std=std, selection_bias=True, wide_router=True)}
    leaves |= {"mlp_conv": _conv(D, "convolved", K, std)}
    if config.loop_start <= index < config.loop_end:
        rank = config.loop_gate_rank
        gate: Tree = {"down_proj": weight((rank, 2 * D), ("one", "embed_twice"), std)}
        for name in ("forget_proj", "message_proj"):
            gate[name] = replace(weight((D, rank), ("embed", "one"), std), keep_dtype=True)
        leaves |= {"gates": dict.fromkeys(MESSAGES, gate), "messages": {name: query(D, 1) for name in MESSAGES}}
    return leaves | ({"fold_query": query(D)} if index == config.stored_layers - 1 else {})

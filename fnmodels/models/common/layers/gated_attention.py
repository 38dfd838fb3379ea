"""Grouped-query attention whose heads have a gate, and norms of queries and keys: of Qwen3-Next and its successors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops import apply_rotary, project_out, project_qkv, split_heads
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.tree import Tree

from ..context import Context
from ..spec import Leaf, bias, head_norms, usual_attention, weight
from ..storage import Stored, TensorSlice


def leaves(config: Any) -> dict[str, Leaf]:
    """The parameters: those of usual attention, norms of heads around 1, and a gate for each element of the heads."""
    biased, D, H = config.attention_bias, config.hidden_size, config.head_dim
    found = usual_attention(config, qkv_bias=biased, o_bias=biased) | head_norms(config, 0.0)
    rows = config.num_attention_heads * H
    found["gate_proj"] = weight((rows, D), ("heads", "embed"), config.initializer_range, unit=H)
    return found | ({"gate_bias": bias(rows, "heads", unit=H)} if biased else {})


def names(config: Any, there: str, own: Mapping[str, str]) -> dict[str, Stored]:
    """{path: name on disk}: a head's rows of q_proj are its query, then its gate. own: {leaf: path}."""
    H, heads = config.head_dim, config.num_attention_heads
    found: dict[str, Stored] = {}
    for kind, suffix in (("proj", "weight"), ("bias", "bias")):
        for i, name in enumerate(("q", "gate")):
            if f"{name}_{kind}" in own:
                rows = TensorSlice(f"{there}.q_proj.{suffix}", i * H, (i + 1) * H, 2 * heads * H, groups=heads)
                found[own[f"{name}_{kind}"]] = rows
    return found


def attend(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Any, ctx: Context) -> Tensor:
    """Attention of x [B, S, D], each head times the sigmoid of its gate."""
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    gate = split_heads(linear(x, weights["gate_proj"], weights.get("gate_bias")), config.head_dim)
    q = rms_norm_zero_centered(q, weights["q_norm"], eps=config.rms_norm_eps)
    k = rms_norm_zero_centered(k, weights["k_norm"], eps=config.rms_norm_eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    return project_out(weights, mixed * elementwise(torch.sigmoid, gate))

"""The declaration of one parameter. A family's `spec` is a tree of these, and everything else follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Normal:
    """Draws from N(0, std^2)."""

    std: float = 0.02


@dataclass(frozen=True)
class Constant:
    """Fills with one value: norms begin at 1, biases at 0."""

    value: float = 0.0


@dataclass(frozen=True)
class Leaf:
    """One parameter.

    shape: sizes; a linear weight is [out, in].
    dtype: what it is declared in; callers may ask for another.
    axes: one logical name per dimension (embed, heads, kv_heads, mlp, vocab, expert, ...), which a sharding plan maps
        to a mesh.
    init: how it begins.
    trainable: False for state of the checkpoint that no gradient teaches (a router's selection bias).
    decay: whether weight decay applies (not to norms and biases).
    keep_dtype: stays in `dtype` when the model is cast.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...]
    init: Normal | Constant
    trainable: bool = True
    decay: bool = True
    keep_dtype: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"A Leaf of shape {self.shape} needs {len(self.shape)} axes, not {self.axes}.")


def weight(shape: tuple[int, ...], axes: tuple[str, ...], std: float = 0.02) -> Leaf:
    """A matrix or table: normal init, decays."""
    return Leaf(shape, torch.float32, axes, Normal(std))


def norm(size: int, axis: str, value: float = 1.0) -> Leaf:
    """A norm's weight: no decay."""
    return Leaf((size,), torch.float32, (axis,), Constant(value), decay=False)


def bias(size: int, axis: str) -> Leaf:
    """A bias: zero, no decay."""
    return Leaf((size,), torch.float32, (axis,), Constant(0.0), decay=False)


def layer_norm_leaves(name: str, size: int, axis: str) -> dict[str, Leaf]:
    """A LayerNorm's weight `name` and its bias beside it."""
    return {name: norm(size, axis), f"{name}_bias": bias(size, axis)}


def attention_leaves(
    width: int, heads: int, kv_heads: int, head_dim: int, *, std: float, qkv_bias: bool = False, o_bias: bool = False
) -> dict[str, Leaf]:
    """q, k, v and o projections for grouped queries, with their biases."""
    q, kv = heads * head_dim, kv_heads * head_dim
    leaves = {
        "q_proj": weight((q, width), ("heads", "embed"), std),
        "k_proj": weight((kv, width), ("kv_heads", "embed"), std),
        "v_proj": weight((kv, width), ("kv_heads", "embed"), std),
        "o_proj": weight((width, q), ("embed", "heads"), std),
    }
    if qkv_bias:
        leaves |= {"q_bias": bias(q, "heads"), "k_bias": bias(kv, "kv_heads"), "v_bias": bias(kv, "kv_heads")}
    if o_bias:
        leaves["o_bias"] = bias(width, "embed")
    return leaves


def gated_mlp_leaves(width: int, inner: int, *, std: float, biases: bool = False) -> dict[str, Leaf]:
    """gate, up and down projections, with their biases."""
    leaves = {
        "gate_proj": weight((inner, width), ("mlp", "embed"), std),
        "up_proj": weight((inner, width), ("mlp", "embed"), std),
        "down_proj": weight((width, inner), ("embed", "mlp"), std),
    }
    if biases:
        leaves |= {"gate_bias": bias(inner, "mlp"), "up_bias": bias(inner, "mlp"), "down_bias": bias(width, "embed")}
    return leaves


def plain_mlp_leaves(width: int, inner: int, *, std: float, biases: bool = True) -> dict[str, Leaf]:
    """up and down projections of an MLP without a gate, with their biases."""
    leaves = {
        "up_proj": weight((inner, width), ("mlp", "embed"), std),
        "down_proj": weight((width, inner), ("embed", "mlp"), std),
    }
    return leaves | {"up_bias": bias(inner, "mlp"), "down_bias": bias(width, "embed")} if biases else leaves

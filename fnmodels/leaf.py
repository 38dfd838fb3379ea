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

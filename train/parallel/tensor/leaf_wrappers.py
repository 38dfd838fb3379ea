"""Tensor-parallel leaf wrappers: how `F.linear` and `F.rms_norm` apply a column- or row-parallel shard.

A wrapper replaces the weight in the layer, so a family's block runs as it is written. A column-parallel weight enters
the region before it multiplies, a row-parallel one leaves it afterwards; see `train.comm.region`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.invariant.rows import invariant_linear, pairwise_sum, rows_are_invariant
from fnmodels.ops.moe.choice import choose_experts
from fnmodels.options import Experts
from train.comm import collectives
from train.comm.region import Region


@dataclass
class RegionEntry:
    """Entry to the region in one call of a block: projections that read the same x share one collective."""

    region: Region
    last: tuple[Tensor, Tensor] | None = None
    last_joined: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.last is None or self.last[0] is not x:
            self.last = (x, self.region.enter(x))
        return self.last[1]

    def joined(self, x: Tensor) -> Tensor:
        """x with all positions, with which every rank computes the same."""
        if self.last_joined is None or self.last_joined[0] is not x:
            self.last_joined = (x, self.region.join(x))
        return self.last_joined[1]


@dataclass(frozen=True, eq=False)
class _Map:
    """A shard of a projection's weight. product(map, x, bias): what F.linear computes with it."""

    product: Callable[..., Tensor]
    weight: Any
    entry: RegionEntry
    invariant: ClassVar[bool] = True  # see `_product`

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.weight.dtype
        return dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.linear or isinstance(args[0], cls):
            return NotImplemented
        return args[1].product(args[1], args[0], *args[2:], **(kwargs or {}))


def _product(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """F.linear, and with kernel="invariant" its product, whose rows have bits of their own."""
    return invariant_linear(x, weight, bias) if rows_are_invariant() else F.linear(x, weight, bias)


def _read(own: _Map, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Column-parallel: rows [out / size, in], or all rows of a replicated weight whose outputs are used inside."""
    return _product(own.entry(x), own.weight, bias)


def _write(own: _Map, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Row-parallel: columns [out, in / size]; the bias is added once, after the reduction."""
    y = own.entry.region.leave(_product(x, own.weight))
    return y if bias is None else y + bias


def _gather(own: _Map, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replicated: of all positions, from this rank's positions of x."""
    return _product(own.entry.joined(x), own.weight, bias)


def _cut(own: _Map, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replicated: this rank's positions of the product; the bias is added to these, as its role says."""
    y = own.entry.region.cut(_product(x, own.weight))
    return y if bias is None else y + bias


@dataclass(frozen=True, eq=False)
class _Norm:
    """A shard of the weight of an RMS norm over all heads or neurons, which are sharded over the ranks."""

    weight: Any
    entry: RegionEntry

    def to(self, dtype: torch.dtype) -> _Norm:
        return _Norm(self.weight.to(dtype), self.entry)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.weight.dtype
        return dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.rms_norm:  # in low precision the norm runs without its weight, unseen here
            raise NotImplementedError(
                "This norm over all heads or neurons is taken in low precision, in which it is not sharded: compute in "
                "fp32, or leave heads and mlp out of the rules."
            )
        x, own, eps = args[0], kwargs["weight"], kwargs["eps"]
        region = own.entry.region
        ordered = rows_are_invariant()
        own_squares = pairwise_sum(x.square(), -1)[..., None] if ordered else x.square().sum(-1, keepdim=True)
        squares = collectives.leave(own_squares, region.group, ordered=ordered)
        mean = region.shared(squares) / (x.shape[-1] * region.size)
        return x * torch.rsqrt(mean + eps) * own.weight


@dataclass(frozen=True, eq=False)
class _Along:
    """The weight of a convolution along rows, of whose positions this rank has some outside of the convolution."""

    weight: Tensor
    entry: RegionEntry

    def along_rows(self, convolve: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *given: Any, **how: Any) -> Any:
        """(this rank's positions of the result, the state after all) of convolve(x, weight, ...)."""
        y, after = convolve(self.entry.joined(x), self.weight, *given, **how)
        return self.entry.region.cut(y), after


NODES: dict[str, Callable[[Any, RegionEntry], Any]] = {
    "read": functools.partial(_Map, _read),
    "write": functools.partial(_Map, _write),
    "norm": _Norm,
    "gather": functools.partial(_Map, _gather),
    "cut": functools.partial(_Map, _cut),
    "along": _Along,
}


def width_sharded_experts(
    region: Region,
    leaves: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    experts: str | Experts,
    **how: Any,
) -> Tensor:
    """Experts whose MLP width is sharded (`fnmodels.ops.moe.experts`); tokens enter from the residual stream."""
    x, weights = region.enter(x, 0), region.enter(weights, 0)
    if region.sequence:
        indices = collectives.join(indices, 0, region.group)
        valid = collectives.join(valid.byte(), 0, region.group).bool()
    if "down_bias" in leaves and region.rank:  # the reduction must add the bias once
        leaves = {**leaves, "down_bias": leaves["down_bias"] * 0}
    run = choose_experts(experts, x, *leaves.values())
    return region.leave(run(leaves, x, weights, indices, valid, **how), 0)

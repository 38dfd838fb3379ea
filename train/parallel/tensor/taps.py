"""Taps and edits of heads and neurons over tensor parallelism, of which each rank has some: all ranks see all of them.

An edit gets the gathered value on every rank, and each rank goes on with its own shard of the result. What the edit
computes is used differently by the ranks, so its gradients are partial and are summed (`collectives.all_gather`, and
`Region.shared` for the edit's tensors). A recorded value is for the same use on all of them (`collectives.join`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels import tap_names
from fnmodels.models.common.context import Context
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import family_of
from train.comm import collectives
from train.comm.region import Region

from .leaf_roles import Use

Shape = tuple[int | None, ...]  # of a full value; None for a dimension of the batch


def inside(names: Iterable[str], uses: Mapping[str, Use]) -> list[str]:
    """The names among these that a layer computes in a region; ValueError for a norm over heads of several ranks."""
    regions = {path.partition(".")[0] for path, use in uses.items() if use.kind in ("read", "write")}
    found = sorted(name for name in names if "." in name and name.partition(".")[0] in regions)
    for name in found:
        norm = name.removesuffix(".scale")
        if norm in uses and uses[norm].kind == "norm":
            raise ValueError(
                f"The norm {norm!r} is over the heads of all processes, of which each has some: read and edit it "
                "without tensor parallelism."
            )
    return found


def context(region: Region, config: DecoderConfig, kind: str, names: Iterable[str]) -> Callable[..., Context]:
    """The `context` of options for a layer of this kind, whose taps and edits of `names` are of all ranks."""
    known = tap_names(config)
    layer = family_of(config).kinds(config).index(kind)
    shapes = {name: _shape(known[f"layers.{layer}.{name}"]) for name in names if f"layers.{layer}.{name}" in known}
    return functools.partial(_Gathered, region, shapes)


def _shape(said: str) -> Shape:
    return tuple(int(size) if size.isdigit() else None for size in said[1:-1].split(", "))


@dataclass(frozen=True)
class _Shard:
    """A value in a region as a shard of the full one along `dim`; None if every rank has all of it.

    copies: how many ranks have the same key head, where there are fewer of these than ranks.
    """

    region: Region
    dim: int | None
    copies: int = 1

    @classmethod
    def of(cls, value: Tensor, shape: Shape, region: Region) -> _Shard:
        """shape: of the full value."""
        for dim, size in enumerate(shape):
            if size is not None and value.shape[dim] != size:
                return cls(region, dim, value.shape[dim] * region.size // size)
        return cls(region, None)

    def full(self, value: Tensor) -> Tensor:
        """The full value, which an edit gets."""
        if self.dim is None:
            return value
        return self._once(collectives.all_gather(value, self.dim, self.region.group))

    def own(self, full: Tensor) -> Tensor:
        """This rank's part of what an edit returns."""
        if self.dim is None:
            return full
        copied = full if self.copies == 1 else full.repeat_interleave(self.copies, self.dim)
        size = copied.shape[self.dim] // self.region.size
        return copied.narrow(self.dim, self.region.rank * size, size)

    def shown(self, value: Tensor) -> Tensor:
        """The full value for use outside, where all ranks have the same gradient."""
        if self.dim is None:
            return collectives.leave(value / self.region.size, self.region.group).to(value.dtype)
        return self._once(collectives.join(value, self.dim, self.region.group))

    def _once(self, full: Tensor) -> Tensor:
        index = [slice(None)] * full.ndim
        assert self.dim is not None
        index[self.dim] = slice(None, None, self.copies)
        return full if self.copies == 1 else full[tuple(index)]


class _Gathered(Context):
    def __init__(self, region: Region, shapes: Mapping[str, Shape], *given: Any) -> None:
        super().__init__(*given)
        self.region, self.shapes = region, shapes

    def tap(self, name: str, value: Tensor) -> Tensor:
        if name not in self.shapes or not self.wants(name):
            return super().tap(name, value)
        shard = _Shard.of(value, self.shapes[name], self.region)
        if name in self.edits:
            given = self.tensors["edit_tensors"].get(name, {})
            tensors = {key: self.region.shared(tensor) for key, tensor in given.items()}
            value = shard.own(self.edits[name](shard.full(value), tensors))
            self.aux["edited"] = (*self.aux.get("edited", ()), name)
        if name in self.taps:
            self.aux[name] = shard.shown(value)
        return value

"""Collectives as linear maps over processes, with their transposes as gradients: the only file that sends tensors.

Each is an autograd.Function over plain tensors, with rules for jvp and vmap, and its backward is again one of them: so
all of torch.func works, forward over reverse included. torch's functional collectives have neither rule; in compiled
graphs, which support reverse mode only, torch.compile substitutes them for the calls here.
There are two kinds of gradient, and the caller must choose: `leave` is for partial sums whose result all processes use
in the same way (each has the full gradient), `all_gather` for shards whose result they use differently (each has a
partial gradient, and these are summed). `take` and `join` are of the first kind: replicated values have full gradients.

All processes of the group must make the same calls in the same order: check anything that may differ before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Newer torch deprecates the older names.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: ProcessGroup, *, dtype: torch.dtype | None = None) -> Tensor:
    """The x of all processes, equal in shape, joined along `dim`. Backward: `reduce_scatter`.

    dtype: of the message and the result; gradients are summed in the wider of it and x's.
    """
    return _linear(x, _AllGather(dim % x.ndim, group, x.dtype, dtype or x.dtype))


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup, *, ordered: bool = False) -> Tensor:
    """The sum of x over processes, of which each gets its equal shard along `dim`. Backward: `all_gather`.

    ordered: whether processes are added in the order of their ranks, see `leave`.
    """
    _check_parts(x, dim, group)
    if ordered and dist.get_world_size(group) > 2:
        return take(leave(x, group, ordered=True), dim, group)
    return _linear(x, _ReduceScatter(dim % x.ndim, group, x.dtype, x.dtype))


def enter(x: Tensor, group: ProcessGroup, *, ordered: bool = False) -> Tensor:
    """x, replicated, for different use in each process (Megatron's f). Backward: the sum of the gradients.

    ordered: of that sum, see `leave`.
    """
    return _linear(x, _Copy(group, ordered))


def enter_all(xs: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """`enter` of each, all of one dtype; backward in one message, in fp32 at least, because these are parameters."""
    how = _EnterAllTraced if torch.compiler.is_compiling() else _EnterAll
    return list(how.apply(group, *xs)) if xs else []


def leave(x: Tensor, group: ProcessGroup, *, ordered: bool = False) -> Tensor:
    """The sum of x over processes, for the same use in all (Megatron's g). Backward: the identity.

    ordered: whether processes are added in the order of their ranks. Of more than two, an element's order depends else
    on its place in the message, and so do its bits.
    """
    return _linear(x, _Sum(group, ordered))


def take(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The equal shard along `dim` that each process takes of x, replicated. Backward: `join`."""
    _check_parts(x, dim, group)
    return _linear(x, _Take(dim % x.ndim, group))


def join(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The x of all processes joined along `dim`, for the same use in all. Backward: `take`."""
    return _linear(x, _Join(dim % x.ndim, group))


def all_to_all(x: Tensor, group: ProcessGroup, *, split: int, join: int) -> Tensor:
    """Sends the r-th equal part of x along `split` to process r; joins the received parts along `join`, by rank."""
    _check_parts(x, split, group)
    return _linear(x, _AllToAll(split % x.ndim, join % x.ndim, group))


def exchange(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Sends the first sent[0] rows of x to process 0, the next sent[1] to 1, ...; receives received[r] rows from r.

    The counts are Python ints; sent[r] of this process must equal received[this process] of process r, and may be 0.
    """
    if sum(sent) != len(x):
        raise ValueError(f"sent adds up to {sum(sent)} rows, but x has {len(x)}.")
    return _linear(x, _Exchange(tuple(sent), tuple(received), group))


def _check_parts(x: Tensor, dim: int, group: ProcessGroup) -> None:
    size = dist.get_world_size(group)
    if x.shape[dim] % size:
        raise ValueError(f"Dimension {dim} of {list(x.shape)} is not a multiple of the {size} processes that share it.")


@torch.no_grad()
def summed(x: Tensor, *groups: ProcessGroup) -> Tensor:
    """The sum of x over one group after the other, in x's dtype, without a gradient: for counts and norms."""
    total = x.detach().clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def maximum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The elementwise maximum of x over processes, without a gradient."""
    largest = x.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


@torch.no_grad()
def broadcast(x: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """The x of process `source` of the group, in all; the others pass a tensor like it, which is overwritten."""
    dist.broadcast(x, dist.get_global_rank(group, source), group=group)
    return x


@torch.no_grad()
def shift(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Starts sending x to the next process; the returned function waits for the previous process' x. No gradient."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return lambda: x
    sent = x.contiguous()
    came = torch.empty_like(sent)
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    ways = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, came, before, group)]
    under_way = dist.batch_isend_irecv(ways)

    def wait(kept: Tensor = sent) -> Tensor:  # keeps `sent` alive until it is sent
        for work in under_way:
            work.wait()
        return came

    return wait


class Linear(Protocol):
    """A linear map over the processes."""

    def run(self, x: Tensor) -> Tensor: ...
    def transposed(self) -> Linear: ...


def _linear(x: Tensor, how: Linear) -> Tensor:
    return (_Traced if torch.compiler.is_compiling() else _Apply).apply(x, how)


class _Traced(torch.autograd.Function):
    """Has no jvp rule, because torch.compile refuses Functions with one."""

    @staticmethod
    def forward(x: Tensor, how: Linear) -> Tensor:
        return how.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Linear], output: Tensor) -> None:
        ctx.how = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _linear(grad, ctx.how.transposed()), None


class _Apply(_Traced):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _linear(tangent, ctx.how)

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int, None], x: Tensor, how: Linear) -> tuple[Tensor, int]:
        many, place = _batched(how)
        return _linear(x.movedim(in_dims[0], place), many), place


class _EnterAllTraced(torch.autograd.Function):
    @staticmethod
    def forward(group: ProcessGroup, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        flat = torch.cat([grad.flatten() for grad in grads])
        wide = torch.promote_types(flat.dtype, torch.float32)
        total = _linear(flat.to(wide), _Sum(ctx.group)).to(flat.dtype)
        parts = total.split([grad.numel() for grad in grads])
        return None, *(part.view(grad.shape) for part, grad in zip(parts, grads, strict=True))


class _EnterAll(_EnterAllTraced):
    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def vmap(_: Any, in_dims: tuple[Any, ...], group: ProcessGroup, *xs: Tensor) -> tuple[Any, tuple[Any, ...]]:
        return _EnterAll.apply(group, *xs), in_dims[1:]


@dataclass(frozen=True)
class _Converted:
    """The fields of maps between shards and full tensors whose dtypes may differ."""

    dim: int
    group: ProcessGroup
    source: torch.dtype
    target: torch.dtype


class _AllGather(_Converted):
    def run(self, x: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        x = x.to(self.target).contiguous()
        out = x.new_empty(size, *x.shape)
        _GATHER(out.view(-1), x.view(-1), group=self.group)
        return out.flatten(0, 1) if not self.dim else torch.cat(out.unbind(), self.dim)

    def transposed(self) -> Linear:
        return _ReduceScatter(self.dim, self.group, self.target, self.source)


class _ReduceScatter(_Converted):
    def run(self, x: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        x = x.to(torch.promote_types(self.source, self.target))
        parts = x.unflatten(self.dim, (size, -1)).movedim(self.dim, 0).contiguous()
        out = torch.empty_like(parts[0])
        _SCATTER(out.view(-1), parts.view(-1), group=self.group)
        return out.to(self.target)

    def transposed(self) -> Linear:
        return _AllGather(self.dim, self.group, self.target, self.source)


@dataclass(frozen=True)
class _Copy:
    group: ProcessGroup
    ordered: bool = False

    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def transposed(self) -> Linear:
        return _Sum(self.group, self.ordered)


@dataclass(frozen=True)
class _Sum:
    group: ProcessGroup
    ordered: bool = False

    def run(self, x: Tensor) -> Tensor:
        if self.ordered and dist.get_world_size(self.group) > 2:
            first, *others = _AllGather(0, self.group, x.dtype, x.dtype).run(x[None]).unbind()
            for other in others:
                first = first + other
            return first
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def transposed(self) -> Linear:
        return _Copy(self.group, self.ordered)


@dataclass(frozen=True)
class _Take:
    dim: int
    group: ProcessGroup

    def run(self, x: Tensor) -> Tensor:
        return x.chunk(dist.get_world_size(self.group), self.dim)[dist.get_rank(self.group)].contiguous()

    def transposed(self) -> Linear:
        return _Join(self.dim, self.group)


@dataclass(frozen=True)
class _Join:
    dim: int
    group: ProcessGroup

    def run(self, x: Tensor) -> Tensor:
        return _AllGather(self.dim, self.group, x.dtype, x.dtype).run(x)

    def transposed(self) -> Linear:
        return _Take(self.dim, self.group)


@dataclass(frozen=True)
class _AllToAll:
    split: int
    join: int
    group: ProcessGroup

    def run(self, x: Tensor) -> Tensor:
        parts = x.unflatten(self.split, (dist.get_world_size(self.group), -1)).movedim(self.split, 0).contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out.view(-1), parts.view(-1), group=self.group)
        return torch.cat(out.unbind(), self.join)

    def transposed(self) -> Linear:
        return replace(self, split=self.join, join=self.split)


@dataclass(frozen=True)
class _Exchange:
    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: ProcessGroup

    def run(self, x: Tensor) -> Tensor:
        out = x.new_empty(sum(self.received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(self.received), list(self.sent), group=self.group)
        return out

    def transposed(self) -> Linear:
        return replace(self, sent=self.received, received=self.sent)


def _batched(how: Linear) -> tuple[Linear, int]:
    """The same map of a batch of x, as vmap needs it, and the batch dimension."""
    match how:
        case _Exchange():
            return how, 1  # rows stay first
        case _AllToAll():
            return replace(how, split=how.split + 1, join=how.join + 1), 0
        case _AllGather() | _ReduceScatter() | _Take() | _Join():
            return replace(how, dim=how.dim + 1), 0
        case _:
            return how, 0

"""Gated MLPs of sorted rows, expert after expert, with gradients written where they belong.

Autograd would make a gradient for each expert's slice and then one stack of them all: a copy of every weight, on a CPU
a tenth of the time. Here products write into their part of one tensor, forward and backward, and the activation, which
costs little, is computed again in the backward in place of being kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels.ops.autograd_guard import FirstOrder, refuse

Act = Callable[[Tensor, Tensor], Tensor]


def loop_mlps(experts: dict[str, Tensor], rows: Tensor, sizes: list[int], act: Act) -> Tensor:
    """[N, D]: rows [N, D] through experts of `sizes` rows each, in order. First derivatives only, and no vmap.

    ValueError if what `act` returns would learn by itself: the backward knows of rows and leaves only.
    """
    nothing = rows.new_empty(0, experts["gate_proj"].shape[1])
    if act(nothing, nothing).requires_grad:
        raise ValueError(
            'experts="loop" gives no gradient to tensors that `act` takes from around it, and this one\'s result needs '
            'one without its arguments: detach them, or take experts="grouped" or "dense".'
        )
    return _Loop.apply(act, tuple(sizes), tuple(experts), rows, *experts.values())[0]


def _parts(sizes: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of those that have any."""
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class _Loop(FirstOrder):
    """Outputs: (result, gate, up), the latter two for the backward only."""

    @staticmethod
    def forward(
        act: Act, sizes: tuple[int, ...], names: tuple[str, ...], rows: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        each = [dict(zip(names, slices, strict=True)) for slices in zip(*(t.unbind(0) for t in leaves), strict=True)]
        width = leaves[names.index("gate_proj")].shape[1]
        gate, up = (rows.new_empty(len(rows), width) for _ in range(2))
        out = torch.empty_like(rows)
        for e, part in _parts(sizes):
            _linear(rows[part], each[e]["gate_proj"], each[e].get("gate_bias"), gate[part])
            _linear(rows[part], each[e]["up_proj"], each[e].get("up_bias"), up[part])
            _linear(act(gate[part], up[part]), each[e]["down_proj"], each[e].get("down_bias"), out[part])
        return out, gate, up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.act, ctx.sizes, ctx.names, *tensors = inputs
        ctx.save_for_backward(*output[1:], *tensors)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        nothing = (None, None, None)
        needs = tuple(ctx.needs_input_grad[3:])
        if slope is None:
            return *nothing, *(None for _ in needs)
        grads = _Backward.apply(ctx.act, ctx.sizes, ctx.names, needs, slope, *ctx.saved_tensors)
        return *nothing, *(grad if need else None for grad, need in zip(grads, needs, strict=True))


class _Backward(FirstOrder):
    """A function of its own, so that its products may write into slices wherever gradients are being recorded."""

    @staticmethod
    def forward(
        act: Act,
        sizes: tuple[int, ...],
        names: tuple[str, ...],
        needs: tuple[bool, ...],
        slope: Tensor,
        gate: Tensor,
        up: Tensor,
        rows: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        each = [dict(zip(names, slices, strict=True)) for slices in zip(*(t.unbind(0) for t in leaves), strict=True)]
        d_rows = torch.empty_like(rows) if needs[0] else rows.new_empty(0)
        used = {e for e, _ in _parts(sizes)}
        grads = {}
        for name, leaf, need in zip(names, leaves, needs[1:], strict=True):
            grads[name] = leaf.new_empty(leaf.shape) if need else leaf.new_empty(0)
            for e in set(range(len(sizes))) - used if need else ():
                grads[name][e].zero_()
        wanted = {name for name, need in zip(names, needs[1:], strict=True) if need}
        for e, part in _parts(sizes):
            weights, x, d_out = each[e], rows[part], slope[part]
            with torch.enable_grad():
                made = [t[part].detach().requires_grad_() for t in (gate, up)]
                inner = act(*made)
            d_gate, d_up = torch.autograd.grad(inner, made, d_out @ weights["down_proj"])
            for kind, d, given in (("gate", d_gate, x), ("up", d_up, x), ("down", d_out, inner.detach())):
                if f"{kind}_proj" in wanted:
                    torch.mm(d.t(), given, out=grads[f"{kind}_proj"][e])
                if f"{kind}_bias" in wanted:
                    torch.sum(d, 0, out=grads[f"{kind}_bias"][e])
            if needs[0]:
                torch.mm(d_gate, weights["gate_proj"], out=d_rows[part])
                d_rows[part].addmm_(d_up, weights["up_proj"])
        return d_rows, *(grads[name] for name in names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> NoReturn:
        refuse("loop")

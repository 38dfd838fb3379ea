"""MLPs of sorted rows, one expert after another, with gradients written straight into the stacked tensors.

Autograd would make a gradient per expert's slice and then stack them: a copy of every weight, a tenth of the time on a
CPU. Here products write into their slice of one tensor, forward and backward, and the cheap activation is recomputed in
the backward instead of being saved.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels.ops.autograd_guard import FirstOrder, refuse

Act = Callable[..., Tensor]  # (gate, up) -> inner; (up) -> inner for experts without a gate


def inputs_of(experts: Iterable[str]) -> tuple[str, ...]:
    """The projections that read an expert's input, by the names of its leaves: gate and up, or up alone."""
    names = set(experts)
    return tuple(name for name in ("gate", "up") if f"{name}_proj" in names)


def loop_mlps(experts: dict[str, Tensor], rows: Tensor, sizes: list[int], act: Act) -> Tensor:
    """[N, D]: rows [N, D], sorted by expert with `sizes` rows each, through their experts. First derivatives, no vmap.

    ValueError if `act` depends on other tensors that require gradients, which this backward would not reach.
    """
    empty = rows.new_empty(0, experts["up_proj"].shape[1])
    if act(*[empty] * len(inputs_of(experts))).requires_grad:
        raise ValueError(
            'experts="loop" gives no gradient to tensors that `act` takes from around it, and this one\'s result needs '
            'one without its arguments: detach them, or take experts="grouped" or "dense".'
        )
    return _Loop.apply(act, tuple(sizes), tuple(experts), rows, *experts.values())[0]


def _spans(sizes: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """(expert, slice of its rows) of every expert with rows."""
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
    """Outputs (result, inputs of the activation); all but the first are saved for the backward only."""

    @staticmethod
    def forward(
        act: Act, sizes: tuple[int, ...], names: tuple[str, ...], rows: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        per_expert = [
            dict(zip(names, slices, strict=True)) for slices in zip(*(t.unbind(0) for t in leaves), strict=True)
        ]
        width = leaves[names.index("up_proj")].shape[1]
        inputs = {name: rows.new_empty(len(rows), width) for name in inputs_of(names)}
        out = torch.empty_like(rows)
        for e, span in _spans(sizes):
            weights = per_expert[e]
            for name, value in inputs.items():
                _linear(rows[span], weights[f"{name}_proj"], weights.get(f"{name}_bias"), value[span])
            inner = act(*(value[span] for value in inputs.values()))
            _linear(inner, weights["down_proj"], weights.get("down_bias"), out[span])
        return out, *inputs.values()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.act, ctx.sizes, ctx.names, *tensors = inputs
        ctx.save_for_backward(*output[1:], *tensors)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        no_grads = (None, None, None)
        needs = tuple(ctx.needs_input_grad[3:])
        if grad_output is None:
            return *no_grads, *(None for _ in needs)
        grads = _Backward.apply(ctx.act, ctx.sizes, ctx.names, needs, grad_output, *ctx.saved_tensors)
        return *no_grads, *(grad if need else None for grad, need in zip(grads, needs, strict=True))


class _Backward(FirstOrder):
    """A Function of its own, so that its products may write into slices even while a graph is recorded."""

    @staticmethod
    def forward(
        act: Act,
        sizes: tuple[int, ...],
        names: tuple[str, ...],
        needs: tuple[bool, ...],
        grad_output: Tensor,
        *saved: Tensor,
    ) -> tuple[Tensor, ...]:
        """saved: the inputs of the activation, the rows, and the leaves."""
        kinds = inputs_of(names)
        inputs, rows, leaves = saved[: len(kinds)], saved[len(kinds)], saved[len(kinds) + 1 :]
        per_expert = [
            dict(zip(names, slices, strict=True)) for slices in zip(*(t.unbind(0) for t in leaves), strict=True)
        ]
        d_rows = torch.empty_like(rows) if needs[0] else rows.new_empty(0)
        used = {e for e, _ in _spans(sizes)}
        grads = {}
        for name, leaf, need in zip(names, leaves, needs[1:], strict=True):
            grads[name] = leaf.new_empty(leaf.shape) if need else leaf.new_empty(0)
            for e in set(range(len(sizes))) - used if need else ():
                grads[name][e].zero_()
        wanted = {name for name, need in zip(names, needs[1:], strict=True) if need}
        for e, span in _spans(sizes):
            weights, x, d_out = per_expert[e], rows[span], grad_output[span]
            with torch.enable_grad():
                given = [t[span].detach().requires_grad_() for t in inputs]
                inner = act(*given)
            d_given = torch.autograd.grad(inner, given, d_out @ weights["down_proj"])
            products = [(kind, d, x) for kind, d in zip(kinds, d_given, strict=True)]
            for kind, d, value in (*products, ("down", d_out, inner.detach())):
                if f"{kind}_proj" in wanted:
                    torch.mm(d.t(), value, out=grads[f"{kind}_proj"][e])
                if f"{kind}_bias" in wanted:
                    torch.sum(d, 0, out=grads[f"{kind}_bias"][e])
            if needs[0]:
                torch.mm(d_given[0], weights[f"{kinds[0]}_proj"], out=d_rows[span])
                for kind, d, _ in products[1:]:
                    d_rows[span].addmm_(d, weights[f"{kind}_proj"])
        return d_rows, *(grads[name] for name in names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refuse("loop")

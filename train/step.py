"""The train step: gradients of sums over microbatches, one division by the global count, one update.

    step = make_step(functools.partial(next_token_loss, config=config), adamw(3e-4), clip=1.0)
    state = init_state(params, optimizer)
    state, metrics = step(state, batch)

Remat and compilation reach the model through the loss function's `layer_fn`, so nothing is patched. The two halves can
be called apart: `train.gradients.gradient_sums`, and `update` with what it returns.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree
from train.losses.moe_balance import moved_biases
from train.optim.base import Optimizer, apply_updates, clip_factor, global_norm, trainable_mask, with_paths
from train.parallel.mesh import Mesh, Strategy

from .gradients import LossFn, Sums, gradient_sums, valid_count
from .loss_call import Batch, microbatches
from .state import State, consume

Step = Callable[[State, Batch | Sequence[Batch]], tuple[State, dict[str, Any]]]


def make_step(
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    remat: str = "none",
    compile: str = "none",
    inplace: bool = True,
    balance_rate: float | None = None,
    mesh: Mesh | None = None,
    strategy: Strategy | None = None,
) -> Step:
    """A function step(state, batch) -> (state, metrics).

    loss_fn(params, batch) -> (sum, count) or (sum, count, aux), aux a tree of sums. Where it has a keyword `layer_fn`
        the step passes remat and compile="block" there, and where it has `layout`, the batch's
        `fnmodels.document_layout`, made on the host. What a functools.partial has bound already stays.
    batch: a dict of [B, S], or of [1, T] with packed documents; or a list of such, of any lengths: microbatches that
        the caller has cut, which make one step together.
    accumulate: the rows of the batch are taken in this many parts, as equal as can be; gradients are summed in fp32 at
        least and divided once by the number of valid tokens of the whole batch, so that any split gives the same step.
        Memory is that of the largest part and one copy of the gradients, however many parts there are.
    clip: the largest global norm of the gradient; None: none.
    remat: "none"; "full": a layer keeps its input only; "every:N": every Nth layer of each kind does; "selective":
        layers keep the results of matmuls and attention and recompute what lies between.
    compile: "none"; "block": one compilation per kind of layer; "whole": the loss as one graph. Only the layout of rows
        that are one document from position 0 is passed to compiled code (others would compile anew for each batch).
    inplace: the State that goes in is used up and its tensors are written (see `State`). False leaves it as it was, at
        the cost of a copy of parameters and optimizer state.
    balance_rate: after each update every layer's `selection_bias` goes up by this for experts that got fewer tokens of
        the batch than the mean, down for the others (`update_bias`). The loss function must then have a keyword `aux`
        and give counts [sparse layers, E] in its aux, as `next_token_loss` does. None: the biases stay.
    mesh: over many processes, see `train.parallel.step`: the State's leaves are DTensors, the batch is the whole one in
        every process, and so are the metrics. strategy: how they share the work, where there is a choice.

    metrics, 0-d tensors: loss (mean over valid tokens, before the update), count, grad_norm (before clipping), lr,
    finite; aux, summed, where there is one; and lr_of, the rate of each group of `partition`. Where the loss or the
    norm is not finite, the parameters and the optimizer's state keep their bits, `finite` is False, and the step counts
    as made. A part without valid tokens adds nothing, and a batch of such alone has loss 0 and gradient 0. Any other
    must reach each leaf that trains by at least one of its parts, or a ValueError names those that would only decay;
    over a mesh, where gathered leaves always have a gradient, this is not checked.
    With an optimizer that has `apply_`, nothing waits for the device but the making of a layout.
    """
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate is {accumulate!r}; it must be a whole number, at least 1.")
    check_limits(clip, balance_rate)
    check_strategy(mesh, strategy)
    if mesh is not None:
        from train.parallel.step import make_step_over

        return make_step_over(
            mesh,
            loss_fn,
            optimizer,
            accumulate=accumulate,
            clip=clip,
            remat=remat,
            compile=compile,
            inplace=inplace,
            balance_rate=balance_rate,
            strategy=strategy or Strategy(),
        )
    sums_of = gradient_sums(loss_fn, optimizer, remat=remat, compile=compile, counts=balance_rate is not None)
    last: weakref.ref[State] | None = None

    def step(state: State, batch: Batch | Sequence[Batch]) -> tuple[State, dict[str, Any]]:
        nonlocal last
        if last is None or last() is not state:  # what this step returned has the structure of what it was given
            check_state(optimizer, state)
        sums = sums_of(state.params, microbatches(batch, accumulate))
        after, metrics = update(optimizer, state, sums, clip=clip, inplace=inplace, balance_rate=balance_rate)
        last = weakref.ref(after)
        return after, metrics

    return step


def check_limits(clip: float | None, balance_rate: float | None) -> None:
    if clip is not None and not (isinstance(clip, (Real, Tensor)) and clip > 0):
        raise ValueError(f"clip is {clip!r}; it must be a number above 0, or None.")
    if balance_rate is not None and not (isinstance(balance_rate, (Real, Tensor)) and balance_rate >= 0):
        raise ValueError(f"balance_rate is {balance_rate!r}; it must be a number, at least 0, or None.")


def check_strategy(mesh: Mesh | None, strategy: Strategy | None) -> None:
    if mesh is None and strategy is not None:
        raise ValueError(f"{strategy} is for many processes: it needs a mesh.")


@torch.no_grad()
def update(
    optimizer: Optimizer,
    state: State,
    sums: Sums,
    *,
    clip: float | None = None,
    inplace: bool = True,
    balance_rate: float | None = None,
    norm_of: Callable[[list[Tensor]], Tensor] = global_norm,
    biases_of: Callable[..., dict[str, Tensor]] = moved_biases,
) -> tuple[State, dict[str, Any]]:
    """(the State after one update with the gradients of `sums`, which are used up; the metrics of `make_step`).

    norm_of: the global norm of the gradients, of which this process may hold parts. biases_of: `moved_biases`, of which
    it may hold parts too.
    """
    _check_reached(sums)
    loss, norm = sums.total / valid_count(sums.total, sums.count), norm_of(sums.grads)
    scale = torch.ones_like(norm) if sums.divided else 1 / valid_count(sums.total, sums.count)
    norm = norm * scale
    finite = loss.isfinite() & norm.isfinite()
    if clip is not None:
        scale = scale * clip_factor(norm, clip)
    if not sums.divided or clip is not None:
        for grad in sums.grads:
            grad.mul_(scale)
    metrics: dict[str, Any] = {"loss": loss, "count": sums.count, "grad_norm": norm, "finite": finite}
    metrics["lr"] = _rate(optimizer, state)
    if optimizer.rates is not None:
        metrics["lr_of"] = {name: _as_rate(rate) for name, rate in optimizer.rates(state.opt_state).items()}
    if sums.aux is not None:
        metrics["aux"] = sums.aux
    train = trainable_mask(state.params, optimizer.trainable)
    moved: dict[str, Tensor] = {}
    if balance_rate is not None:  # before anything is written: it may refuse
        counts = (sums.aux or {}).get("counts", loss.new_zeros(0))  # none of a stage without experts
        moved = biases_of(state.params, counts, balance_rate, ~finite)
    after = _update(optimizer, state, _scatter(train, sums.grads), ~finite, inplace)
    if moved:
        params = with_paths(lambda path, leaf: moved.get(path, leaf), after.params)
        after = State(after.step, params, after.opt_state)
    return after, metrics


def _check_reached(sums: Sums) -> None:
    """Of a leaf that the loss does not see the gradient would be 0, and weight decay would shrink it unseen.

    Where no token counts there is nothing to learn, and experts are given nothing: that says nothing of the loss.
    """
    if sums.unreached and sums.count > 0:
        some = ", ".join(sorted(sums.unreached)[:3])
        raise ValueError(
            f"The loss does not reach {len(sums.unreached)} of the leaves that train: {some}"
            f"{', ...' if len(sums.unreached) > 3 else ''}. Take a loss that depends on them (train.mtp_loss for heads "
            'under "mtp"), leave them out (params.load_pretrained(drop=("mtp",))), or freeze them: by '
            "train.partition({pattern: None, ...}), or trainable=False of their Leaf in the optimizer's spec."
        )


def check_state(optimizer: Optimizer, state: State) -> None:
    """ValueError where the State's opt_state has other leaves than this optimizer makes for such params.

    Fused kernels read moments of another size beyond their end.
    """
    if not isinstance(state, State):
        kind = type(state).__name__
        raise ValueError(f"A step takes a State, as train.init_state(params, optimizer) makes it, no {kind}.")
    shapes = tree.map(lambda p: torch.empty_like(p, device="meta"), state.params)
    try:
        with torch.no_grad():
            made = optimizer.init(shapes)
    except RuntimeError:
        return  # an init that reads values cannot be asked for no more than a structure
    want, have = tree.flatten(made), tree.flatten(state.opt_state)
    wrong = [f"{path} is missing" for path in want.keys() - have.keys()]
    wrong += [f"{path} is too much" for path in have.keys() - want.keys()]
    same = [path for path in want if path in have and isinstance(have[path], Tensor) and isinstance(want[path], Tensor)]
    wrong += [f"{p} is {_kind(have[p])}, not {_kind(want[p])}" for p in same if _kind(have[p]) != _kind(want[p])]
    if wrong:
        raise ValueError(
            f"The State's opt_state is not of this step's optimizer ({sorted(wrong)[0]}, one of {len(wrong)} such "
            "leaves): make it by train.init_state(params, optimizer) with the optimizer that the step has."
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _update(optimizer: Optimizer, state: State, grads: Tree, skip: Tensor, inplace: bool) -> State:
    if optimizer.apply_ is None:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = apply_updates(state.params, updates)
        keep = functools.partial(tree.map, lambda old, new: old if old is new else torch.where(skip, old, new))
        after = State(state.step + 1, keep(state.params, params), keep(state.opt_state, opt_state))
        if inplace:
            consume(state)
        return after
    if inplace:
        after = State(state.step, state.params, state.opt_state)
        consume(state)
    else:
        after = tree.map(torch.clone, state)
    optimizer.apply_(grads, after.opt_state, after.params, skip=skip)
    after.step.add_(1)
    return after


def _scatter(train: Tree, grads: list[Tensor]) -> Tree:
    values = iter(grads)
    return tree.map(lambda trains: next(values) if trains else None, train)


def _rate(optimizer: Optimizer, state: State) -> Tensor:
    return _as_rate(float("nan") if optimizer.lr is None else optimizer.lr(state.opt_state))


def _as_rate(rate: float | Tensor) -> Tensor:
    return torch.as_tensor(rate, dtype=torch.float32).detach()

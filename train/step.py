"""The train step: gradients of sums over microbatches, one division by the global count, one update.

    step = make_step(functools.partial(next_token_loss, config=config), adamw(3e-4), clip=1.0)
    state = init_state(params, optimizer)
    state, metrics = step(state, batch)

Remat and compilation reach the model through the loss function's `layer_fn`, so nothing is patched; and since the step
is built on `torch.autograd.grad` over detached leaves, nothing is left behind in `.grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from .balance import update_bias
from .calls import Batch, caller, microbatches
from .optim import Optimizer, apply_updates, clip_factor, global_norm, trainable_mask, with_paths
from .parallel.mesh import Mesh, Strategy
from .state import State, consume

LossFn = Callable[..., tuple[Tensor, ...]]
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
    as made. A batch without valid tokens has loss 0 and gradient 0. Any other must reach each leaf that trains by at
    least one of its parts, or a ValueError names those that would only decay; over a mesh, where gathered leaves always
    have a gradient, this is not checked.
    With an optimizer that has `apply_`, nothing waits for the device but the making of a layout.
    """
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate is {accumulate!r}; it must be a whole number, at least 1.")
    if clip is not None and clip <= 0:
        raise ValueError(f"clip is {clip}; it must be above 0, or None.")
    check_strategy(mesh, strategy)
    if mesh is not None:
        from .parallel.step import make_step_over

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
    checked = False

    def step(state: State, batch: Batch | Sequence[Batch]) -> tuple[State, dict[str, Any]]:
        nonlocal checked
        if not checked:  # once: what a step returns has the structure of what it was given
            check_opt_state(optimizer, state)
            checked = True
        sums = sums_of(state.params, microbatches(batch, accumulate))
        return update(optimizer, state, sums, clip=clip, inplace=inplace, balance_rate=balance_rate)

    return step


def check_strategy(mesh: Mesh | None, strategy: Strategy | None) -> None:
    if mesh is None and strategy is not None:
        raise ValueError(f"{strategy} is for many processes: it needs a mesh.")


@dataclass
class Sums:
    """What the parts of a batch add up to. grads: for the leaves that train, which nothing else refers to.

    divided: the gradients are those of total / count already. unreached: the paths of leaves that train, but that no
    part's loss depends on; over a mesh none are known.
    """

    total: Tensor
    count: Tensor
    aux: Tree
    grads: list[Tensor]
    divided: bool
    unreached: frozenset[str] = frozenset()


def joined(held: Tree, found: Tree) -> Tree:
    """The sum of two trees of sums. What one of them alone has a name for stays as it is; None is nothing."""
    if held is None or found is None:
        return found if held is None else held
    if isinstance(held, dict) and isinstance(found, dict):
        return held | found | {name: joined(held[name], found[name]) for name in held.keys() & found.keys()}
    return tree.map(torch.add, held, found)


def gradient_sums(
    loss_fn: LossFn, optimizer: Optimizer, *, remat: str = "none", compile: str = "none", counts: bool = False
) -> Callable[..., Sums]:
    """sums(params, parts, into=None) -> Sums of a list of batches, added to `into` where it is given (and used up).

    Arguments as in `make_step`. counts: ask the loss function for its aux. Gradients are summed in fp32 at least. One
    part alone is divided on the way.
    """
    call = caller(loss_fn, remat=remat, compile=compile, counts=counts)

    def sums(params: Tree, parts: Sequence[Batch], into: Sums | None = None, *, divide: bool = True) -> Sums:
        train = trainable_mask(params, optimizer.trainable)
        lone = divide and into is None and len(parts) == 1
        for part in parts:
            total, count, aux, grads, unreached = _gradients(call, params, train, part, divide=lone)
            if into is None:
                wide = grads if lone else [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
                into = Sums(total, count, aux, wide, lone, unreached)
                continue
            into.total, into.count = into.total + total, into.count + count
            into.aux, into.unreached = joined(into.aux, aux), into.unreached & unreached
            for held, grad in zip(into.grads, grads, strict=True):
                held.add_(grad)
            del grads  # before the next part makes its own
        assert into is not None
        return into

    return sums


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
) -> tuple[State, dict[str, Any]]:
    """(the State after one update with the gradients of `sums`, which are used up; the metrics of `make_step`).

    norm_of: the global norm of the gradients, of which this process may hold parts.
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
    after = _update(optimizer, state, _scatter(train, sums.grads), ~finite, inplace)
    if balance_rate is not None:
        after = State(after.step, balanced(after.params, sums.aux["counts"], balance_rate, ~finite), after.opt_state)
    return after, metrics


def balanced(params: Tree, counts: Tensor, rate: float, skip: Tensor) -> Tree:
    """The parameters with the selection bias of each layer moved by its counts; other leaves as they are.

    Heads that predict further tokens come behind the layers, where the counts are of them too.
    """
    flat = tree.flatten(params)
    biases = [path for path in flat if path.endswith(".selection_bias")]
    paths = [path for path in biases if path.startswith("layers.")]
    heads = [path for path in biases if path.startswith("mtp.")]
    paths += heads if len(counts) == len(paths) + len(heads) else []
    if len(paths) != len(counts):
        raise ValueError(
            f"balance_rate moves a selection_bias of each layer with experts: there are {len(paths)} of them, and "
            f"{len(counts)} such layers."
        )
    moved = {
        path: torch.where(skip, flat[path], update_bias(flat[path], of_layer, rate))
        for path, of_layer in zip(paths, counts, strict=True)
    }
    return with_paths(lambda path, leaf: moved.get(path, leaf), params)


def _gradients(
    call: Callable[[Tree, Batch], Any], params: Tree, train: Tree, batch: Batch, *, divide: bool
) -> tuple[Tensor, Tensor, Tree, list[Tensor], frozenset[str]]:
    """(sum, count, aux, gradients for the leaves that train, which nothing else refers to, `Sums.unreached`).

    divide: gradients of sum / count rather than of the sum; dividing on the way in saves a pass over all of them.
    """
    leaves: list[Tensor] = []

    def leaf(param: Tensor, trains: bool) -> Tensor:
        fresh = param.detach()
        if trains:
            leaves.append(fresh.requires_grad_())
        return fresh

    given = tree.map(leaf, params, train)
    if not leaves:
        raise ValueError("No leaf trains: params need a floating leaf that the optimizer's spec does not freeze.")
    total, count, *aux = checked_loss(call(given, batch))
    slope = 1 / valid_count(total, count).to(total.dtype) if divide else None
    found = torch.autograd.grad(total, leaves, slope, allow_unused=True) if total.requires_grad else ()
    if all(grad is None for grad in found):
        raise ValueError(
            "The loss does not depend on any leaf that trains: it must be computed from the params that the loss "
            "function is given, without no_grad or detach."
        )
    paths = [path for path, trains in tree.flatten(train).items() if trains]
    unreached = frozenset(path for path, grad in zip(paths, found, strict=True) if grad is None)
    grads = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(leaves, found, strict=True)]
    taken = {t.untyped_storage().data_ptr() for t in (*leaves, *tree.leaves(batch)) if isinstance(t, Tensor)}
    sums = tree.map(Tensor.detach, aux[0]) if aux else None
    return total.detach(), count.detach(), sums, _own(grads, taken), unreached


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


def checked_loss(result: Any) -> tuple[Any, ...]:
    """What a loss function returned, if it is (sum, count) or (sum, count, aux)."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if len(parts) in (2, 3) and all(isinstance(part, Tensor) and not part.ndim for part in parts[:2]):
        return tuple(parts)
    kinds = [type(p).__name__ + (f" of shape {list(p.shape)}" if isinstance(p, Tensor) else "") for p in parts]
    raise ValueError(
        "The loss function must return (sum, count) or (sum, count, aux), sum and count 0-d tensors; "
        f"it returned {', '.join(kinds)}."
    )


def check_opt_state(optimizer: Optimizer, state: State) -> None:
    """ValueError where the State's opt_state has other leaves than this optimizer makes for such params."""
    shapes = tree.map(lambda p: torch.empty_like(p, device="meta"), state.params)
    try:
        with torch.no_grad():
            made = optimizer.init(shapes)
    except RuntimeError:
        return  # an init that reads values cannot be asked for no more than a structure
    want, have = tree.flatten(made).keys(), tree.flatten(state.opt_state).keys()
    if want != have:
        wrong = [*(f"{path} is missing" for path in want - have), *(f"{path} is too much" for path in have - want)]
        raise ValueError(
            f"The State's opt_state is not of this step's optimizer ({sorted(wrong)[0]}, one of {len(wrong)} such "
            "leaves): make it by train.init_state(params, optimizer) with the optimizer that the step has."
        )


def valid_count(total: Tensor, count: Tensor) -> Tensor:
    """The count as a divisor: at least 1, so that nothing over nothing is 0."""
    return count.clamp(min=1).to(torch.promote_types(total.dtype, torch.float32))


def _own(grads: list[Tensor], taken: set[int]) -> list[Tensor]:
    """The gradients, copied where writing into one would show elsewhere: autograd hands out views and shared ones."""
    owned = []
    for grad in grads:
        where = grad.untyped_storage().data_ptr()
        private = where not in taken and grad.is_contiguous()
        owned.append(grad if private else grad.clone(memory_format=torch.contiguous_format))
        taken.add(where)
    return owned


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

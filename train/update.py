"""One optimizer update from summed gradients: division by the count, clipping, update of params and state."""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import at_hand
from fnmodels.ops.torch_internals import transformed
from fnmodels.tree import Tree
from train.batch import Batches
from train.gradients import Leaves, Metrics, Sums, valid_count
from train.losses.moe_balance import moved_biases
from train.optim.base import (
    InPlace,
    Optimizer,
    apply_updates,
    clip_factor,
    is_unknown_or,
    list_norm,
    with_paths,
)
from train.state import State, consume


def refuse_transforms() -> None:
    """ValueError in a transform of torch.func, which a step of autograd cannot go through."""
    if transformed():
        raise ValueError(
            "A step of train.make_step is not for vmap, grad and jvp of torch.func: take train.pure_step(loss_fn, "
            "optimizer), which has the same result."
        )


@dataclass(frozen=True)
class StepOptions:
    """The options of `train.make_step` apart from loss, optimizer and mesh. ValueError for one out of range."""

    accumulate: int = 1
    clip: float | Tensor | None = None
    remat: str = "none"
    compile: str = "none"
    inplace: bool = True
    balance_rate: float | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        accumulate, clip, rate = self.accumulate, self.clip, self.balance_rate
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate is {accumulate!r}; it must be a whole number, at least 1.")
        if clip is not None and not (isinstance(clip, (Real, Tensor)) and is_unknown_or(clip, lambda x: x > 0)):
            raise ValueError(f"clip is {clip!r}; it must be a number above 0, or None.")
        if rate is not None and not (isinstance(rate, (Real, Tensor)) and is_unknown_or(rate, lambda x: x >= 0)):
            raise ValueError(f"balance_rate is {rate!r}; it must be a number, at least 0, or None.")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"dtype is {self.dtype!r}; it must be a floating-point torch.dtype, or None.")


StepFunction = Callable[[State, Batches], tuple[State, Metrics]]


@dataclass(frozen=True, eq=False)
class UpdatePlan:
    """Values computed once for a State and its optimizer, as long as the State has these very tensors.

    leaves: those of params. run: the optimizer's update in place, bound to the State's
    tensors; None: it has none. unchanged: whether params and opt_state have the entries which they had then.
    """

    params: Tree
    opt_state: Tree
    leaves: Leaves
    run: InPlace | None
    unchanged: Callable[[], bool]

    @classmethod
    def of(cls, optimizer: Optimizer, state: State) -> "UpdatePlan":
        run = None if optimizer.bind is None else optimizer.bind(state.opt_state, state.params)
        leaves = Leaves.of(state.params, optimizer)
        return cls(state.params, state.opt_state, leaves, run, tree.watch((state.params, state.opt_state)))

    def is_of(self, state: State) -> bool:
        """Whether the State has these tensors, at these paths: a caller may replace entries of its dicts."""
        return state.params is self.params and state.opt_state is self.opt_state and self.unchanged()


class Plans:
    """`UpdatePlan`s of the States of one optimizer. It keeps the last one while the State that it belongs to is alive.

    A State is checked unless it is the one that the last step returned, unchanged.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._last: tuple[weakref.ref[State], UpdatePlan] | None = None

    def of(self, state: State) -> UpdatePlan:
        """The plan of this State. ValueError for the State of another optimizer (`check_state`)."""
        last, plan = self._last or (lambda: None, None)
        if last() is not state:
            check_state(self._optimizer, state)
        elif plan is not None and plan.is_of(state):
            return plan
        return UpdatePlan.of(self._optimizer, state)

    def keep(self, after: State, plan: UpdatePlan) -> None:
        """Expects `after`, which an update with this plan made, as the next State."""
        self._last = weakref.ref(after, self._forget), plan

    def _forget(self, _: Any) -> None:
        self._last = None


@torch.no_grad()
def update(
    optimizer: Optimizer,
    state: State,
    sums: Sums,
    *,
    plan: UpdatePlan | None = None,
    divide_by: float | Tensor | None = None,
    clip: float | Tensor | None = None,
    inplace: bool = True,
    balance_rate: float | None = None,
    norm_of: Callable[[list[Tensor]], Tensor] = list_norm,
    biases_of: Callable[..., dict[str, Tensor]] = moved_biases,
) -> tuple[State, Metrics]:
    """(the State after one update with the gradients of `sums`, which are consumed; the metrics of `make_step`).

    plan: of this optimizer and State; None: one is made. divide_by: divides the loss and the gradients; None: the
    count. norm_of: the global norm of the gradients, for ranks that hold shards. biases_of: `moved_biases`, for ranks
    that hold the biases of some layers. ValueError where the loss does not reach a trainable parameter.
    """
    check_reached(sums)
    divisor = valid_count(sums.total, sums.count if divide_by is None else torch.as_tensor(divide_by).to(sums.total))
    loss, norm = sums.total / divisor, norm_of(sums.grads)
    scale = None if sums.divided else 1 / divisor
    norm = norm if scale is None else norm * scale
    finite = is_finite(loss, norm)
    if clip is not None:
        scale = clip_factor(norm, clip) if scale is None else scale * clip_factor(norm, clip)
    if scale is not None and not _is_one(scale):
        for grad in sums.grads:
            grad.mul_(scale)
    metrics: Metrics = {"loss": loss, "count": sums.count, "grad_norm": norm, "finite": finite}
    metrics |= rates_of(optimizer, state.opt_state)
    if sums.aux is not None:
        metrics["aux"] = sums.aux
    plan = plan or UpdatePlan.of(optimizer, state)
    skip, moved = ~finite, {}
    if balance_rate is not None:  # before any write, because it may raise
        counts = (sums.aux or {}).get("counts", loss.new_zeros(0))  # a pipeline stage without experts has none
        moved = biases_of(state.params, counts, balance_rate, skip)
    values, trains = iter(sums.grads), plan.leaves.trains
    grads = sums.grads if all(trains) else [next(values) if trained else None for trained in trains]
    after = _after(optimizer, plan, state, grads, skip, inplace)
    if moved:
        params = with_paths(lambda path, leaf: moved.get(path, leaf), after.params)
        after = State(after.step, params, after.opt_state)
    return after, metrics


def _is_one(scale: Tensor) -> bool:
    """Whether a scale is known to be 1, as where nothing is clipped: a pass over all gradients that changes no bit."""
    value = at_hand(scale)
    return value is not None and bool(value == 1)


def check_reached(sums: Sums) -> None:
    """ValueError for trainable parameters that the loss does not depend on: weight decay would silently shrink them.

    Without valid tokens the check is skipped: experts that receive no token have no gradient.
    """
    if sums.unreached and sums.count > 0:
        some = ", ".join(sorted(sums.unreached)[:3])
        raise ValueError(
            f"The loss does not reach {len(sums.unreached)} of the trainable parameters: {some}"
            f"{', ...' if len(sums.unreached) > 3 else ''}. Take a loss that depends on them (train.mtp_loss for heads "
            'under "mtp"), leave them out (params.load_pretrained(drop=("mtp",))), or freeze them: by '
            "train.partition({pattern: None, ...}), or trainable=False of their Leaf in the optimizer's spec."
        )


def check_state(optimizer: Optimizer, state: State) -> None:
    """ValueError where opt_state has another structure, shapes or dtypes than this optimizer creates for the params.

    Fused kernels would read moments of another size out of bounds.
    """
    if not isinstance(state, State):
        kind = type(state).__name__
        raise ValueError(f"A step takes a State, as train.init_state(params, optimizer) makes it, no {kind}.")
    shapes = tree.map(lambda p: torch.empty_like(p, device="meta"), state.params)
    try:
        with torch.no_grad():
            made = optimizer.init(shapes)
    except RuntimeError:
        return  # an init that reads values does not run on meta tensors
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


def _after(
    optimizer: Optimizer, plan: UpdatePlan, state: State, grads: Sequence[Tensor | None], skip: Tensor, inplace: bool
) -> State:
    if plan.run is None:
        after = updated(optimizer, state, grads, skip)
        if inplace:
            consume(state)
        return after
    if inplace:
        after, run = State(state.step, state.params, state.opt_state), plan.run
        consume(state)
    else:
        assert optimizer.bind is not None
        after = tree.map(torch.clone, state)
        run = optimizer.bind(after.opt_state, after.params)
    run(grads, skip)
    after.step.add_(1)
    return after


def updated(optimizer: Optimizer, state: State, grads: Sequence[Tensor | None], skip: Tensor) -> State:
    """The State after one `Optimizer.update`. grads: one for each leaf of params; skip: True keeps every bit."""
    values = iter(grads)
    given = tree.map(lambda _: {} if (grad := next(values)) is None else grad, state.params)
    updates, opt_state = optimizer.update(given, state.opt_state, state.params)
    params = apply_updates(state.params, updates)
    keep = functools.partial(tree.map, lambda old, new: old if old is new else torch.where(skip, old, new))
    return State(state.step + 1, keep(state.params, params), keep(state.opt_state, opt_state))


def is_finite(loss: Tensor, norm: Tensor) -> Tensor:
    """Whether both are finite: of inf and NaN the difference is NaN. torch.isfinite takes four operations for each."""
    return (loss - loss) == (norm - norm)


def rates_of(optimizer: Optimizer, opt_state: Tree) -> Metrics:
    """The metrics `lr` and, of several groups, `lr_of`."""
    lr, rates = optimizer.traits.lr, optimizer.traits.rates
    one = {"lr": _as_rate(float("nan") if lr is None else lr(opt_state))}
    if rates is None:
        return one
    return one | {"lr_of": {name: _as_rate(rate) for name, rate in rates(opt_state).items()}}


def _as_rate(rate: float | Tensor) -> Tensor:
    return rate.detach().to(torch.float32) if isinstance(rate, Tensor) else torch.full((), rate, dtype=torch.float32)

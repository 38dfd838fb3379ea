"""AdamW and SGD: the pure update rules, and in place torch's fused kernels."""

from __future__ import annotations  # dynamo evaluates no `float | Tensor` where it traces an optimizer being made

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd as fused_sgd

from fnmodels.ops.torch_internals import fused_adamw_
from fnmodels.tree import Tree

from .base import (
    InPlace,
    Number,
    Optimizer,
    Rate,
    acts,
    check_betas,
    check_numbers,
    count_up_,
    next_rate,
    remaker,
    weight_for,
    with_traits,
)
from .per_leaf import LeafState, TrainableLeaf, leafwise, leaves_of, zeros

_dtype_of = operator.attrgetter("dtype")
Lists = tuple[list[Tensor], ...]  # of one group: parameters, gradients, and each state


def adamw(
    lr: Rate,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.01,
    spec: Tree | None = None,
) -> Optimizer:
    """AdamW (arXiv 1711.05101), equal to torch.optim.AdamW.

    The moments have the parameter's dtype; the arithmetic is fp32 at least. State: {step, exp_avg, exp_avg_sq}. Each
    hyperparameter may be a 0-d tensor, such as one that vmap maps or grad differentiates; torch's fused kernel then
    does not run.

    Args:
        lr: A float or 0-d tensor, or a function from the number of the update (a 0-d int64 tensor, from 1) to one.
        betas: The decay of the mean and of the mean square of the gradient per update.
        eps: Added to the root of the mean square, in units of the gradient.
        weight_decay: The decay per update is lr x this x the parameter.
        spec: `family.spec(config)`, or any tree of the parameters' structure whose leaves have `decay` and `trainable`.
            None: every floating leaf is trainable and decays, as in torch.

    Returns:
        The optimizer; its hyperparameters can be replaced for a single update by `Engine.optim_step`.

    Raises:
        ValueError: A hyperparameter is out of range.
    """
    check_numbers(eps=eps)
    beta1, beta2 = check_betas(betas)
    logs = [_log(beta) for beta in betas]

    def rule(grad: Tensor, state: LeafState, _: Tensor, step: Tensor, rate: Number) -> tuple[Tensor, LeafState]:
        first = state["exp_avg"].lerp(grad, weight_for(1 - beta1, grad))
        second = state["exp_avg_sq"] * beta2 + (1 - beta2) * grad * grad
        correction1, correction2 = (_one_minus_power(step.to(grad.dtype) * log) for log in logs)
        change = -rate * (first / correction1) / (_root(second / correction2) + eps)
        return change, {"exp_avg": first, "exp_avg_sq": second}

    def kernel(lists: Lists, step: Tensor, **options: Any) -> None:
        count = (step + 1).to(lists[0][0].device, torch.float32)
        fused_adamw_(lists, count, beta1=beta1, beta2=beta2, eps=eps, **options)  # type: ignore[arg-type]

    def init(param: Tensor) -> LeafState:
        return {"exp_avg": zeros(param), "exp_avg_sq": zeros(param)}

    pure = leafwise(init, rule, lr, weight_decay=weight_decay, spec=spec)
    again = remaker(adamw, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, spec=spec)
    made = pure if _tensors(eps, weight_decay, *betas) else replace(pure, bind=_fused(kernel, lr, weight_decay, spec))
    return with_traits(made, elementwise=True, remake=again)


def _root(square: Tensor) -> Tensor:
    """The square root with a derivative of 0 at 0, where that of `sqrt` is infinite: an embedding that no token reads
    would turn the gradient of beta2 into NaN. The first moment is 0 there, and so is what the root's derivative times
    it contributes."""
    empty = square == 0
    return square.masked_fill(empty, 1).sqrt().masked_fill(empty, 0)


def _one_minus_power(x: Tensor) -> Tensor:
    """1 - exp(x) without the subtraction, which in fp32 would cost beta2 = 0.999 four digits at the first steps.

    It is -expm1(x) = -tanh(x / 2) (exp(x) + 1): Inductor keeps a number that is made by `exp` and read again, but would
    compute `expm1` in the innermost loop of every leaf.
    """
    return -torch.tanh(x / 2) * (torch.exp(x) + 1)


def _log(beta: Number) -> Number:
    return beta.log() if isinstance(beta, Tensor) else math.log(beta) if beta else -math.inf


def _tensors(*hyperparameters: Number) -> bool:
    """Whether one is a tensor, which fused kernels do not take."""
    return any(isinstance(number, Tensor) for number in hyperparameters)


def sgd(
    lr: Rate, *, momentum: Number = 0.0, nesterov: bool = False, weight_decay: Number = 0.0, spec: Tree | None = None
) -> Optimizer:
    """Stochastic gradient descent with momentum, equal to torch.optim.SGD.

    State: {step, momentum}; without momentum only {step}. Hyperparameters may be 0-d tensors, as in `adamw`.

    Args:
        lr: A float or 0-d tensor, or a function from the number of the update (from 1) to one.
        momentum: The share of the previous direction that is added to the gradient; 0: no momentum.
        nesterov: Whether the gradient is read one momentum step ahead.
        weight_decay: This times the parameter is added to the gradient.
        spec: `family.spec(config)`, which says what is trainable and decays; None: every floating leaf.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range, or nesterov has no momentum.
    """
    check_numbers(momentum=momentum)
    if nesterov and not acts(momentum):
        raise ValueError("nesterov=True needs a momentum above 0.")

    def rule(grad: Tensor, state: LeafState, _: Tensor, __: Tensor, rate: Number) -> tuple[Tensor, LeafState]:
        if not acts(momentum):
            return -rate * grad, {}
        buffer = momentum * state["momentum"] + grad
        return -rate * (grad + momentum * buffer if nesterov else buffer), {"momentum": buffer}

    def kernel(lists: Lists, _: Tensor, **options: Any) -> None:
        for params, grads, *buffers in _for_sgd(lists):
            moments: list[Any] = buffers[0] if momentum else [None] * len(params)
            rule: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "dampening": 0.0, "maximize": False}
            fused_sgd(params, grads, moments, fused=True, **rule, **options)

    def init(param: Tensor) -> LeafState:
        return {"momentum": zeros(param)} if acts(momentum) else {}

    pure = leafwise(init, rule, lr, weight_decay=weight_decay, spec=spec, decoupled=False)
    again = remaker(sgd, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, spec=spec)
    made = pure if _tensors(momentum, weight_decay) else replace(pure, bind=_fused(kernel, lr, weight_decay, spec))
    return with_traits(made, elementwise=True, remake=again)


def _fused(
    kernel: Callable[..., None], lr: Rate, weight_decay: Number, spec: Tree | None
) -> Callable[[Tree, Tree], InPlace]:
    """`Optimizer.bind` by a fused kernel: kernel(lists of params, gradients and states, step, **options)."""

    def bind(opt_state: Tree, params: Tree) -> InPlace:
        step, groups = opt_state["step"], _groups(leaves_of(opt_state, params, weight_decay, spec))

        @torch.no_grad()
        def run(grads: Sequence[Tensor | None], skip: Tensor | None) -> None:
            rate = next_rate(lr, step)
            for group in groups:
                lists, copies = group.lists(grads)
                if lists[0]:
                    # found_inf is the kernels' flag for leaving everything unchanged.
                    found_inf = None if skip is None else skip.to(group.device, torch.float32)
                    kernel(lists, step, lr=rate, weight_decay=group.decay, found_inf=found_inf)
                for tensor, copy in copies:
                    tensor.copy_(copy)
            count_up_(step, skip)

        return run

    return bind


@dataclass(frozen=True, eq=False)
class _Group:
    """Leaves of one device, dtype and decay, as fused kernels require: indices among the gradients, and tensors.

    tensors: the parameters, and each state. The kernels use one index for all tensors of a leaf, so these need the same
    memory layout. contiguous: whether all have the usual one; copies of others are passed, which are written back.
    """

    device: torch.device
    dtype: torch.dtype
    decay: Number
    indices: list[int]
    tensors: tuple[list[Tensor], ...]
    contiguous: bool

    def lists(self, grads: Sequence[Tensor | None]) -> tuple[Lists, list[tuple[Tensor, Tensor]]]:
        """((parameters, gradients, each state) of the leaves that have a gradient, [(tensor, the copy of it)])."""
        given = list(map(grads.__getitem__, self.indices))
        present = [grad for grad in given if grad is not None]
        if {self.dtype} != set(map(_dtype_of, present)) or not all(map(Tensor.is_contiguous, present)):
            present = [grad.to(self.dtype).contiguous() for grad in present]
        params, *states = self.tensors
        if len(present) == len(given) and self.contiguous:
            return (params, present, *states), []
        chosen = [[t for t, grad in zip(row, given, strict=True) if grad is not None] for row in self.tensors]
        params, *states = ([t.contiguous() for t in row] for row in chosen)
        passed = zip(chosen, (params, *states), strict=True)
        pairs = [pair for row, copies in passed for pair in zip(row, copies, strict=True) if pair[0] is not pair[1]]
        return (params, present, *states), pairs


def _groups(leaves: list[TrainableLeaf]) -> list[_Group]:
    together: dict[Any, list[TrainableLeaf]] = {}
    for leaf in leaves:
        together.setdefault((leaf.param.device, leaf.param.dtype, leaf.decay), []).append(leaf)
    groups = []
    for (device, dtype, decay), members in together.items():
        names = sorted(members[0].state)
        tensors = [leaf.param for leaf in members], *([leaf.state[name] for leaf in members] for name in names)
        usual = all(tensor.is_contiguous() for row in tensors for tensor in row)
        groups.append(_Group(device, dtype, decay, [leaf.number for leaf in members], tensors, usual))
    return groups


def _for_sgd(lists: Lists) -> Iterator[Lists]:
    """The lists unchanged, or leaf by leaf in fp32 where torch's kernel is wrong: in bf16 and fp16 on the CPU it leaves
    most elements unchanged (pytorch/pytorch#191763)."""
    first = lists[0][0]
    if first.device.type != "cpu" or first.dtype not in (torch.bfloat16, torch.float16):
        yield lists
        return
    for leaves in zip(*lists, strict=True):
        wide = tuple([leaf.float()] for leaf in leaves)
        yield wide
        for leaf, (new,) in zip(leaves[:1] + leaves[2:], wide[:1] + wide[2:], strict=True):
            leaf.copy_(new)

"""AdamW and SGD: the pure update rules, and in place torch's fused kernels."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd as fused_sgd

from fnmodels import tree
from fnmodels.ops.torch_internals import fused_adamw_
from fnmodels.tree import Tree

from .base import Optimizer, Rate, check_betas, check_numbers, from_spec, rate_of, remaker, trainable_only
from .per_leaf import Slots, leafwise, zeros

Lists = tuple[list[Tensor], ...]  # of one group: parameters, gradients, and each state


def adamw(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    spec: Tree | None = None,
) -> Optimizer:
    """AdamW (arXiv 1711.05101), equal to torch.optim.AdamW.

    lr: a float, or a function from the number of the update (a 0-d int64 tensor, from 1) to a float or 0-d tensor.
    spec: the family's tree of `Leaf`, or any tree of the parameters' structure whose leaves have `decay` and
        `trainable`. None: every floating leaf is trainable and decays, as in torch.

    The moments have the parameter's dtype; the arithmetic is fp32 at least. State: {step, exp_avg, exp_avg_sq}.
    """
    check_numbers(eps=eps)
    beta1, beta2 = check_betas(betas)
    logs = [math.log(beta) if beta else -math.inf for beta in betas]

    def rule(grad: Tensor, state: Slots, _: Tensor, step: Tensor, rate: float | Tensor) -> tuple[Tensor, Slots]:
        first = state["exp_avg"].lerp(grad, 1 - beta1)
        second = state["exp_avg_sq"] * beta2 + (1 - beta2) * grad * grad
        # 1 - beta^n by expm1: in fp32 the subtraction would cost beta2 = 0.999 four digits at the first steps.
        correction1, correction2 = (-torch.expm1(step.to(grad.dtype) * log) for log in logs)
        change = -rate * (first / correction1) / ((second / correction2).sqrt() + eps)
        return change, {"exp_avg": first, "exp_avg_sq": second}

    def kernel(lists: Lists, step: Tensor, **options: Any) -> None:
        count = (step + 1).to(lists[0][0].device, torch.float32)
        fused_adamw_(lists, count, beta1=beta1, beta2=beta2, eps=eps, **options)

    def init(param: Tensor) -> Slots:
        return {"exp_avg": zeros(param), "exp_avg_sq": zeros(param)}

    pure = leafwise(init, rule, lr, weight_decay=weight_decay, spec=spec)
    again = remaker(adamw, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, spec=spec)
    return replace(pure, apply_=_in_place(kernel, lr, weight_decay, spec), elementwise=True, remake=again)


def sgd(
    lr: Rate, *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, spec: Tree | None = None
) -> Optimizer:
    """Stochastic gradient descent with momentum, equal to torch.optim.SGD (weight decay is added to the gradient).

    lr, spec: as in `adamw`. State: {step, momentum}; without momentum only {step}.
    """
    check_numbers(momentum=momentum)
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs a momentum above 0.")

    def rule(grad: Tensor, state: Slots, _: Tensor, __: Tensor, rate: float | Tensor) -> tuple[Tensor, Slots]:
        if not momentum:
            return -rate * grad, {}
        buffer = momentum * state["momentum"] + grad
        return -rate * (grad + momentum * buffer if nesterov else buffer), {"momentum": buffer}

    def kernel(lists: Lists, _: Tensor, **options: Any) -> None:
        for params, grads, *buffers in _for_sgd(lists):
            moments: list[Any] = buffers[0] if momentum else [None] * len(params)
            rule: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "dampening": 0.0, "maximize": False}
            fused_sgd(params, grads, moments, fused=True, **rule, **options)

    def init(param: Tensor) -> Slots:
        return {"momentum": zeros(param)} if momentum else {}

    pure = leafwise(init, rule, lr, weight_decay=weight_decay, spec=spec, decoupled=False)
    again = remaker(sgd, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, spec=spec)
    return replace(pure, apply_=_in_place(kernel, lr, weight_decay, spec), elementwise=True, remake=again)


def _in_place(kernel: Callable[..., None], lr: Rate, weight_decay: float, spec: Tree | None) -> Callable[..., None]:
    """`Optimizer.apply_` by a fused kernel: kernel(lists of params, gradients and states, step, **options)."""
    trainable, decays = from_spec(spec)

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        step, given = opt_state["step"], trainable_only(grads, trainable)
        rate = rate_of(lr, step + 1)
        for decay, lists in _groups(given, opt_state, params, decays, weight_decay):
            # found_inf is the kernels' flag for leaving everything unchanged.
            found_inf = None if skip is None else skip.to(lists[0][0].device, torch.float32)
            kernel(lists, step, lr=rate, weight_decay=decay, found_inf=found_inf)
        step.add_(1 if skip is None else (~skip).to(step))

    return apply_


def _groups(
    grads: Tree, opt_state: Tree, params: Tree, decays: dict[str, bool] | None, weight_decay: float
) -> Iterator[tuple[float, Lists]]:
    """(weight decay, lists of params, gradients, states) per device, dtype and decay, as fused kernels require.

    The kernels use one index for all tensors: same dtype, same memory layout. Tensors with another layout are passed as
    copies, which are written back after the last group.
    """
    flat = [tree.flatten(t) for t in (params, *(opt_state[name] for name in sorted(opt_state) if name != "step"))]
    groups: dict[Any, list[list[Tensor]]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for path, grad in tree.flatten(grads).items():
        param, *rest = (t[path] for t in flat if t)
        decay = weight_decay if decays is None or decays[path] else 0.0
        lists = groups.setdefault((param.device, param.dtype, decay), [[] for _ in range(2 + len(rest))])
        lists[1].append(grad.to(param.dtype).contiguous())
        for into, tensor in zip((lists[0], *lists[2:]), (param, *rest), strict=True):
            into.append(tensor.contiguous())
            if into[-1] is not tensor:
                copies.append((tensor, into[-1]))
    for (_, _, decay), lists in groups.items():
        yield decay, tuple(lists)
    for tensor, copy in copies:
        tensor.copy_(copy)


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

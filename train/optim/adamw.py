"""AdamW and SGD: pure, and in place with torch's fused kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw
from torch.optim.sgd import sgd as fused_sgd

from fnmodels import tree
from fnmodels.tree import Tree

from .base import (
    Optimizer,
    Rate,
    check_betas,
    check_numbers,
    check_rate,
    first_step,
    from_spec,
    rate_of,
    trainable_mask,
    trainable_only,
    updates_tree,
    wide_dtype,
    with_replaced,
)


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
    check_rate(lr)
    check_numbers(eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)
    trainable, decays = from_spec(spec)

    def init(params: Tree) -> Tree:
        first, second = _zeros(params, trainable), _zeros(params, trainable)
        return {"step": first_step(params), "exp_avg": first, "exp_avg_sq": second}

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        step = opt_state["step"] + 1
        rate = rate_of(lr, step)
        given = tree.flatten(trainable_only(grads, trainable))
        flat = [tree.flatten(t) for t in (params, opt_state["exp_avg"], opt_state["exp_avg_sq"])]
        # 1 - beta^n by expm1: in fp32 the subtraction would cost beta2 = 0.999 four digits at the first steps.
        corrections = {
            wide: [-torch.expm1(step.to(wide) * _log(beta)) for beta in betas]
            for wide in {wide_dtype(flat[0][path].dtype) for path in given}
        }
        updates, first, second = {}, {}, {}
        for path, grad in given.items():
            param, m, v = (t[path] for t in flat)
            wide = wide_dtype(param.dtype)
            correction1, correction2 = corrections[wide]
            g, p = grad.to(wide), param.to(wide)
            m_new = m.to(wide).lerp(g, 1 - beta1)
            v_new = v.to(wide) * beta2 + (1 - beta2) * g * g
            change = (m_new / correction1) / ((v_new / correction2).sqrt() + eps)
            decay = weight_decay if decays is None or decays[path] else 0.0
            updates[path] = -rate * (change + decay * p if decay else change)
            first[path], second[path] = m_new.to(m.dtype), v_new.to(v.dtype)
        moments = {
            "exp_avg": with_replaced(opt_state["exp_avg"], first),
            "exp_avg_sq": with_replaced(opt_state["exp_avg_sq"], second),
        }
        return updates_tree(grads, updates), {"step": step, **moments}

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        step = opt_state["step"]
        rate = rate_of(lr, step + 1)
        names = (opt_state["exp_avg"], opt_state["exp_avg_sq"])
        given = trainable_only(grads, trainable)
        for decay, (ps, gs, ms, vs) in _groups(given, params, names, decays, weight_decay):
            # found_inf is the kernels' flag for leaving everything unchanged.
            fused_adamw(
                ps,
                gs,
                ms,
                vs,
                [],
                list(step.to(ps[0].device, torch.float32).repeat(len(ps)).unbind()),  # each is counted up
                fused=True,
                lr=rate,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
                found_inf=None if skip is None else skip.to(ps[0].device, torch.float32),
            )
        step.add_(1 if skip is None else (~skip).to(step))

    return Optimizer(
        init, update, apply_, lambda opt_state: rate_of(lr, opt_state["step"] + 1), trainable, elementwise=True
    )


def sgd(
    lr: Rate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    spec: Tree | None = None,
) -> Optimizer:
    """Stochastic gradient descent with momentum, equal to torch.optim.SGD (weight decay is added to the gradient).

    lr, spec: as in `adamw`. State: {step, momentum}, where `momentum` is None if there is none.
    """
    check_rate(lr)
    check_numbers(momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs a momentum above 0.")
    trainable, decays = from_spec(spec)

    def init(params: Tree) -> Tree:
        return {"step": first_step(params), "momentum": _zeros(params, trainable) if momentum else None}

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        step = opt_state["step"] + 1
        rate = rate_of(lr, step)
        flat_params, flat_buffers = tree.flatten(params), tree.flatten(opt_state["momentum"])
        updates, buffers = {}, {}
        for path, grad in tree.flatten(trainable_only(grads, trainable)).items():
            param = flat_params[path]
            wide = wide_dtype(param.dtype)
            g = grad.to(wide)
            if weight_decay and (decays is None or decays[path]):
                g = g + weight_decay * param.to(wide)
            if momentum:
                buffer = momentum * flat_buffers[path].to(wide) + g
                buffers[path] = buffer.to(flat_buffers[path].dtype)
                g = g + momentum * buffer if nesterov else buffer
            updates[path] = -rate * g
        return updates_tree(grads, updates), {"step": step, "momentum": with_replaced(opt_state["momentum"], buffers)}

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        step = opt_state["step"]
        rate = rate_of(lr, step + 1)
        names = (opt_state["momentum"],) if momentum else ()
        groups = _groups(trainable_only(grads, trainable), params, names, decays, weight_decay)
        for decay, (ps, gs, *buffers) in ((decay, lists) for decay, group in groups for lists in _for_sgd(group)):
            fused_sgd(
                ps,
                gs,
                list(buffers[0]) if momentum else [None] * len(ps),
                fused=True,
                lr=rate,  # type: ignore[arg-type]  # a tensor will do
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=decay,
                dampening=0.0,
                maximize=False,
                found_inf=None if skip is None else skip.to(ps[0].device, torch.float32),
            )
        step.add_(1 if skip is None else (~skip).to(step))

    return Optimizer(
        init, update, apply_, lambda opt_state: rate_of(lr, opt_state["step"] + 1), trainable, elementwise=True
    )


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _zeros(params: Tree, trainable: Tree | None) -> Tree:
    return tree.map(
        lambda p, t: torch.zeros_like(p, memory_format=torch.contiguous_format) if t else None,
        params,
        trainable_mask(params, trainable),
    )


def _groups(
    grads: Tree, params: Tree, states: tuple[Tree, ...], decays: dict[str, bool] | None, weight_decay: float
) -> Iterator[tuple[float, tuple[list[Tensor], ...]]]:
    """(weight decay, lists of params, gradients, states) per device, dtype and decay, as fused kernels require.

    The kernels use one index for all tensors: same dtype, same memory layout. Tensors with another layout are passed as
    copies, which are written back after the last group.
    """
    flat = [tree.flatten(t) for t in (params, *states)]
    groups: dict[Any, list[list[Tensor]]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for path, grad in tree.flatten(grads).items():
        param, *rest = (t[path] for t in flat)
        decay = weight_decay if decays is None or decays[path] else 0.0
        lists = groups.setdefault((param.device, param.dtype, decay), [[] for _ in range(2 + len(states))])
        lists[1].append(grad.to(param.dtype).contiguous())
        for into, tensor in zip((lists[0], *lists[2:]), (param, *rest), strict=True):
            into.append(tensor.contiguous())
            if into[-1] is not tensor:
                copies.append((tensor, into[-1]))
    for (_, _, decay), lists in groups.items():
        yield decay, tuple(lists)
    for tensor, copy in copies:
        tensor.copy_(copy)


def _for_sgd(lists: tuple[list[Tensor], ...]) -> Iterator[tuple[list[Tensor], ...]]:
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

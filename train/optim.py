"""Optimizers as pairs of functions over trees, in the shape of optax.

    optimizer = adamw(3e-4, weight_decay=0.1, spec=family.spec(config))
    opt_state = optimizer.init(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = apply_updates(params, updates)

`update` is written in plain tensor operations: pure, and fit for vmap, grad and compile. `apply_` is the same step with
torch's fused kernels, writing parameters and state in place, at a fraction of the time. A frozen leaf has None in the
moments and in `updates`, whatever `grads` has for it; a leaf with None in `grads` keeps its state and gets no update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

Rate = float | Callable[[Tensor], "float | Tensor"]
# whole(path, function, x): of function(the matrices [.., out, in] of the leaf at path) the part that x is of them
Whole = Callable[[str, Callable[[Tensor], Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Optimizer:
    """What a train step needs of an optimizer.

    init(params) -> opt_state, which keeps its structure through all updates
    update(grads, opt_state, params) -> (updates, opt_state): pure; `updates` are to be added to the parameters.
    apply_(grads, opt_state, params, *, skip=None): the same in place; where the 0-d bool tensor `skip` is True every
        tensor keeps its bits, without the host having to wait for it. None: the step uses `update`.
    lr(opt_state) -> the rate of the update that comes next, for the metrics.
    trainable: a tree of bools over the parameters, or a function that makes it from them; None: every floating leaf
        trains.
    rates(opt_state) -> {name: rate} of its groups, where it has several.
    elementwise: whether a number's update depends on that number, its gradient and its state alone, so that a part of a
        leaf is updated as it would be in the whole.
    of_parts(whole) -> the same optimizer of parts of leaves, where it needs functions of whole matrices; what has none
        and is not elementwise takes no divided parameters.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    apply_: Callable[..., None] | None = None
    lr: Callable[[Tree], float | Tensor] | None = None
    trainable: Tree | Callable[[Tree], Tree] | None = None
    rates: Callable[[Tree], dict[str, float | Tensor]] | None = None
    elementwise: bool = False
    of_parts: Callable[[Whole], Optimizer] | None = None


def on_parts(optimizer: Optimizer, whole: Whole) -> Optimizer | None:
    """The optimizer for parts of leaves; None where it takes whole ones alone."""
    if optimizer.elementwise:
        return optimizer
    return None if optimizer.of_parts is None else optimizer.of_parts(whole)


def takes_parts(optimizer: Optimizer) -> bool:
    return optimizer.elementwise or optimizer.of_parts is not None


def trainable_mask(params: Tree, trainable: Tree | Callable[[Tree], Tree] | None = None) -> Tree:
    """The tree of bools that says which leaves of `params` train: floating ones that `trainable` does not exclude.

    By path: `params` may lack leaves of `trainable`, as one group's share of them does.
    """
    if trainable is None:
        for path in tree.flatten(params):
            if path.endswith("selection_bias"):
                raise ValueError(
                    f"No gradient teaches {path}, and an optimizer without a spec would let it decay: give it "
                    "spec=fnmodels.family_of(config).spec(config)."
                )
        return tree.map(lambda p: p.is_floating_point(), params)
    flat = tree.flatten(trainable(params) if callable(trainable) else trainable)
    lost = [path for path in tree.flatten(params) if path not in flat]
    if lost:
        raise ValueError(f"The optimizer's tree of what trains (from its spec) lacks {lost[0]}, which is in params.")
    return with_paths(lambda path, p: bool(flat[path]) and p.is_floating_point(), params)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """params + updates, each in its parameter's dtype; leaves without an update are passed on as they are."""
    flat = tree.flatten(updates)
    return with_paths(lambda path, p: (p + flat[path]).to(p.dtype) if path in flat else p, params)


def global_norm(grads: Tree) -> Tensor:
    """The Euclidean norm over all leaves together, a 0-d tensor in fp32 at least; 0 for a tree without leaves."""
    norms = [torch.linalg.vector_norm(g, dtype=wide_dtype(g.dtype)) for g in tree.leaves(grads)]
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What brings gradients of this global norm to at most `limit`; torch.nn.utils.clip_grad_norm_'s formula."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clip_by_global_norm(grads: Tree, limit: float) -> tuple[Tree, Tensor]:
    """(gradients scaled down so that their global norm is at most `limit`, the norm before)."""
    if not limit > 0:
        raise ValueError(f"limit is {limit}; it must be above 0.")
    norm = global_norm(grads)
    factor = clip_factor(norm, limit)
    return tree.map(lambda g: (g * factor.to(wide_dtype(g.dtype))).to(g.dtype), grads), norm


def adamw(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    spec: Tree | None = None,
) -> Optimizer:
    """AdamW (arXiv 1711.05101), equal to torch.optim.AdamW.

    lr: a float, or a function of the number of the update being made (a 0-d int64 tensor, from 1) to a float or 0-d
        tensor.
    spec: the family's tree of `Leaf`, or any tree of the parameters' structure whose leaves have `decay` and
        `trainable`. None decays and trains every floating leaf, as torch does.

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
        rate = rate_at(lr, step)
        given = tree.flatten(of_learning(grads, trainable))
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
            "exp_avg": renewed(opt_state["exp_avg"], first),
            "exp_avg_sq": renewed(opt_state["exp_avg_sq"], second),
        }
        return like(grads, updates), {"step": step, **moments}

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        step = opt_state["step"]
        rate = rate_at(lr, step + 1)
        names = (opt_state["exp_avg"], opt_state["exp_avg_sq"])
        given = of_learning(grads, trainable)
        for decay, (ps, gs, ms, vs) in _groups(given, params, names, decays, weight_decay):
            # found_inf is the kernels' own word for "leave everything as it is".
            torch._fused_adamw_(
                ps,
                gs,
                ms,
                vs,
                [],
                [(step + 1).to(ps[0].device, torch.float32)] * len(ps),
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
        init, update, apply_, lambda opt_state: rate_at(lr, opt_state["step"] + 1), trainable, elementwise=True
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

    lr, spec: as in `adamw`. State: {step, momentum}, where `momentum` is None without one.
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
        rate = rate_at(lr, step)
        flat_params, flat_buffers = tree.flatten(params), tree.flatten(opt_state["momentum"])
        updates, buffers = {}, {}
        for path, grad in tree.flatten(of_learning(grads, trainable)).items():
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
        return like(grads, updates), {"step": step, "momentum": renewed(opt_state["momentum"], buffers)}

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        step = opt_state["step"]
        rate = rate_at(lr, step + 1)
        names = (opt_state["momentum"],) if momentum else ()
        groups = _groups(of_learning(grads, trainable), params, names, decays, weight_decay)
        for decay, (ps, gs, *buffers) in ((decay, lists) for decay, group in groups for lists in _for_sgd(group)):
            torch._fused_sgd_(
                ps,
                gs,
                buffers[0] if momentum else [],
                lr=rate,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=decay,
                dampening=0.0,
                maximize=False,
                is_first_step=False,
                found_inf=None if skip is None else skip.to(ps[0].device, torch.float32),
            )
        step.add_(1 if skip is None else (~skip).to(step))

    return Optimizer(
        init, update, apply_, lambda opt_state: rate_at(lr, opt_state["step"] + 1), trainable, elementwise=True
    )


def from_spec(spec: Tree | None) -> tuple[Tree | None, dict[str, bool] | None]:
    if spec is None:
        return None, None
    return tree.map(lambda leaf: leaf.trainable, spec), {path: leaf.decay for path, leaf in tree.flatten(spec).items()}


def check_rate(lr: Rate) -> None:
    if isinstance(lr, Tensor):
        return  # a parameter of whoever differentiates or vmaps the update: its value is not for reading
    if not callable(lr) and not (isinstance(lr, Real) and lr >= 0):
        raise ValueError(f"lr is {lr!r}; it must be a number, at least 0, or a function of the update's number.")


def check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not pair or not all(isinstance(beta, Real) and 0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas are {betas!r}; they must be two numbers, at least 0 and below 1.")
    return betas


def check_numbers(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (isinstance(number, Real) and number >= 0):
            raise ValueError(f"{name} is {number!r}; it must be a number, at least 0.")


def check_below_1(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (isinstance(number, Real) and 0.0 <= number < 1.0):
            raise ValueError(f"{name} is {number!r}; it must be a number, at least 0 and below 1.")


def rate_at(lr: Rate, step: Tensor) -> float | Tensor:
    return lr(step) if callable(lr) else lr


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def first_step(params: Tree) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=next(iter(tree.leaves(params))).device)


def _zeros(params: Tree, trainable: Tree | None) -> Tree:
    return tree.map(
        lambda p, t: torch.zeros_like(p, memory_format=torch.contiguous_format) if t else None,
        params,
        trainable_mask(params, trainable),
    )


def with_paths(function: Callable[[str, Any], Any], params: Tree) -> Tree:
    paths = iter(tree.flatten(params))
    return tree.map(lambda leaf: function(next(paths), leaf), params)


def like(grads: Tree, flat: dict[str, Tensor]) -> Tree:
    """The updates as a tree, with None where a gradient makes none."""
    return with_paths(lambda path, _: flat.get(path), grads)


def of_learning(grads: Tree, trainable: Tree | None) -> Tree:
    """The gradients without those of frozen leaves, which a caller may have: they teach nothing."""
    if trainable is None:
        return grads
    flat = tree.flatten(trainable)
    return with_paths(lambda path, grad: grad if flat[path] else None, grads)


def renewed(values: Tree, new: dict[str, Tensor]) -> Tree:
    """The tree with the leaves of `new` at their paths; others stay, as the state of a leaf that got no gradient."""
    return with_paths(lambda path, old: new.get(path, old), values)


def _groups(
    grads: Tree, params: Tree, states: tuple[Tree, ...], decays: dict[str, bool] | None, weight_decay: float
) -> Iterator[tuple[float, tuple[list[Tensor], ...]]]:
    """(weight decay, lists of params, gradients, states) per device, dtype and decay, as fused kernels want them.

    The kernels walk all tensors with one index: same dtype, same memory layout. What lies otherwise is given as a copy,
    and written back when the last group is done.
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
    """The lists as they are, or one leaf after the other in fp32 where torch's kernel would be wrong: most numbers of
    bf16 and fp16 on the CPU it leaves as they were (pytorch/pytorch#191763)."""
    first = lists[0][0]
    if first.device.type != "cpu" or first.dtype not in (torch.bfloat16, torch.float16):
        yield lists
        return
    for leaves in zip(*lists, strict=True):
        wide = tuple([leaf.float()] for leaf in leaves)
        yield wide
        for leaf, (new,) in zip(leaves[:1] + leaves[2:], wide[:1] + wide[2:], strict=True):
            leaf.copy_(new)

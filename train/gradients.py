"""Sums over microbatches: loss, count, aux and gradients, before any division or update.

Gradients come from `torch.autograd.grad` on detached leaves, so no `.grad` is written.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.dtypes import widest
from fnmodels.tree import Tree
from fnmodels.tree.mapping import filler
from train.batch import Entries
from train.loss import LossFn as LossFn
from train.loss import caller
from train.optim.base import Optimizer, trainable_mask

Metrics = dict[str, Any]  # of a step: 0-d tensors by name, and a tree "aux" where the loss returns one


@dataclass
class Sums:
    """Sums over microbatches. grads: one per trainable parameter, in tree order, in storage of their own.

    divided: grads are already those of total / count. unreached: paths of the trainable parameters that no microbatch's
    loss depends on, over a mesh that of no rank (`train.parallel.reached`). outputs: those of each microbatch, if any.
    """

    total: Tensor
    count: Tensor
    aux: Tree
    grads: list[Tensor]
    divided: bool
    unreached: frozenset[str] = frozenset()
    outputs: list[Tree] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of params as a flat list, and what follows from their structure.

    trains: whether each is trained. fill: makes a tree like params of other leaves.
    """

    tensors: list[Tensor]
    trains: list[bool]
    fill: Callable[[Iterator[Tensor]], Tree]

    @classmethod
    def of(cls, params: Tree, optimizer: Optimizer) -> "Leaves":
        trains = tree.leaves(trainable_mask(params, optimizer.traits.trainable))
        return cls(tree.leaves(params), trains, filler(params))

    def fresh(self) -> tuple[Tree, list[Tensor]]:
        """(params as leaves of a graph, those of them that are trained); ValueError where none is."""
        detached = list(map(Tensor.detach, self.tensors))
        trained = list(map(Tensor.requires_grad_, itertools.compress(detached, self.trains)))
        if not trained:
            raise ValueError(
                "No parameter is trainable: every floating-point parameter is frozen by the optimizer's spec."
            )
        return self.fill(iter(detached)), trained


def gradient_sums(
    loss_fn: LossFn, optimizer: Optimizer, *, remat: str = "none", compile: str = "none", counts: bool = False
) -> Callable[..., Sums]:
    """sums(params, microbatches) -> `Sums` over the microbatches.

    loss_fn, optimizer, remat, compile: as in `make_step`. counts: request the loss's aux with the experts' counts.
    Gradients are summed in fp32 at least. Arguments of the result: divide: a single microbatch's gradients are divided
    by its count on the way; leaves: those of params, where they are known. ValueError
    where no parameter is trainable, the loss does not depend on any, or the loss function returns another form.
    """
    loss = caller(loss_fn, remat=remat, compile=compile, counts=counts)

    def sums(
        params: Tree,
        parts: Sequence[Entries],
        *,
        divide: bool = True,
        leaves: Leaves | None = None,
    ) -> Sums:
        leaves = leaves or Leaves.of(params, optimizer)
        lone = divide and len(parts) == 1
        into: Sums | None = None
        for part in parts:
            given, trained = leaves.fresh()
            entered = loss.entered(given)
            result = loss.function(entered, part)
            loss.check_reached(entered, given, part)
            total, count, aux, grads, unreached, outputs = _gradients(
                result, trained, params, leaves.trains, part, divide=lone
            )
            del result, entered, given, trained  # with what a graph may hold of activations
            if into is None:
                wide = grads if lone else [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
                into = Sums(total, count, aux, wide, lone, unreached, outputs)
                continue
            into = added_to(into, Sums(total, count, aux, grads, False, unreached, outputs))
            del grads  # free them before the next microbatch's backward pass
        assert into is not None
        return into

    return sums


def added_to(held: Sums, more: Sums) -> Sums:
    """The sums of both. The gradients of `held` are added to in place, and only once all else is known to fit."""
    aux, grads = joined(held.aux, more.aux), held.grads
    for held_grad, grad in zip(grads, more.grads, strict=True):
        held_grad.add_(grad)
    return Sums(
        held.total + more.total,
        held.count + more.count,
        aux,
        grads,
        held.divided,
        held.unreached & more.unreached,
        held.outputs + more.outputs,
    )


def joined(held: Tree, found: Tree) -> Tree:
    """The sum of two trees of sums; entries that only one has are kept, and None counts as empty."""
    if held is None or found is None:
        return found if held is None else held
    if isinstance(held, dict) and isinstance(found, dict):
        return held | found | {name: joined(held[name], found[name]) for name in held.keys() & found.keys()}
    return tree.map(torch.add, held, found)


def _gradients(
    result: Any, leaves: list[Tensor], params: Tree, trains: list[bool], batch: Entries, *, divide: bool
) -> tuple[Tensor, Tensor, Tree, list[Tensor], frozenset[str], list[Tree]]:
    """(sum, count, aux, gradients of the leaves in storage of their own, `unreached`, `outputs`) of a loss's result.

    divide: gradients of sum / count instead of the sum: scaling grad_output saves a pass over all gradients.
    """
    (total, count, *aux), outputs = loss_and_outputs(result)
    scale = valid_count(total, count).to(total.dtype).reciprocal() if divide else None
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        found = torch.autograd.grad(total, leaves, scale, allow_unused=True)
    missing = list(itertools.compress(itertools.count(), map(operator.is_, found, itertools.repeat(None))))
    if len(missing) == len(leaves) and count > 0:  # with no valid tokens the loss may be constant
        raise ValueError(
            "The loss does not depend on any trainable parameter: it must be computed from the params that the loss "
            "function is given, without no_grad or detach."
        )
    unreached: frozenset[str] = frozenset()
    grads: list[Any] = list(found)
    if missing:
        trained = list(itertools.compress(tree.flatten(params), trains))
        unreached = frozenset(trained[index] for index in missing)
        grads = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(leaves, found, strict=True)]
    taken = set(_places([*leaves, *(t for t in tree.leaves(batch) if isinstance(t, Tensor))]))
    sums = tree.map(Tensor.detach, aux[0]) if aux else None
    return total.detach(), count.detach(), sums, _own(grads, taken), unreached, outputs


def _own(grads: list[Tensor], taken: set[int]) -> list[Tensor]:
    """The gradients, cloned where they share storage with other tensors: autograd returns views and shared tensors."""
    owned, places = [], _places(grads)
    if len(taken.union(places)) == len(taken) + len(grads) and all(map(Tensor.is_contiguous, grads)):
        return grads
    for grad, where in zip(grads, places, strict=True):
        private = where not in taken and grad.is_contiguous()
        owned.append(grad if private else grad.clone(memory_format=torch.contiguous_format))
        taken.add(where)
    return owned


def _places(tensors: list[Tensor]) -> list[int]:
    """The memory of each tensor's storage."""
    return list(map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, tensors)))


def loss_and_outputs(result: Any) -> tuple[tuple[Any, ...], list[Tree]]:
    """(`checked_loss`, [the outputs] or []) of a loss function's result (sum, count[, aux or None[, outputs]])."""
    outputs = [tree.map(Tensor.detach, result[3])] if isinstance(result, (tuple, list)) and len(result) == 4 else []
    return checked_loss(result), outputs


def checked_loss(result: Any) -> tuple[Any, ...]:
    """(sum, count) or (sum, count, aux) of the loss function's result; ValueError for another form.

    count and aux are in `exact` dtypes, in which they are added up.
    """
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if len(parts) == 4:  # outputs
        parts = parts[:2] if parts[2] is None else parts[:3]
    scalars = len(parts) in (2, 3) and isinstance(parts[0], Tensor) and isinstance(parts[1], Tensor)
    if scalars and not parts[0].ndim and not parts[1].ndim:
        if len(parts) == 2:
            return parts[0], exact(parts[1])
        for path, leaf in tree.flatten(parts[2:]).items():
            if not isinstance(leaf, Tensor):
                name = path.partition(".")[2] or "itself"
                raise ValueError(
                    "The loss function's aux must be a tree of tensors, sums that add up over parts of a batch; "
                    f"{name} is a {type(leaf).__name__}."
                )
        return (parts[0], *tree.map(exact, tuple(parts[1:])))
    kinds = [type(p).__name__ + (f" of shape {list(p.shape)}" if isinstance(p, Tensor) else "") for p in parts]
    raise ValueError(
        "The loss function must return (sum, count) or (sum, count, aux), sum and count 0-d tensors; "
        f"it returned {', '.join(kinds)}."
    )


def exact(number: Tensor) -> Tensor:
    """The tensor in int64, or in fp64 where it is floating and the device has it: fp32 counts to 2^24."""
    wide = widest(number.device) if number.is_floating_point() else torch.int64
    return number if number.is_complex() else number.to(wide)


def valid_count(total: Tensor, count: Tensor) -> Tensor:
    """The count as a floating divisor, 1 instead of 0, so that the mean over no tokens is 0."""
    some = count.masked_fill(count == 0, 1) if count.is_floating_point() else count.clamp(min=1)
    return some.to(torch.promote_types(total.dtype, torch.float32))


def totals(call: Callable[[Tree, Entries], Any], params: Tree, parts: Sequence[Entries]) -> tuple[Any, ...]:
    """(sum, count[, aux]) over all microbatches."""
    (total, count, *aux), *rest = (checked_loss(call(params, part)) for part in parts)
    for more, number, *others in rest:
        total, count = total + more, count + number
        aux = [joined(one, other) for one, other in itertools.zip_longest(aux, others)]
    return (total, count, *aux)


def metrics_of(total: Tensor, count: Tensor, *aux: Tree) -> Metrics:
    metrics = {"loss": total / valid_count(total, count), "total": total, "count": count}
    return metrics | ({"aux": aux[0]} if aux else {})

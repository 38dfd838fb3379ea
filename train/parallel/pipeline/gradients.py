"""Gradients, losses and outputs of a pipeline: the sums of one rank's stages, from torch's schedules.

    pipe = pipeline(config, 2, "Interleaved1F1B")                 # which layers, in which order, on which rank
    mine = share(params, config, pipe, rank)                      # a rank's share of any tree like the params
    sums = gradient_sums(loss_fn, optimizer, pipe, group)         # `train.gradients.gradient_sums`, over the stages
    found = sums(mine, fnmodels.split(batch, 4))                  # four microbatches

Every rank is given the same microbatches, and computes their masks, rotary tables and layouts itself: only hidden
states, balance terms and their gradients are sent.

Losses are sums, computed by the last stage and not divided here. The only reduction over ranks is of the gradients of
parameters that several stages hold (a tied embedding). Aux (counts of experts) stays on the rank of its layers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnmodels import tree
from fnmodels.ops.dtypes import widest
from fnmodels.tree import Tree
from train.batch import Entries
from train.comm.collectives import broadcast, maximum
from train.comm.dtensor import local_tree
from train.gradients import Sums, joined
from train.loss import as_loss
from train.optim.base import Optimizer, trainable_mask, wide_dtype
from train.parallel.padding import clear_length, entry_of_tokens, padded, unpadded

from .microbatch import several_lengths
from .runner import Found, runner
from .schedule import SINGLE, VEE, Pipeline
from .staged_loss import ALONE, StagedLoss, StageHooks
from .tree_split import entry_of, holders


def gradient_sums(
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    pipe: Pipeline,
    group: dist.ProcessGroup | None = None,
    hooks: StageHooks = ALONE,
) -> Callable[..., Sums]:
    """sums(params, parts) -> this rank's Sums over microbatches.

    loss_fn: (params, batch) -> (sum, count[, aux]), which runs the model once; or a `ModelLoss` of it, with options.
    group: the ranks of the pipeline; None: all. params: this rank's `share`. parts: dicts of [B, S], the same on every
    rank, of any sizes; see `microbatches`.

    total, count: the last stage's, 0 elsewhere; to be summed over the ranks. grads: of the local trainable parameters,
    in fp32 at least, never divided; those of a parameter that several ranks hold are the sum over these, on each of
    them. aux, if the loss has one: the last rank's, and on every rank what its own layers add to it: {"counts":
    [sparse layers of this rank, E], balance terms}.
    """
    run = runner(StagedLoss(as_loss(loss_fn), pipe, hooks), group)
    several, agreed = holders(pipe.config, pipe), _agreed_kinds(group)
    sent_outputs = _outputs_of_last(pipe, group)

    def sums(params: Tree, parts: Sequence[Entries], *, divide: bool = False) -> Sums:
        leaves: dict[str, nn.Parameter] = {}
        train = tree.flatten(trainable_mask(params, optimizer.traits.trainable))
        paths = iter(train)

        def leaf(param: Tensor) -> Tensor:
            path = next(paths)
            if not train[path]:
                return param.detach()
            leaves[path] = nn.Parameter(param.detach())
            if param.dtype != wide_dtype(param.dtype):
                leaves[path].grad_dtype = wide_dtype(param.dtype)
            return leaves[path]

        losses, of_stages = run(tree.map(leaf, params), parts, True)
        total, count, aux = agreed(*_summed(losses, of_stages))
        outputs = sent_outputs(of_stages[-1] if losses else [], parts)
        grads = {
            path: torch.zeros_like(x, dtype=wide_dtype(x.dtype)) if x.grad is None else x.grad.contiguous()
            for path, x in leaves.items()
        }
        for path in sorted(grads):
            if (entry := entry_of(path, several)) is not None:
                _sum_copies(grads[path], several[entry], group)
        return Sums(total, count, aux, list(grads.values()), False, outputs=outputs)

    return sums


def loss_sums(
    loss_fn: Callable[..., Any], pipe: Pipeline, group: dist.ProcessGroup | None = None, hooks: StageHooks = ALONE
) -> Callable[[Tree, Sequence[Entries]], tuple[Tensor, Tensor, dict[str, Tensor] | None]]:
    """sums(params, parts) -> (sum, count, aux) without gradients, otherwise as `gradient_sums`."""
    run, agreed = runner(StagedLoss(as_loss(loss_fn), _forward(pipe), hooks), group), _agreed_kinds(group)

    @torch.no_grad()
    def sums(params: Tree, parts: Sequence[Entries]) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
        return agreed(*_summed(*run(params, parts, False)))

    return sums


def outputs(
    function: Callable[..., Any], pipe: Pipeline, group: dist.ProcessGroup | None = None, hooks: StageHooks = ALONE
) -> Callable[[Tree, Sequence[Entries]], list[Any]]:
    """run(params, parts) -> the function's result per microbatch, on every rank; no gradients.

    function: of (params, batch), as a loss; its result is a tree of tensors. Tensors [B, S, ...] are cut back if a
    microbatch was padded (`unpadded`); ValueError for a tensor that cannot be cut.
    """

    def result(found: Any) -> tuple[Tensor, Any, dict[str, Tensor]]:
        return torch.zeros((), device=next(iter(tree.leaves(found))).device), found, {}

    run = runner(StagedLoss(as_loss(function), _forward(pipe), hooks, result), group)
    last, of_all = pipe.ranks[-1], dist.group.WORLD if group is None else group
    assert of_all is not None

    @torch.no_grad()
    def found(params: Tree, parts: Sequence[Entries]) -> list[Any]:
        sizes = [tuple(entry_of_tokens(part).shape[:2]) for part in parts]
        longest = max((size[1] for size in sizes), default=0)
        if len({length for _, length in sizes}) > 1 and not several_lengths(pipe.config):
            longest = clear_length(longest, hooks.multiple, pipe.config)
            parts = [padded(part, longest) for part in parts]
        losses, of_stages = run(params, parts, False)
        results = [out for out, _ in of_stages[-1]] if losses else []
        results = _sent(results, last, of_all, entry_of_tokens(parts[0]).device)
        return _cut_back(results, sizes, longest)

    return found


def _outputs_of_last(
    pipe: Pipeline, group: dist.ProcessGroup | None
) -> Callable[[Sequence[tuple[Any, Any]], Sequence[Entries]], list[Any]]:
    """A function from the last stage's results per microbatch to a loss' outputs on every rank, [] if it has none."""
    last, of_all = pipe.ranks[-1], dist.group.WORLD if group is None else group
    known: list[bool] = []

    def sent(found: Sequence[tuple[Any, Any]], parts: Sequence[Entries]) -> list[Any]:
        results = [one for (_, outputs), _ in found for one in outputs]
        device = entry_of_tokens(parts[0]).device
        if not known:  # once: a reduction per call would cost those that have no outputs
            known.append(bool(maximum(torch.tensor(bool(results), dtype=torch.long, device=device), group)))
        if not known[0]:
            return []
        assert of_all is not None
        sizes = [tuple(entry_of_tokens(part).shape[:2]) for part in parts]
        return _cut_back(_sent(results, last, of_all, device), sizes, max(length for _, length in sizes))

    return sent


def _sent(results: list[Any], last: int, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """The last rank's list of trees of tensors, on every rank."""
    box: list[Any] = [tree.map(lambda x: x.to("meta"), results)]
    dist.broadcast_object_list(box, dist.get_global_rank(group, last), group=group)
    empty = tree.map(lambda x: torch.empty_like(x, device=device), box[0])
    found: list[Any] = tree.map(lambda x: broadcast(x.contiguous(), last, group), results or empty)
    return found


def _cut_back(results: Sequence[Any], sizes: Sequence[tuple[int, ...]], longest: int) -> list[Any]:
    """Outputs of microbatches that were padded to the largest of `sizes`, cut back to their own."""
    larger = (max(rows for rows, _ in sizes), longest)
    return [
        tree.map(functools.partial(unpadded, larger=larger, size=size), out)
        for size, out in zip(sizes, results, strict=True)
    ]


def _forward(pipe: Pipeline) -> Pipeline:
    """The same stages under a schedule that accepts any number of microbatches; forward passes are equal in all."""
    simple = "ZBVZeroBubble" if pipe.schedule in VEE else "GPipe" if pipe.schedule in SINGLE else "LoopedBFS"
    return replace(pipe, schedule=simple)


def _sum_copies(grad: Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Sums the gradient of a parameter that several ranks hold, in place, on all of them, in one order."""
    (mine,), rank = local_tree([grad]), dist.get_rank(group)  # shares its memory
    theirs = {other: torch.empty_like(mine) for other in ranks if other != rank}
    sent = mine.clone()
    ops = [
        dist.P2POp(act, x, group=group, group_peer=other)
        for other, buffer in theirs.items()
        for act, x in ((dist.isend, sent), (dist.irecv, buffer))
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    first, *others = (theirs.get(other, sent) for other in ranks)
    mine.copy_(first)
    for other in others:
        mine.add_(other)


def _summed(losses: Sequence[Tensor], found: Found) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum, count, aux) of this rank's stages."""
    count = torch.stack([count for (count, _), _ in found[-1]]).sum()
    total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=count.device)
    return total, count, _joined([[sums for _, sums in of_stage] for of_stage in found])


def _agreed_kinds(
    group: dist.ProcessGroup | None,
) -> Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, Tensor, dict[str, Tensor] | None]]:
    """A function that makes the dtypes of total and count, and the presence of aux, equal on all ranks; one reduction,
    once.

    Ranks without the last stage have a total of 0 in the default dtype, to which they would round an fp64 total. A
    floating-point count is fp64 on all ranks, where devices have it, or the others would divide by a rounded one. aux
    is None if no rank has any.
    """
    known: list[bool] = []

    def agreed(total: Tensor, count: Tensor, aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
        if not known:
            here = [total.dtype == torch.float64, count.is_floating_point(), bool(aux)]
            flags = torch.tensor(here, dtype=torch.long, device=count.device)
            known.extend(bool(flag) for flag in maximum(flags, group).tolist())
        total = total.double() if known[0] else total
        count = count.to(widest(count.device)) if known[1] else count
        return total, count, aux if known[2] else None

    return agreed


def _joined(of_stages: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Sums over microbatches and over this rank's stages; counts of its stages are concatenated."""
    totals = [functools.reduce(joined, of_parts) for of_parts in of_stages]
    counts = [total["counts"] for total in totals if "counts" in total]
    terms = [{name: value for name, value in total.items() if name != "counts"} for total in totals]
    return functools.reduce(joined, terms) | ({"counts": torch.cat(counts)} if counts else {})

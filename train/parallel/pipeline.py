"""Pipelines: a stage is a slice of the params tree and a pure function, run by torch's own schedules.

    pipe = pipeline(config, 2, "Interleaved1F1B")                 # which layers, in which order, on which rank
    mine = share(params, config, pipe, rank)                      # a rank's part of any tree like the params
    sums = gradient_sums(loss_fn, optimizer, pipe, group)         # `train.step.gradient_sums`, over the stages
    found = sums(mine, fnmodels.split(batch, 4))                  # four microbatches

Every rank is given the same microbatches, and makes masks, tables and layouts of them by itself: nothing but hidden
states and their gradients travels. A schedule is told no more of a microbatch than its number. So nothing passes
through torch's chunking, which cuts what has no batch dimension in silence; and a mask may be of any form.

Losses are sums, made by the last stage; nothing here divides them, and nothing adds up over the ranks but the gradient
of a tied embedding. What is found along the way (counts of experts) stays with the rank whose layers it is about.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fnmodels
from fnmodels import tree
from fnmodels.front import LayerFn
from fnmodels.mask import Layout, MaskLike
from fnmodels.ops.attention import Kernel
from fnmodels.ops.experts import Experts
from fnmodels.tree import Tree

from ..balance import Balance, balance_terms
from ..logprobs import head_logprobs, token_logprobs
from ..loss import IGNORE, counted, head_loss, next_token_loss, replayed
from ..optim import Optimizer, trainable_mask, wide_dtype
from ..step import Sums

Batch = Mapping[str, Tensor]

# How many stages a rank has: one, as many as one likes (2 unless it is said), or the two ends of a V.
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
VEE = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE, *LOOPED, *VEE)
SPLITTING = ("InterleavedZeroBubble", *VEE)  # the backward pass, into that of inputs and that of weights

# What padding is in each entry of a batch; 0 in all others.
_PADDING = {"labels": IGNORE, "next_labels": IGNORE, "next_tokens": -1}


@dataclass(frozen=True)
class Pipeline:
    """Where the layers are.

    schedule: one of SCHEDULES. layers: of each stage, [lo, hi). ranks: of each stage, its rank in the pipeline's group.
    """

    schedule: str
    layers: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return max(self.ranks) + 1

    def stages(self, rank: int) -> tuple[int, ...]:
        """Those that this rank runs, in order."""
        return tuple(stage for stage, of in enumerate(self.ranks) if of == rank)


def pipeline(
    config: Any, size: int, schedule: str = "1F1B", *, virtual: int | None = None, split: Sequence[int] | None = None
) -> Pipeline:
    """The layers of a model over `size` ranks.

    virtual: stages per rank, for LOOPED schedules. split: how many layers each stage has, in order; None: as equal as
    can be, the first ones one more, for the last has the head besides. ValueError where the stages do not fit.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}.")
    if size < 1:
        raise ValueError(f"A pipeline has one rank or more, not {size}.")
    fixed = {**dict.fromkeys(SINGLE, 1), **dict.fromkeys(VEE, 2)}.get(schedule)
    if virtual is not None and virtual != fixed and (fixed is not None or virtual < 1):
        raise ValueError(f"virtual is {virtual}; {schedule} has {fixed or 'one or more'} stages per rank.")
    per_rank = fixed or virtual or 2
    stages, layers = size * per_rank, len(fnmodels.family_of(config).kinds(config))
    if stages > layers:
        raise ValueError(
            f"{size} ranks with {per_rank} stage(s) each are {stages} stages, more than the model's {layers} layers."
        )
    if split is None:
        split = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    if len(split) != stages or sum(split) != layers or min(split) < 1:
        raise ValueError(
            f"split is {list(split)}; it must be {stages} numbers, for {size} ranks with {per_rank} stage(s) each, of "
            f"at least 1, which add up to the model's {layers} layers."
        )
    bounds = [sum(split[:stage]) for stage in range(stages + 1)]
    if schedule in VEE:
        ranks = (*range(size), *reversed(range(size)))
    else:
        ranks = tuple(stage % size for stage in range(stages))
    return Pipeline(schedule, tuple(itertools.pairwise(bounds)), ranks)


def check_microbatches(pipe: Pipeline, count: int) -> None:
    """ValueError for a number of microbatches that the schedule cannot run."""
    stages, rounds = len(pipe.layers), max(1, count // pipe.size)
    if count < 1:
        raise ValueError("A pipeline needs at least one microbatch.")
    if pipe.schedule in ("1F1B", "DualPipeV") and count < stages:
        raise ValueError(f"{pipe.schedule} needs at least as many microbatches as stages, {stages}, not {count}.")
    if pipe.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        raise ValueError(
            f"{pipe.schedule} over {pipe.size} ranks takes {count} microbatches in {rounds} rounds, which do not "
            f"divide them: a multiple of {pipe.size} does."
        )


# ---------------------------------------------------------------------------------------------- the tree's parts


def ends(config: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The entries of params outside of the layers that the first stage holds, and those of the last.

    Found by watching `embed` and `unembed`. What neither reads (heads for further tokens) is with the last; a tied
    embedding is in both.
    """
    return _watched(config)[:2]


@functools.lru_cache(maxsize=16)
def _watched(config: Any) -> tuple[frozenset[str], frozenset[str], int]:
    """`ends`, and the width of hidden states."""
    family = fnmodels.family_of(config)
    spec = {name: leaf for name, leaf in family.spec(config).items() if name != "layers"}
    outside = tree.map(lambda leaf: torch.empty(leaf.shape, device="meta"), spec)
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    first, last = _Reads(outside), _Reads(outside)
    x = family.embed(first, {"tokens": token, "positions": token}, config=config)
    family.unembed(last, x, config=config)
    return frozenset(first.seen), frozenset(last.seen | (outside.keys() - first.seen)), x.shape[-1]


class _Reads(dict[str, Any]):
    """A dict that remembers what was looked up in it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)


def share(whole: Tree, config: Any, pipe: Pipeline, rank: int) -> Tree:
    """A rank's part of `whole`, a tree like the params: the params, a spec, a plan.

    Layers become a dict under their numbers, as strings, so that every leaf keeps its path. A tied embedding is in the
    parts of the first and the last stage; see `copies`.
    """
    return _cut(whole, config, pipe, pipe.stages(rank))


def _cut(whole: Tree, config: Any, pipe: Pipeline, stages: Sequence[int]) -> Tree:
    first, last = ends(config)
    names = (first if 0 in stages else frozenset()) | (last if len(pipe.layers) - 1 in stages else frozenset())
    layers = _numbered(whole["layers"])
    numbers = [index for stage in stages for index in range(*pipe.layers[stage])]
    lost = [index for index in numbers if index not in layers]
    if lost:
        raise ValueError(
            f"Stages {list(stages)} need layer {lost[0]}, but the params have those with the numbers {sorted(layers)}."
        )
    cut = {"layers": {str(index): layers[index] for index in numbers}}
    return {n: cut.get(n, part) for n, part in whole.items() if n in names or n == "layers"}


def _check_share(params: Tree, config: Any, pipe: Pipeline, stages: Sequence[int]) -> None:
    """ValueError for params that are not of these stages alone: of the others nothing would be learned here."""
    own = _cut(params, config, pipe, stages)
    extra = sorted(params.keys() - own.keys())
    layers = sorted(set(_numbered(params["layers"])) - set(_numbered(own["layers"])))
    if extra or layers:
        what = repr(extra[0]) if extra else f"layer {layers[0]}"
        raise ValueError(
            f"The params hold {what}, which is not of stages {list(stages)}: give each rank its own part, as "
            "train.parallel.pipeline.share cuts it, or train.parallel.stages.stage_plan."
        )


def _numbered(layers: Tree) -> dict[int, Tree]:
    """{number: layer}, of a list, or of a dict whose keys are numbers or strings of them."""
    pairs = layers.items() if isinstance(layers, Mapping) else enumerate(layers)
    return {int(index): layer for index, layer in pairs}


def copies(config: Any, pipe: Pipeline, rank: int) -> frozenset[str]:
    """The entries of this rank's part that another rank has too and counts: leave them out of norms and checkpoints."""
    if rank != pipe.ranks[-1] or rank == pipe.ranks[0]:
        return frozenset()
    first, last = ends(config)
    return first & last


# ---------------------------------------------------------------------------------------------- the loss


@dataclass(frozen=True)
class Staged:
    """A loss in the form that a pipeline can run: layers, and what comes behind them.

    head(params, x, batch) -> (sum, count): of the last stage's leaves outside of the layers and the final hidden
    states; for `outputs` whatever is wanted. kernel, length, experts, balance: as in `train.next_token_loss`.
    """

    config: Any
    head: Callable[[Tree, Tensor, Batch], Any]
    kernel: Kernel = "auto"
    length: int | Tensor | None = None
    experts: str | Experts = "auto"
    balance: Balance | None = None


def staged(loss_fn: Callable[..., Any] | Staged) -> Staged:
    """Of functools.partial(train.next_token_loss, config=config, ...); what is `Staged` is returned as it is."""
    if isinstance(loss_fn, Staged):
        return loss_fn
    given, terms = _bound(loss_fn, next_token_loss, head_loss)

    def head(params: Tree, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return head_loss(params, x, batch["labels"], weights=batch.get("weights"), **terms)

    return Staged(given["config"], head, **_of_layers_in(given))


def staged_outputs(function: Callable[..., Any] | Staged) -> Staged:
    """Of functools.partial(train.token_logprobs, config=config, ...); its head returns what the function does."""
    if isinstance(function, Staged):
        return function
    given, terms = _bound(function, token_logprobs, head_logprobs)

    def head(params: Tree, x: Tensor, batch: Batch) -> Any:
        return head_logprobs(params, x, batch["labels"], **terms)

    return Staged(given["config"], head, **_of_layers_in(given))


def _bound(
    function: Callable[..., Any], whole: Callable[..., Any], head: Callable[..., Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """(what a functools.partial of `whole` has bound, that of it which `head` takes). ValueError for anything else."""
    given = function.keywords if isinstance(function, functools.partial) else {}
    if not isinstance(function, functools.partial) or function.func is not whole or "config" not in given:
        raise ValueError(
            "Over a pipeline the layers run on other ranks than the head, so the function must be "
            f"functools.partial(train.{whole.__name__}, config=config, ...), or a train.parallel.pipeline.Staged."
        )
    if given.get("layer_fn") is not None or given.get("layout") is not None:
        raise ValueError("Over a pipeline layer_fn and layout are the step's to set, so the loss must leave them open.")
    return given, {name: given[name] for name in inspect.signature(head).parameters if name in given}


def _of_layers_in(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("kernel", "length", "experts", "balance") if name in given}


@dataclass(frozen=True)
class Microbatch:
    """What every stage needs of one part of a batch; all but the layout lead with its rows."""

    batch: Batch
    inputs: Mapping[str, Tensor]
    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    layout: Layout | None


def microbatches(loss: Staged, pipe: Pipeline, parts: Sequence[Batch]) -> list[Microbatch]:
    """The parts, prepared. ValueError in a sentence, the same on every rank since all have the same parts.

    Every stage expects hidden states of one shape. So rows must be equally many; parts of unequal length are padded to
    the longest, which changes no result.
    """
    check_microbatches(pipe, len(parts))
    rows = [len(part["tokens"]) for part in parts]
    if len(set(rows)) > 1:
        odd = next(i for i, n in enumerate(rows) if n != rows[0])
        raise ValueError(
            f"Microbatch {odd} has {rows[odd]} rows, but the first has {rows[0]}: the rows of a pipeline's batch, "
            f"{sum(rows)}, must divide by the number of microbatches, {len(rows)}."
        )
    longest = max(part["tokens"].shape[1] for part in parts)
    return [_microbatch(loss, padded(part, longest)) for part in parts]


def padded(batch: Batch, length: int) -> Batch:
    """The batch with rows of `length` tokens, which is padding behind what there is."""
    size = batch["tokens"].shape[1]
    if size == length:
        return batch

    def longer(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != size:
            raise ValueError(
                f"{name} is {list(tensor.shape)} beside tokens of {size} columns, so it cannot be padded to {length}."
            )
        return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, length - size), value=_PADDING.get(name, 0))

    return {name: longer(name, tensor) for name, tensor in batch.items()}


def _microbatch(loss: Staged, batch: Batch) -> Microbatch:
    missing = [name for name in ("tokens", "positions", "segment_ids") if name not in batch]
    if missing:
        raise ValueError(f"The batch has no {' and no '.join(missing)}; its keys are {sorted(batch)}.")
    _check_range("tokens", batch["tokens"], loss.config.vocab_size)
    if "labels" in batch:
        labels = batch["labels"]
        _check_range("labels", labels.where(labels != IGNORE, 0), loss.config.vocab_size)
    inputs, masks, freqs_cis = fnmodels.prepare(
        loss.config,
        batch["tokens"],
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
        length=loss.length,
    )
    layout = fnmodels.document_layout(batch["positions"], batch["segment_ids"])
    return Microbatch(batch, replayed(inputs, batch), masks, freqs_cis, layout)


def _check_range(name: str, ids: Tensor, size: int) -> None:
    """On the CPU: one stage alone would stumble over it, and the others would wait."""
    if ids.is_cpu and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise ValueError(f"The {name} go from {int(ids.min())} to {int(ids.max())}; the model knows 0 to {size - 1}.")


def run_stage(
    params: Tree,
    x: Tensor | None,
    part: Microbatch,
    lo: int,
    hi: int,
    /,
    *,
    loss: Staged,
    layer_fn: LayerFn | None = None,
    outside: Callable[[Tree], Tree] | None = None,
    leaving: Callable[[Tensor], Tensor] | None = None,
    counts: bool = False,
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """((x [B, S, D], term), sums) of layers lo <= i < hi; of the last stage ((sum, count), sums). x None: the first.

    term: what these layers add to the loss, whose gradient x has in tow; the last stage's is in its sum.

    params: the stage's part. outside: makes of its leaves outside of the layers what is read (gathers them). leaving:
    makes x whole where `layer_fn` leaves it in parts (`TensorParallel.whole`), for the next stage.
    counts: return the counts of the experts. The terms of loss.balance are in sums as parts of means over all layers.
    """
    config, family = loss.config, fnmodels.family_of(loss.config)
    rest = {name: value for name, value in params.items() if name != "layers"}
    rest = rest if outside is None or not rest else outside(rest)
    x = family.embed(rest, part.inputs, config=config) if x is None else x
    names = ("router_logits", "expert_indices", "counts") if counts or loss.balance is not None else ()
    found = fnmodels.run_layers(
        {"layers": _numbered(params["layers"])},
        x,
        part.masks,
        part.freqs_cis,
        lo,
        hi,
        config=config,
        kernel=loss.kernel,
        layout=part.layout,
        layer_fn=layer_fn,
        valid=part.inputs["valid"],
        routing=part.batch.get("routing"),
        experts=loss.experts,
        taps=tuple(f"layers.*.{name}" for name in names),
    )
    x, tapped = found if names else (found, {})
    added, sums = _balance(loss, part, tapped)
    if hi == len(family.kinds(config)):
        total, count = loss.head(rest, x, part.batch)
        return (total if added is None else total + added, count), sums
    x = x if leaving is None else leaving(x)
    if added is None:
        return (x, torch.zeros((), device=x.device)), sums
    return (_Carry.apply(x, added), added.detach()), sums


def _balance(loss: Staged, part: Microbatch, tapped: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What these layers add to the loss, and the sums of it: their share of `balance_terms`' means over all layers."""
    here = sum(tap.endswith(".counts") for tap in tapped)
    if not here:
        return None, {}
    labelled = counted(part.batch["labels"], part.batch.get("weights")).sum(1)
    added, sums = balance_terms(tapped, part.inputs["valid"], labelled, loss.balance or Balance())
    share = here / sum(kind.endswith("_moe") for kind in fnmodels.family_of(loss.config).kinds(loss.config))
    sums = {name: value.detach() * (1 if name == "counts" else share) for name, value in sums.items()}
    return (None if loss.balance is None else added * share), sums


class _Carry(torch.autograd.Function):
    """x, with a term of the loss in tow: its gradient is 1, wherever in the pipeline the loss itself is made."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, term: Tensor) -> Tensor:
        return x.clone()  # a view could not be detached in place, which torch's stages do to what they have sent

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.like = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> NoReturn:
        raise NotImplementedError(
            "Forward mode does not see a term of the loss that a stage carries; use reverse mode."
        )


# ---------------------------------------------------------------------------------------------- running it


class _Stage(nn.Module):
    """What torch's stages want: a module, whose parameters are the leaves of `params` that train.

    index: the number of a microbatch, which is all that the schedule cuts up.
    """

    def __init__(self, run: Callable[..., tuple[tuple[Tensor, Tensor], dict[str, Tensor]]]) -> None:
        super().__init__()
        self.run = run
        self.params: Tree = {}
        self.parts: Sequence[Microbatch] = ()
        self.found: list[tuple[Tensor, dict[str, Tensor]]] = []

    def bind(self, params: Tree, parts: Sequence[Microbatch]) -> None:
        self.params, self.parts, self.found = params, parts, []
        self._parameters.clear()
        for path, leaf in tree.flatten(params).items():
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(path.replace(".", "/"), leaf)

    def forward(self, *x: Tensor, index: Tensor) -> Tensor:
        (out, beside), sums = self.run(self.params, x[0] if x else None, self.parts[int(index)])
        self.found.append((beside, sums))
        if torch.is_grad_enabled() and not out.requires_grad:
            # Nothing before here trains, but the stage behind sends a gradient all the same.
            out = out.detach().requires_grad_()
        return out


Found = list[list[tuple[Any, dict[str, Tensor]]]]  # of each stage of this rank, of each microbatch, what is beside x
Run = Callable[[Tree, Sequence[Batch], bool], tuple[list[Tensor], Found]]


def _runner(
    loss: Staged,
    pipe: Pipeline,
    group: dist.ProcessGroup | None,
    layer_fn: LayerFn | None,
    outside: Callable[[Tree], Tree] | None,
    leaving: Callable[[Tensor], Tensor] | None,
    counts: bool,
    dtype: torch.dtype | None,
) -> Run:
    """run(params, parts, train) -> (losses of the last stage, `Found`); gradients are left in the leaves."""
    if dist.get_world_size(group) != pipe.size:
        raise ValueError(f"The pipeline has {pipe.size} ranks, but its process group {dist.get_world_size(group)}.")
    if (counts or loss.balance is not None) and not getattr(fnmodels.family_of(loss.config), "ROUTED", False):
        raise ValueError(f"balance and counts are for models with experts, and {loss.config.model_type} has none.")
    stages, width = pipe.stages(dist.get_rank(group)), _watched(loss.config)[2]
    how: dict[str, Any] = {"loss": loss, "layer_fn": layer_fn, "outside": outside, "counts": counts}
    how["leaving"] = leaving
    made: dict[Any, tuple[list[_Stage], Any]] = {}

    def run(params: Tree, parts: Sequence[Batch], train: bool) -> tuple[list[Tensor], Found]:
        _check_share(params, loss.config, pipe, stages)
        ready = microbatches(loss, pipe, parts)
        cut = [_cut(params, loss.config, pipe, (stage,)) for stage in stages]
        sizes, device = ready[0].batch["tokens"].shape[:2], ready[0].batch["tokens"].device
        state = torch.empty(
            *sizes, width, dtype=dtype or _main_dtype(params["layers"]), device="meta", requires_grad=train
        )
        key = (len(ready), state.shape, state.dtype, device, train)
        if key not in made:
            modules = [_Stage(_of_layers(run_stage, *pipe.layers[stage], **how)) for stage in stages]
            made[key] = modules, _schedule(pipe, modules, stages, len(ready), state, device, group, train)
        modules, schedule = made[key]
        for module, part in zip(modules, cut, strict=True):
            module.bind(part, ready)
        numbers, losses = torch.arange(len(ready)), list[Tensor]()
        act = schedule.step if train else schedule.eval
        act(index=numbers, target=numbers, losses=losses, return_outputs=False)
        found = [module.found for module in modules]
        for module in modules:
            module.bind({}, ())  # nothing of this batch is kept
        return losses, found

    return run


def _summed(losses: Sequence[Tensor], found: Found) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum, count, sums) of this rank's stages."""
    beside = [torch.stack([term for term, _ in of_stage]).sum() for of_stage in found]
    count = beside.pop() if losses else torch.zeros_like(beside[-1], dtype=torch.long)
    total = torch.stack([*(loss.detach() for loss in losses), *beside]).sum()
    return total, count, _joined([[sums for _, sums in of_stage] for of_stage in found])


def _of_layers(run: Callable[..., Any], lo: int, hi: int, **how: Any) -> Callable[..., Any]:
    return lambda params, x, part: run(params, x, part, lo, hi, **how)


def _schedule(
    pipe: Pipeline,
    modules: Sequence[_Stage],
    stages: Sequence[int],
    count: int,
    state: Tensor,
    device: torch.device,
    group: dist.ProcessGroup | None,
    train: bool,
) -> Any:
    """torch's schedule for `count` microbatches whose hidden states are like `state`."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    last = len(pipe.layers) - 1
    total = torch.empty((), device="meta", requires_grad=train)
    made = [
        PipelineStage(
            module,
            stage,
            last + 1,
            device,
            input_args=() if stage == 0 else (state,),
            output_args=(total,) if stage == last else (state,),
            group=group,
        )
        for module, stage in zip(modules, stages, strict=True)
    ]
    kind: Any = get_schedule_class(pipe.schedule)
    # Losses are sums: torch would divide the gradients by the number of microbatches.
    how: dict[str, Any] = {"n_microbatches": count, "loss_fn": _the_loss, "scale_grads": False}
    if pipe.schedule in SINGLE:
        return kind(made[0], **how)
    schedule = kind(made, **how)
    if not train:
        from torch.distributed.pipelining import schedules

        # Its `eval` goes through the backward passes too, and where two stages of a V meet it wants their gradients.
        for act in (schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT):
            schedule.register_custom_function(act, lambda *_: None)
    return schedule


def _the_loss(output: Tensor, _: Tensor) -> Tensor:
    """The last stage has made it already."""
    return output


def _main_dtype(layers: Tree) -> torch.dtype:
    """That of the largest leaf: others (norms, selection biases) may be kept wider."""
    largest: Tensor = max(tree.leaves(layers), key=lambda leaf: leaf.numel())
    return largest.dtype


def _joined(of_stages: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Sums over microbatches and over the stages of this rank; the counts of one stage stand behind the other's."""
    joined: dict[str, Tensor] = {}
    for of_parts in of_stages:
        total: dict[str, Tensor] = {}
        for sums in of_parts:
            total = {name: total[name] + value if name in total else value for name, value in sums.items()}
        for name, value in total.items():
            if name in joined:
                value = torch.cat((joined[name], value)) if name == "counts" else joined[name] + value
            joined[name] = value
    return joined


def gradient_sums(
    loss_fn: Callable[..., Any] | Staged,
    optimizer: Optimizer,
    pipe: Pipeline,
    group: dist.ProcessGroup | None = None,
    *,
    layer_fn: LayerFn | None = None,
    outside: Callable[[Tree], Tree] | None = None,
    leaving: Callable[[Tensor], Tensor] | None = None,
    counts: bool = False,
    dtype: torch.dtype | None = None,
) -> Callable[..., Sums]:
    """sums(params, parts, into=None) -> Sums of this rank of a list of microbatches, added to `into` (and used up).

    loss_fn: see `staged`. group: the ranks of the pipeline; None: all. params: this rank's `share`. parts: dicts of
    [B, S], the same on every rank and all with as many rows; see `microbatches`.
    layer_fn: as in `fnmodels.forward`. outside, leaving: see `run_stage`. dtype: of hidden states between stages; None:
    that of the layers' weights.

    total: the last stage's sum, and what each rank's layers add to the loss; count: the last stage's, 0 elsewhere. Both
    are to be added up over the ranks. grads: of the local leaves that train, in fp32 at least, never divided; those of
    a tied embedding are the sum of both ends', on both of their ranks. aux, with counts: {"counts": [sparse layers of
    this rank, E], and of the balance terms this rank's part}.
    """
    loss = staged(loss_fn)
    run = _runner(loss, pipe, group, layer_fn, outside, leaving, counts, dtype)
    tied = frozenset.intersection(*ends(loss.config))

    def sums(params: Tree, parts: Sequence[Batch], into: Sums | None = None, *, divide: bool = False) -> Sums:
        leaves: dict[str, nn.Parameter] = {}
        train = tree.flatten(trainable_mask(params, optimizer.trainable))
        paths = iter(train)

        def leaf(param: Tensor) -> Tensor:
            path = next(paths)
            if not train[path]:
                return param.detach()
            leaves[path] = nn.Parameter(param.detach())
            if param.dtype != wide_dtype(param.dtype):
                leaves[path].grad_dtype = wide_dtype(param.dtype)
            return leaves[path]

        total, count, found = _summed(*run(tree.map(leaf, params), parts, True))
        grads = {path: _gradient(leaf) for path, leaf in leaves.items()}
        _sum_ends([grad for path, grad in grads.items() if path.partition(".")[0] in tied], pipe, group)
        aux = found if counts else None
        if into is None:
            return Sums(total, count, aux, list(grads.values()), False)
        into.total, into.count, into.aux = into.total + total, into.count + count, tree.map(torch.add, into.aux, aux)
        for held, grad in zip(into.grads, grads.values(), strict=True):
            held.add_(grad)
        return into

    return sums


def loss_sums(
    loss_fn: Callable[..., Any] | Staged,
    pipe: Pipeline,
    group: dist.ProcessGroup | None = None,
    *,
    layer_fn: LayerFn | None = None,
    outside: Callable[[Tree], Tree] | None = None,
    leaving: Callable[[Tensor], Tensor] | None = None,
    counts: bool = False,
    dtype: torch.dtype | None = None,
) -> Callable[[Tree, Sequence[Batch]], tuple[Tensor, Tensor, dict[str, Tensor] | None]]:
    """sums(params, parts) -> (sum, count, aux) without gradients, otherwise as `gradient_sums`."""
    run = _runner(staged(loss_fn), _forward(pipe), group, layer_fn, outside, leaving, counts, dtype)

    @torch.no_grad()
    def sums(params: Tree, parts: Sequence[Batch]) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
        total, count, found = _summed(*run(params, parts, False))
        return total, count, found if counts else None

    return sums


def outputs(
    function: Callable[..., Any] | Staged,
    pipe: Pipeline,
    group: dist.ProcessGroup | None = None,
    *,
    layer_fn: LayerFn | None = None,
    outside: Callable[[Tree], Tree] | None = None,
    leaving: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[Tree, Sequence[Batch]], list[Any] | None]:
    """run(params, parts) -> what the function returns of each microbatch, in the last stage's rank; None elsewhere.

    function: see `staged_outputs`; its tensors [B, S, ...] are cut where a microbatch was padded. No gradients.
    """
    given = staged_outputs(function)

    def head(params: Tree, x: Tensor, batch: Batch) -> tuple[Tensor, Any]:
        return x.new_zeros(()), given.head(params, x, batch)

    run = _runner(replace(given, head=head), _forward(pipe), group, layer_fn, outside, leaving, False, dtype)

    @torch.no_grad()
    def found(params: Tree, parts: Sequence[Batch]) -> list[Any] | None:
        losses, of_stages = run(params, parts, False)
        if not losses:
            return None
        lengths = [part["tokens"].shape[1] for part in parts]
        cut = lambda x, n: x[:, :n] if x.ndim > 1 and x.shape[1] == max(lengths) else x  # noqa: E731
        return [
            tree.map(functools.partial(cut, n=length), out)
            for length, (out, _) in zip(lengths, of_stages[-1], strict=True)
        ]

    return found


def _forward(pipe: Pipeline) -> Pipeline:
    """With a schedule that takes any number of microbatches; all run the same forward passes."""
    simple = "ZBVZeroBubble" if pipe.schedule in VEE else "GPipe" if pipe.schedule in SINGLE else "LoopedBFS"
    return replace(pipe, schedule=simple)


def _gradient(leaf: nn.Parameter) -> Tensor:
    if leaf.grad is None:
        return torch.zeros_like(leaf, dtype=wide_dtype(leaf.dtype), requires_grad=False)
    return leaf.grad.contiguous()


def _sum_ends(grads: Sequence[Tensor], pipe: Pipeline, group: dist.ProcessGroup | None) -> None:
    """Adds up, in place and on both ranks, what the first and the last stage found for the leaves that they share."""
    rank, pair = dist.get_rank(group), (pipe.ranks[0], pipe.ranks[-1])
    if rank not in pair or pair[0] == pair[1]:
        return  # the one rank that has both ends holds one leaf, whose gradients autograd adds up
    for grad in grads:
        mine = getattr(grad, "_local_tensor", grad)
        theirs = torch.empty_like(mine)
        peer = pair[1] if rank == pair[0] else pair[0]
        ops = [
            dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        mine.add_(theirs)

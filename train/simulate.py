"""What a training step will need on a machine that is not here: `python -m train.simulate --preset ... --mesh ...`.

    bytes that each rank holds, bytes that it sends, and how long its pipeline waits, of any model on any mesh

Nothing is communicated and no weight exists. Bytes of parameters, gradients and optimizer state are sums over
`params.plan`; messages are counted by the rules of `train.parallel`; activations are what autograd keeps of each kind
of layer, run once on meta tensors of the shapes that a rank has; the order of a pipeline's work is torch's own.

Ranks differ by their place in the pipeline. Where along another dimension the parts differ, the largest is shown.
Taken for granted: AdamW, parameters and moments in fp32, full rows, and tokens spread evenly over the experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.leaf import Leaf
from fnmodels.tree import Tree
from params.sharding import Sharding
from train.commands import Parser, at_least, run_command
from train.errors import UserError
from train.files import write_atomic
from train.head import CHUNK, head_loss
from train.parallel import pipeline as pp
from train.parallel.mesh import DATA, Mesh
from train.parallel.order import Action, idle, order, peak
from train.parallel.step import rules_of

HELD = ("parameters", "gradients", "optimizer", "gathered weights", "activations", "buffers", "working")
WIDE = 4  # bytes of what is kept and summed in fp32


@dataclass(frozen=True)
class Work:
    """What one step does. rows, length: of the global batch. microbatches: how many each rank takes its rows in.

    dtype: of gathered weights and activations. remat: "none" or "full". kernel: "flash", which keeps queries, keys,
    values and the output, or one of `fnmodels.ops.attention.KERNELS` that runs on meta.
    """

    rows: int
    length: int
    microbatches: int = 1
    schedule: str = "1F1B"
    virtual: int | None = None
    split: tuple[int, ...] | None = None
    remat: str = "none"
    dtype: torch.dtype = torch.bfloat16
    kernel: str = "flash"


@dataclass(frozen=True)
class Message:
    """Messages of one kind in a step, as a rank sees them: how many, and the bytes of the whole tensors they are of.

    A ring sends (n - 1) / n of an all_gather's or a reduce_scatter's bytes, and twice that of an all_reduce's.
    """

    kind: str
    dim: str
    what: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RankFacts:
    """One place in the pipeline. layers: [lo, hi) of each of its stages. waits: the part of a step it has no work."""

    pp: int
    layers: tuple[tuple[int, int], ...]
    held: Mapping[str, int]
    messages: tuple[Message, ...]
    waits: float

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.held.values())


# ------------------------------------------------------------------------------------------------ the plan


def simulate(config: Any, mesh: Mesh, work: Work) -> list[RankFacts]:
    """The facts of each place in the pipeline. ValueError in a sentence where mesh, model and batch do not fit."""
    parts = mesh.rows * work.microbatches
    if work.rows % parts or work.rows < 1:
        raise ValueError(
            f"{work.rows} rows do not divide into {work.microbatches} microbatches on each of {mesh.rows} ranks with "
            f"rows of their own: give a multiple of {parts}."
        )
    if work.length % mesh.cp:
        raise ValueError(f"Rows of {work.length} tokens do not divide by cp = {mesh.cp}.")
    if work.remat not in ("none", "full"):
        raise ValueError(f'remat is {work.remat!r}; it must be "none" or "full".')
    family = fnmodels.family_of(config)
    spec = family.spec(config)
    if mesh.ep > 1 and not any("expert" in leaf.axes for leaf in tree.leaves(spec)):
        raise ValueError(f"ep is {mesh.ep}, but a {config.model_type} has no experts to divide.")
    schedule = work.schedule if mesh.pp > 1 else "GPipe"
    pipe = pp.pipeline(config, mesh.pp, schedule, virtual=work.virtual if mesh.pp > 1 else None, split=work.split)
    pp.check_microbatches(pipe, work.microbatches)
    plan = P.plan(spec, rules_of(mesh, config), mesh.sizes)
    shape = (work.rows // parts, work.length // mesh.cp)
    kinds = family.kinds(config)
    by_kind = {kind: _layer(config, spec, plan, kinds.index(kind), shape, mesh, work) for kind in sorted(set(kinds))}
    model = _Model(config, spec, plan, mesh, work, pipe, shape, tuple(by_kind[kind] for kind in kinds))
    orders = [order(pipe, rank, work.microbatches) for rank in range(mesh.pp)]
    waits = idle(pipe, orders, again=work.remat == "full")
    return [model.rank(rank, orders[rank], waits[rank]) for rank in range(mesh.pp)]


@dataclass(frozen=True)
class _Layer:
    """One layer, on one rank, for one microbatch: bytes that autograd keeps, and those of what travels."""

    saved: int
    keys: int  # keys and values
    chosen: int  # rows that go to experts; 0 in a dense layer
    scores: int  # their weights


@dataclass(frozen=True)
class _Model:
    config: Any
    spec: Tree
    plan: Tree
    mesh: Mesh
    work: Work
    pipe: pp.Pipeline
    shape: tuple[int, int]
    layers: tuple[_Layer, ...]

    @property
    def stream(self) -> int:
        """Bytes of one microbatch's hidden states."""
        return math.prod(self.shape) * self.config.hidden_size * self.work.dtype.itemsize

    def rank(self, rank: int, actions: Sequence[Action], waits: float) -> RankFacts:
        stages = self.pipe.stages(rank)
        spec = tree.flatten(pp.share(self.spec, self.config, self.pipe, rank))
        plan = tree.flatten(pp.share(self.plan, self.config, self.pipe, rank))
        pieces = [_Piece(path, leaf, plan[path], self.mesh, self.work.dtype) for path, leaf in spec.items()]
        learning = [piece for piece in pieces if piece.leaf.trainable]
        groups: dict[str, list[_Piece]] = {}
        for piece in pieces:
            head, _, rest = piece.path.partition(".")
            groups.setdefault(f"layers.{rest.partition('.')[0]}" if head == "layers" else "", []).append(piece)
        last, first = len(self.pipe.layers) - 1 in stages, 0 in stages
        saved = {stage: self.saved(stage) for stage in stages}
        used = {stage: self.weights(stage, groups) for stage in stages}
        recomputed = max(self.layers[i].saved for s in stages for i in range(*self.pipe.layers[s]))
        largest = max(sum(piece.used for piece in group) for name, group in groups.items() if name)
        full = self.work.remat == "full"
        held = {
            "parameters": sum(piece.local * piece.leaf.dtype.itemsize for piece in pieces),
            "gradients": sum(piece.local for piece in learning) * WIDE,
            "optimizer": 2 * sum(piece.local for piece in learning) * WIDE,
            "gathered weights": peak(actions, used) + (largest if full else 0),
            "activations": peak(actions, saved) + (recomputed if full else 0),
            "buffers": self.work.microbatches
            * self.stream
            * sum((stage > 0) + (stage < len(self.pipe.layers) - 1) for stage in stages),
            "working": self.working(groups, last),
        }
        return RankFacts(
            rank,
            tuple(self.pipe.layers[stage] for stage in stages),
            held,
            tuple(self.messages(rank, groups, first, last)),
            waits,
        )

    def saved(self, stage: int) -> int:
        """Bytes that autograd keeps of one microbatch."""
        lo, hi = self.pipe.layers[stage]
        kept = [self.stream if self.work.remat == "full" else layer.saved for layer in self.layers[lo:hi]]
        return sum(kept) + (self.head if hi == len(self.layers) else 0)

    @functools.cached_property
    def head(self) -> int:
        """What the loss keeps: its gradients, which it makes at once."""
        outside = {name: leaf for name, leaf in self.spec.items() if name != "layers"}
        shards = {name: leaf for name, leaf in self.plan.items() if name != "layers"}
        params = tree.map(functools.partial(_on_meta, dtype=self.work.dtype), outside, shards)
        x = torch.empty(*self.shape, self.config.hidden_size, dtype=self.work.dtype, device="meta", requires_grad=True)
        labels = torch.zeros(self.shape, dtype=torch.long, device="meta")
        given = [x, labels, *tree.leaves(params)]
        return saved_bytes(lambda: head_loss(params, x, labels, config=self.config)[0], given) + self.stream

    def weights(self, stage: int, groups: Mapping[str, list[_Piece]]) -> int:
        """Bytes of gathered or cast weights that stay until a microbatch's backward pass."""
        lo, hi = self.pipe.layers[stage]
        kept = 0
        if self.work.remat == "none":
            kept += sum(piece.used for i in range(lo, hi) for piece in groups[f"layers.{i}"])
        if hi == len(self.layers):
            kept += sum(piece.used for piece in groups.get("", []))
        return kept

    def working(self, groups: Mapping[str, list[_Piece]], last: bool) -> int:
        """The larger of a layer's gradient before it is reduced, and of the logits of a chunk with their gradient."""
        item = self.work.dtype.itemsize
        of_layers = [sum(p.whole * (item + WIDE) for p in group if p.used) for name, group in groups.items() if name]
        tokens = min(CHUNK, math.prod(self.shape))
        logits = tokens * self.config.vocab_size // self.mesh.tp * (item + 2 * WIDE) if last else 0
        return max(*of_layers, logits, 0)

    def messages(self, rank: int, groups: Mapping[str, list[_Piece]], first: bool, last: bool) -> Iterable[Message]:
        parts, again = self.work.microbatches, self.work.remat == "full"
        found: dict[tuple[str, str, str], list[int]] = {}

        def send(kind: str, dim: str, what: str, size: int, times: int = 1) -> None:
            entry = found.setdefault((kind, dim, what), [0, 0])
            entry[0], entry[1] = entry[0] + times, entry[1] + times * size

        for name, group in groups.items():
            for size, item, learns, copied, gathered in _ways(group):
                gathers = parts * (2 if again and name else 1)
                whole = size
                for dim in reversed(gathered):
                    whole *= self.mesh.sizes[dim]
                    send("all_gather", dim, "weights", whole * item, gathers)
                    if learns:
                        send("reduce_scatter", dim, "gradients", whole * WIDE, parts)
                for dim in copied if learns else ():
                    send("all_reduce", dim, "gradients", size * WIDE, parts)
        stages = self.pipe.stages(rank)
        mine = [self.layers[i] for stage in stages for i in range(*self.pipe.layers[stage])]
        for layer in mine:
            if self.mesh.cp > 1:
                send("all_gather", "cp", "keys and values", layer.keys * self.mesh.cp, parts * (2 if again else 1))
                wide = layer.keys * self.mesh.cp * WIDE // self.work.dtype.itemsize
                send("reduce_scatter", "cp", "their gradients", wide, parts)
            if self.mesh.ep > 1 and layer.chosen:
                send("all_to_all", "ep", "tokens", layer.chosen, parts * (6 if again else 4))
            if self.mesh.tp > 1 and layer.chosen:
                send("all_reduce", "tp", "activations", layer.scores, parts)
        if self.mesh.tp > 1:
            for group in groups.values():
                for what, size, times in self.reductions(group, first, last):
                    send("all_reduce", "tp", what, size, parts * times)
            if last:
                tokens = math.prod(self.shape)
                chunks = -(-tokens // CHUNK)  # what a cross entropy over parts of the vocabulary needs of each token
                send("all_gather", "tp", "cross entropy", 3 * tokens * self.mesh.tp * WIDE // chunks, parts * chunks)
        for stage in stages:
            for other, what in ((stage + 1, "hidden states"), (stage - 1, "their gradients")):
                if 0 <= other < len(self.pipe.layers) and self.pipe.ranks[other] != rank:
                    send("send", "pp", what, self.stream, parts)
        tied = frozenset.intersection(*pp.ends(self.config))
        if (first or last) and self.pipe.ranks[0] != self.pipe.ranks[-1]:
            for piece in groups.get("", []):
                if piece.path.partition(".")[0] in tied:
                    send("send", "pp", "tied gradients", piece.local * WIDE)
        return (Message(*key, count, size) for key, (count, size) in found.items())

    def reductions(self, group: Sequence[_Piece], first: bool, last: bool) -> Iterable[tuple[str, int, int]]:
        """(of what, bytes, how often) in each microbatch: what enters and leaves, and gradients of what all hold."""
        again = self.work.remat == "full"
        paths = [piece.path.split(".", 2)[-1] for piece in group]
        if not group[0].path.startswith("layers."):
            yield "activations", self.stream, first + last
            norms = [piece for piece in group if piece.leaf.axes == ("embed",)] if last else []
            for norm in norms:
                yield "shared leaves", norm.whole * self.work.dtype.itemsize, -(-math.prod(self.shape) // CHUNK)
            return
        sublayers = 2 + any(path.startswith("mlp.shared_expert.") for path in paths)
        # Computing again ends with what was kept last, which is before the last one leaves.
        yield "activations", self.stream, 2 * sublayers + (sublayers - 1 if again else 0)
        shared = sum(piece.whole for piece in group if piece.shared)
        if shared:
            yield "shared leaves", shared * WIDE, 1


@dataclass(frozen=True)
class _Piece:
    """One leaf on one rank."""

    path: str
    leaf: Leaf
    sharding: Sharding
    mesh: Mesh
    dtype: torch.dtype

    @property
    def local(self) -> int:
        """Numbers that the rank holds."""
        return math.prod(self.sharding.local_shape)

    @property
    def whole(self) -> int:
        """Numbers that it computes with: gathered over what divides it, but tp and ep."""
        return math.prod(_gathered(self.sharding))

    @property
    def compute(self) -> torch.dtype:
        """What does not learn (a router's bias) keeps its own."""
        return self.dtype if self.leaf.trainable else self.leaf.dtype

    @property
    def shared(self) -> bool:
        """Whether all ranks of tp hold it and use it between a sublayer's ends, each for its own heads or columns."""
        axes, place = self.leaf.axes, dict(zip(self.mesh.sizes, self.sharding.dims, strict=True))["tp"]
        inside = "expert" in axes or (axes[0] != "embed" and {"heads", "kv_heads", "latent", "head_dim"} & set(axes))
        return self.leaf.trainable and place is None and bool(inside)

    @property
    def used(self) -> int:
        """Bytes of a gathered or cast copy; 0 where the parameter itself is used."""
        same = self.whole == self.local and self.compute == self.leaf.dtype
        return 0 if same else self.whole * self.compute.itemsize


def _gathered(sharding: Sharding) -> tuple[int, ...]:
    """The shape of what a rank computes with."""
    places = zip(sharding.sizes, sharding.dims, strict=True)
    kept = tuple(dim if name in ("tp", "ep") else None for (name, _), dim in places)
    return dataclasses.replace(sharding, dims=kept).local_shape


def _ways(group: Sequence[_Piece]) -> Iterable[tuple[int, int, bool, tuple[str, ...], tuple[str, ...]]]:
    """(numbers, bytes of one, do they learn, dimensions that hold copies, that divide) of what travels together."""
    found: dict[Any, int] = {}
    for piece in group:
        dims = [(n, dim) for (n, size), dim in zip(piece.sharding.sizes, piece.sharding.dims, strict=True) if size > 1]
        copied = tuple(name for name, dim in dims if dim is None and name in DATA)
        gathered = tuple(name for name, dim in dims if dim is not None and name in DATA and name != "ep")
        key = (piece.compute, piece.leaf.trainable, copied, gathered)
        found[key] = found.get(key, 0) + piece.local
    return [(size, dtype.itemsize, *way) for (dtype, *way), size in found.items()]


# ------------------------------------------------------------------------------------------------ activations


def saved_bytes(run: Callable[[], Any], given: Sequence[Tensor] = ()) -> int:
    """Bytes of the tensors that autograd keeps of what `run` does, each storage once and without those of `given`."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    kept: dict[int, Any] = {}  # the storage itself too, so that its address is not used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    size = sum(storage.nbytes() for storage in kept.values())
    del out
    return size


def _on_meta(leaf: Leaf, sharding: Sharding, *, dtype: torch.dtype) -> Tensor:
    """What a rank computes with, without values."""
    made = torch.empty(_gathered(sharding), dtype=dtype if leaf.trainable else leaf.dtype, device="meta")
    return made.requires_grad_(leaf.trainable)


def _layer(config: Any, spec: Tree, plan: Tree, index: int, shape: tuple[int, int], mesh: Mesh, work: Work) -> _Layer:
    """One layer run on meta, with the heads, columns and experts of one rank."""
    layer = tree.map(functools.partial(_on_meta, dtype=work.dtype), spec["layers"][index], plan["layers"][index])
    x = torch.empty(*shape, config.hidden_size, dtype=work.dtype, device="meta", requires_grad=True)
    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    inputs, masks, freqs = fnmodels.prepare(
        config, tokens, positions=tokens, segment_ids=torch.ones_like(tokens), length=work.length
    )
    keys: list[int] = []
    chosen: list[int] = [0, 0]

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Tensor:
        keys.append((k.numel() + v.numel()) * k.element_size())
        groups = q.shape[2] // k.shape[2] or 1
        if q.shape[2] % k.shape[2]:  # fewer KV heads than ranks: all are held, those of this rank's queries are used
            k, v = k[:, :, :groups], v[:, :, :groups]
        if mesh.cp > 1:
            k, v = k.repeat(1, mesh.cp, 1, 1), v.repeat(1, mesh.cp, 1, 1)
        out: Tensor = _Flash.apply(q, k, v)[0]
        return out

    def experts(leaves: Tree, x: Tensor, weights: Tensor, indices: Tensor, _: Tensor, **how: Any) -> Tensor:
        chosen[:] = indices.numel() * x.shape[-1] * x.element_size(), weights.numel() * weights.element_size()
        return _even_experts(leaves, x, weights, indices, **how)

    run = functools.partial(
        fnmodels.run_layers,
        {"layers": {index: layer}},
        x,
        masks,
        freqs,
        index,
        index + 1,
        config=config,
        kernel=kernel if work.kernel == "flash" else work.kernel,
        valid=inputs["valid"],
        experts=experts,
    )
    given = [*tree.leaves(layer), *inputs.values(), *tree.leaves(masks), *tree.leaves(freqs)]
    return _Layer(saved_bytes(run, given), sum(keys), *chosen)


class _Flash(torch.autograd.Function):
    """Shapes of a fused attention, and what it keeps: its arguments, its result, a number per query and head."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)


def _even_experts(
    leaves: Mapping[str, Tensor], x: Tensor, weights: Tensor, indices: Tensor, *, act: Any, input_weighted: bool = False
) -> Tensor:
    """Shapes of the experts that a rank holds where all get equally many tokens."""
    here, k = leaves["gate_proj"].shape[0], indices.shape[1]
    each = -(-indices.numel() // here)
    rows = x.repeat(-(-each * here // len(x)), 1)[: each * here].unflatten(0, (here, each))

    def linear(rows: Tensor, name: str) -> Tensor:
        y = rows @ leaves[f"{name}_proj"].mT
        return y + leaves[f"{name}_bias"][:, None] if f"{name}_bias" in leaves else y

    y = linear(act(linear(rows, "gate"), linear(rows, "up")), "down")
    y = y.flatten(0, 1)[: indices.numel()].unflatten(0, (len(x), k))
    return y.sum(1) if input_weighted else (y * weights.to(y.dtype)[..., None]).sum(1)


# ------------------------------------------------------------------------------------------------ what is shown


def table(found: Sequence[RankFacts], memory: float | None) -> str:
    """Memory and waiting of each place in the pipeline; where it has more than `memory` bytes, that is said."""
    lines: list[tuple[str, ...]] = [("pp", "layers", *HELD, "all", "waits")]
    for rank in found:
        layers = " ".join(f"{lo}-{hi - 1}" for lo, hi in rank.layers)
        sizes = (*(rank.held[name] for name in HELD), rank.total)
        lines.append((str(rank.pp), layers, *map(shown, sizes), f"{rank.waits:.1%}"))
    text = _aligned(lines)
    if memory is not None:
        over = [rank for rank in found if rank.total > memory]
        worst = max(found, key=lambda rank: rank.total)
        if over:
            places = ", ".join(str(rank.pp) for rank in over)
            text += (
                f"\n\nDOES NOT FIT: {len(over)} of {len(found)} places in the pipeline (pp {places}) need more than "
                f"{shown(memory)}, up to {shown(worst.total)}, most of it "
                f"{max(HELD, key=lambda name: worst.held[name])}."
            )
        else:
            text += f"\n\nIt fits: at most {shown(worst.total)} of {shown(memory)}, on pp {worst.pp}."
    return text


def traffic(found: Sequence[RankFacts]) -> str:
    """Messages of a step, of the rank with the most bytes of each kind."""
    lines = [("message", "over", "of", "count", "bytes", "on pp")]
    kinds = dict.fromkeys((m.kind, m.dim, m.what) for rank in found for m in rank.messages)
    for kind in kinds:
        sent = [(m, rank.pp) for rank in found for m in rank.messages if (m.kind, m.dim, m.what) == kind]
        most, place = max(sent, key=lambda entry: entry[0].bytes)
        lines.append((*kind, f"{most.count:,}", shown(most.bytes), str(place)))
    return _aligned(lines) if len(lines) > 1 else "No messages: one rank."


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def shown(size: float) -> str:
    """Bytes in units of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError


def picture(path: Path, found: Sequence[RankFacts], memory: float | None, title: str) -> None:
    """Memory of each place in the pipeline, stacked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 2.5 + 0.6 * len(found)), 5), layout="constrained")
    axes = figure.subplots()
    places, below = [str(rank.pp) for rank in found], [0.0] * len(found)
    for name in HELD:
        sizes = [rank.held[name] / 2**30 for rank in found]
        if any(sizes):
            axes.bar(places, sizes, bottom=below, label=name)
            below = [low + size for low, size in zip(below, sizes, strict=True)]
    if memory is not None:
        axes.axhline(memory / 2**30, color="black", linestyle="--", label="memory of the device")
    axes.set(xlabel="place in the pipeline", ylabel="GiB per rank", title=title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")  # as they are stacked
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parser() -> Parser:
    made = Parser(prog="python -m train.simulate", description="What each rank of a mesh will hold, send and wait for.")
    made.add_argument("--preset", required=True, metavar="NAME", help="a model of fnmodels.presets()")
    made.add_argument("--mesh", default="", metavar="AXES", help="pp=8,fsdp=4,ep=16 and so on")
    made.add_argument("--rows", type=at_least(1), metavar="N", help="of the global batch; default: one per microbatch")
    made.add_argument("--length", type=at_least(1), default=4096, metavar="N", help="tokens of a row (default 4096)")
    made.add_argument("--microbatches", type=at_least(1), metavar="N", help="per rank; default: twice the stages, or 1")
    made.add_argument("--schedule", default="1F1B", metavar="NAME", help=f"{', '.join(pp.SCHEDULES)}; default 1F1B")
    made.add_argument("--virtual", type=at_least(1), metavar="N", help="stages per rank of a looped schedule")
    made.add_argument("--remat", default="none", choices=("none", "full"), help="what is recomputed (default none)")
    made.add_argument("--dtype", default="bf16", choices=tuple(DTYPES), help="of activations and of weights in use")
    made.add_argument("--memory", type=at_least(0.0), default=80.0, metavar="GIB", help="of a device (default 80)")
    made.add_argument("--picture", type=Path, metavar="PNG", help="draw the memory of the ranks there")
    return made


def run(arguments: argparse.Namespace) -> int:
    try:
        config, mesh = fnmodels.preset(arguments.preset), Mesh.parse(arguments.mesh)
        if arguments.schedule not in pp.SCHEDULES:
            raise ValueError(f"there is no schedule {arguments.schedule!r}; there are {', '.join(pp.SCHEDULES)}.")
        per_rank = 1 if arguments.schedule in pp.SINGLE else arguments.virtual or 2
        microbatches = arguments.microbatches or (2 * mesh.pp * per_rank if mesh.pp > 1 else 1)
        work = Work(
            arguments.rows or mesh.rows * microbatches,
            arguments.length,
            microbatches,
            arguments.schedule,
            arguments.virtual,
            remat=arguments.remat,
            dtype=DTYPES[arguments.dtype],
        )
        found = simulate(config, mesh, work)
    except ValueError as error:
        raise UserError(str(error)) from error
    title = f"{arguments.preset} on {mesh}, {mesh.world:,} ranks"
    tokens = work.rows * work.length
    print(
        f"{title}\n{P.count(config):,} parameters; a step is {work.rows:,} rows of {work.length:,}, {tokens:,} tokens, "
        f"in {microbatches} microbatches on each rank; {work.schedule if mesh.pp > 1 else 'no pipeline'}, "
        f"remat {work.remat}, {arguments.dtype}\n"
    )
    memory = arguments.memory * 2**30
    print(f"bytes held by one rank of each place in the pipeline\n{table(found, memory)}\n")
    print(f"messages of a step, of the rank with the most; bytes are of whole tensors\n{traffic(found)}")
    if arguments.picture:
        picture(arguments.picture, found, memory, title)
        print(f"\npicture: {arguments.picture}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("python -m train.simulate", parser, run, argv, needs=("matplotlib",))


if __name__ == "__main__":
    sys.exit(main())

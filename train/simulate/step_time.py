"""The time of a step: what each action of the pipeline computes and sends, laid out in the schedule's order.

A layer's forward takes its products and attention at the machine's rates, its other operations at the bandwidth of
memory, and a launch each; its backward twice that (attention 2.5 times, arXiv 2205.14135). A message takes its latency,
and the bytes of a ring over the link. Messages over `Machine.overlap` travel beside the computation, those on one kind
of link after another; what they take longer than it, and all other messages, is added to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fnmodels.models.common.family import DecoderConfig
from train.parallel.mesh import Mesh
from train.parallel.pipeline.timeline import Action, run

from .facts import WIDE, Message, Work
from .machine import Link, Machine
from .operations import Operations
from .rank import PipelineRank
from .simulation import pipeline_ranks
from .traffic import messages


@dataclass(frozen=True)
class StepTime:
    """seconds: of a step. The slowest rank's: compute, waits for messages that nothing hides, waits for other
    stages, and the update. flops: of forward and backward without recomputation, of all ranks.
    """

    seconds: float
    compute: float
    exposed: float
    idle: float
    update: float
    tokens: int
    flops: float
    devices: int
    peak: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def flops_per_device(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds / self.devices

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: a share of the machine's stated peak."""
        return self.flops_per_device / self.peak


def step_time(config: DecoderConfig, mesh: Mesh, work: Work, machine: Machine) -> StepTime:
    """The time of a step of `train.make_step` over the mesh. ValueError as in `simulate`."""
    return timed(pipeline_ranks(config, mesh, work), machine)


def timed(ranks: Sequence[PipelineRank], machine: Machine) -> StepTime:
    """The time of a step of these pipeline ranks."""
    model = ranks[0].model
    mesh, work = model.mesh, model.work
    kinds = {action[:2] for rank in ranks for action in rank.actions}
    takes = {(kind, stage): _compute(ranks[model.pipe.ranks[stage]], kind, stage, machine) for kind, stage in kinds}
    computes = [sum(takes[action[:2]] for action in rank.actions) for rank in ranks]
    exposed = [_exposed(rank, took, machine) for rank, took in zip(ranks, computes, strict=True)]
    longer = [1 + waits / took for waits, took in zip(exposed, computes, strict=True)]

    def cost(action: Action) -> float:
        return takes[action[:2]] * longer[model.pipe.ranks[action[1]]]

    send = _seconds(machine.link(mesh, "pp"), model.hidden_bytes) if mesh.pp > 1 else 0.0
    busy, end = run(model.pipe, [rank.actions for rank in ranks], cost, send)
    update = max(_update(rank, machine) for rank in ranks)
    slow = max(range(mesh.pp), key=lambda rank: busy[rank])
    flops = sum(_model_flops(rank) for rank in ranks) * mesh.world / mesh.pp
    return StepTime(
        end + update,
        busy[slow] - exposed[slow],
        exposed[slow],
        end - busy[slow],
        update,
        work.rows * work.length,
        flops,
        mesh.world,
        machine.peak,
    )


def _duration(work: Operations, machine: Machine) -> float:
    moved = work.bytes / machine.memory + work.number * machine.launch
    return work.products / machine.products + work.attention / machine.attention + moved


BACKWARD = {"B": 2.0, "I": 1.0, "W": 1.0}  # of a forward pass; the two halves together are one backward pass


def _compute(rank: PipelineRank, kind: str, stage: int, machine: Machine) -> float:
    """Seconds that an action of this kind computes."""
    model = rank.model
    again = model.recomputes(stage)
    if stage == 0 and kind in "IW":  # the first stage has its whole backward pass in the second half
        factor = {"I": 0.0, "W": 2.0}[kind]
    else:
        factor = BACKWARD.get(kind, 1.0)
    total = Operations()
    for i in range(*model.pipe.layers[stage]):
        forward = model.layers[i].forward
        if kind == "F":
            total += forward
        else:
            more = Operations(attention=0.5 * factor / 2 * forward.attention)
            total += forward.times(factor + (again[i] if factor else 0), more)
    if rank.is_last(stage) and kind == "F":
        total += model.ends.head_operations
    return _duration(total, machine)


def _model_flops(rank: PipelineRank) -> float:
    """FLOPs of products and attention of forward and backward."""
    model, layers = rank.model, 0.0
    for stage in rank.stages:
        for i in range(*model.pipe.layers[stage]):
            layers += 3 * (model.layers[i].forward.products + model.layers[i].forward.attention)
        layers += model.ends.head_operations.products if rank.is_last(stage) else 0
    return layers * model.work.microbatches


def _exposed(rank: PipelineRank, computes: float, machine: Machine) -> float:
    """Seconds that a rank waits for messages beside those of the pipeline."""
    hidden: dict[Link, float] = {}
    waits = 0.0
    for message in messages(rank):
        if message.dim == "pp":
            continue
        link = machine.link(rank.model.mesh, message.dim)
        took = _transfer(message, rank.model.mesh, link)
        if message.dim in machine.overlap:
            hidden[link] = hidden.get(link, 0.0) + took
        else:
            waits += took
    return waits + max(0.0, max(hidden.values(), default=0.0) - computes)


def _transfer(message: Message, mesh: Mesh, link: Link) -> float:
    """Seconds of all messages of a kind, as rings."""
    ranks = mesh.sizes[message.dim]
    passes = 2 if message.kind == "all_reduce" else 1
    size = message.bytes * (ranks - 1) / ranks * passes
    steps = passes * (1 if message.kind == "all_to_all" else math.ceil(math.log2(ranks)))
    return size / link.bytes + message.count * steps * link.latency


def _seconds(link: Link, size: float) -> float:
    return size / link.bytes + link.latency


def _update(rank: PipelineRank, machine: Machine) -> float:
    """AdamW reads parameter, gradient and two moments and writes three of them, and the norm reads the gradient."""
    trained = [leaf for leaf in rank.leaves if leaf.spec.trainable]
    launches = 12 * len(trained) * machine.launch
    return 8 * WIDE * sum(leaf.local for leaf in trained) / machine.memory + launches

"""The fastest meshes for a model and a number of devices, of those whose memory suffices: `search`."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import fnmodels
from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from params.axes import EXPERT
from train.parallel.mesh import Mesh
from train.parallel.pipeline.schedule import LOOPED

from .facts import Work
from .machine import Machine
from .memory import held
from .simulation import pipeline_ranks
from .step_time import StepTime, timed


@dataclass(frozen=True)
class Plan:
    """One way to run a step. memory: the bytes of the rank that holds most."""

    mesh: Mesh
    work: Work
    time: StepTime
    memory: int


def search(
    config: DecoderConfig,
    devices: int,
    work: Work,
    machine: Machine,
    memory: float,
    *,
    schedules: Sequence[str] = ("1F1B",),
    remat: Sequence[str] = ("none", "full"),
) -> list[Plan]:
    """All that fit, the fastest first: every mesh of pp, fsdp, ep, cp and tp over `devices` devices.

    work: its rows, length, dtype and sync; microbatches have one row per rank and more, by powers of two. memory: bytes
    of a device. tp stays within a node, cp keeps 4,096 positions per rank. ValueError if nothing fits, with the mesh
    that needs the least.
    """
    found = list[Plan]()
    least: tuple[int, Mesh, Work] | None = None
    for mesh in _meshes(config, devices, work, machine):
        for one in _ways(mesh, work, schedules, remat):
            try:
                ranks = pipeline_ranks(config, mesh, one)
            except ValueError:  # the mesh, the schedule and the model do not fit together
                continue
            needs = max(sum(held(rank).values()) for rank in ranks)
            if needs <= memory:
                found.append(Plan(mesh, one, timed(ranks, machine), needs))
            elif least is None or needs < least[0]:
                least = needs, mesh, one
    if found:
        return sorted(found, key=lambda plan: plan.time.seconds)
    if least:
        needs, mesh, one = least
        raise ValueError(
            f"Nothing fits into {memory / 2**30:,.1f} GiB: {mesh} with remat {one.remat!r} needs the least, "
            f"{needs / 2**30:,.1f} GiB; give more devices, or shorter rows."
        )
    raise ValueError(
        f"No mesh of {devices} devices divides {work.rows} rows of {work.length} tokens: give a multiple of {devices} "
        "rows, or another number of devices."
    )


def _meshes(config: DecoderConfig, devices: int, work: Work, machine: Machine) -> Iterator[Mesh]:
    layers = len(fnmodels.family_of(config).kinds(config))
    spec = tree.leaves(fnmodels.family_of(config).spec(config))
    experts = max((leaf.shape[0] for leaf in spec if leaf.axes[0] == EXPERT), default=1)
    limits = {"tp": machine.node, "cp": max(1, work.length // 4096), "ep": experts, "pp": layers}
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for tp, cp, ep, pp in itertools.product(*([d for d in divisors if d <= limits[name]] for name in limits)):
        if devices % (tp * cp * ep * pp) == 0:
            mesh = Mesh(fsdp=devices // (tp * cp * ep * pp), tp=tp, cp=cp, ep=ep, pp=pp)
            if work.rows % mesh.rows == 0 and experts % ep == 0 and work.length % cp == 0:
                yield mesh


def _ways(mesh: Mesh, work: Work, schedules: Sequence[str], remat: Sequence[str]) -> Iterator[Work]:
    """Microbatches of 1, 2 and 4 rows; with a pipeline as many of them as it has ranks, or more."""
    rows = work.rows // mesh.rows
    counts = [rows // size for size in (1, 2, 4) if rows % size == 0 and rows // size >= mesh.pp]
    for count, how, schedule in itertools.product(counts, remat, schedules if mesh.pp > 1 else ("1F1B",)):
        virtual = 2 if schedule in LOOPED else None
        yield replace(work, microbatches=count, remat=how, schedule=schedule, virtual=virtual)

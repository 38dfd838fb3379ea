"""Assigns a model's layers to stages, and stages to the ranks of a pipeline, for each schedule."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import fnmodels
from fnmodels.models.common.family import DecoderConfig
from train.parallel.compose import check_pipelined

# Stages per rank: one, any number (`virtual`, 2 by default), or two, at mirrored positions of a V.
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
VEE = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE, *LOOPED, *VEE)
SPLITTING = ("InterleavedZeroBubble", *VEE)  # split backward into a pass for inputs and one for weights


@dataclass(frozen=True)
class Pipeline:
    """The assignment of a model's layers to pipeline ranks.

    schedule: one of SCHEDULES. layers: per stage, [lo, hi). ranks: per stage, its rank in the pipeline's group.
    """

    config: DecoderConfig
    schedule: str
    layers: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return max(self.ranks) + 1

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages of this rank, in order."""
        return tuple(stage for stage, of in enumerate(self.ranks) if of == rank)


def pipeline(
    config: DecoderConfig,
    size: int,
    schedule: str = "1F1B",
    *,
    virtual: int | None = None,
    split: Sequence[int] | None = None,
) -> Pipeline:
    """The `Pipeline` of a model's layers over `size` ranks.

    virtual: stages per rank, for LOOPED schedules; None: 2. split: the number of layers of each stage, in order; None:
    as equal as possible, earlier stages one more, since the last has the head too. ValueError if the stages do not fit.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}.")
    if size < 1:
        raise ValueError(f"A pipeline has one rank or more, not {size}.")
    check_pipelined(config, size)
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
    return Pipeline(config, schedule, tuple(itertools.pairwise(bounds)), ranks)


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

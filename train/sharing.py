"""Who does what of a run by several processes: what `--mesh` says, held against the settings and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import params as P
from train import model
from train.errors import UserError
from train.joining import world
from train.optim import takes_parts
from train.parallel import Mesh, Strategy
from train.parallel.mesh import not_compiled
from train.parallel.pipeline import SCHEDULES, check_microbatches, pipeline
from train.parallel.step import rules_of
from train.parallel.updates import check_whole
from train.recipe import optimizer_for
from train.settings import Settings


@dataclass(frozen=True)
class Sharing:
    """Who does what. schedule: of a pipeline; microbatches: in how many of them it takes the rows that a stage has."""

    mesh: Mesh
    schedule: str = "1F1B"
    microbatches: int = 1

    def __str__(self) -> str:
        return f"--mesh {self.mesh}"


def checked(
    text: str | None, settings: Settings, schedule: str | None = None, microbatches: int | None = None
) -> Sharing:
    """What `--mesh`, `--schedule` and `--microbatches` say; without the last, each microbatch has one row.

    UserError where the processes that there are, or these settings, do not go with it.
    """
    processes = world()[1]
    if text is None and processes > 1:
        how = f"say how they share the work, as with --mesh fsdp={processes}"
        raise UserError(f"there are {processes} processes: {how}")
    place = f"--mesh {text}"
    try:
        mesh = Mesh.parse(text or "")
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error
    if mesh.world != processes:
        raise UserError(
            f"{place} is of {mesh.world} processes, and there {'is' if processes == 1 else 'are'} {processes}: start "
            f"them with torchrun --nproc-per-node {mesh.world} -m train -- and the flags"
        )
    if settings.batch_rows % mesh.rows:
        raise UserError(f"{place} takes a batch's rows in {mesh.rows} parts, and --batch-rows is {settings.batch_rows}")
    several = mesh.world > 1
    if several and settings.compile == "whole":
        raise UserError(f"{place}: what gathers layers goes into no graph: take --compile block, or leave it out")
    why = not_compiled(mesh, Strategy(schedule=schedule or "1F1B"))
    if settings.compile == "block" and why is not None:
        raise UserError(f"{place}: {why}: leave --compile block out")
    if several and settings.compile == "block" and settings.remat == "selective":
        raise UserError(
            f"{place}: --remat selective chooses among single operations, which compiled blocks hide: take full"
        )
    if settings.batch_rows // mesh.rows < settings.accumulate:
        left = f"leaves each {settings.batch_rows // mesh.rows} of the {settings.batch_rows} rows of a batch"
        raise UserError(f"{place} {left}, which --accumulate {settings.accumulate} cannot take in so many parts")
    if mesh.pp == 1:
        for name, value in (("--schedule", schedule), ("--microbatches", microbatches)):
            if value is not None:
                raise UserError(
                    f"{name} {value} is for pipelines, and {place} has none: leave it out, or give --mesh pp=2"
                )
        return Sharing(mesh)
    if settings.accumulate > 1:
        raise UserError(f"{place}: the parts of a batch in pipelines are --microbatches: leave --accumulate out")
    if schedule is not None and schedule not in SCHEDULES:
        raise UserError(f"--schedule {schedule} is not one of {', '.join(SCHEDULES)}")
    rows = settings.batch_rows // mesh.rows
    if rows % (microbatches or rows):
        raise UserError(
            f"--microbatches {microbatches} does not divide the {rows} rows that a stage has of a batch (--batch-rows "
            f"{settings.batch_rows}, in {mesh.rows} parts)"
        )
    return Sharing(mesh, schedule or "1F1B", microbatches or rows)


def check_fit(sharing: Sharing, settings: Settings, config: Any) -> None:
    """UserError where the model does not divide so."""
    mesh = sharing.mesh
    length = min(settings.row_length, config.max_position_embeddings)
    if length % mesh.cp:
        raise UserError(f"--mesh {mesh} takes a row's tokens in {mesh.cp} parts, and a row has {length}")
    try:
        plan = P.plan(model.spec_of(config), rules_of(mesh, config), mesh.sizes)
        if not takes_parts(optimizer_for(model.spec_for(config, settings), settings)):
            check_whole(plan)
        if mesh.pp > 1:
            check_microbatches(pipeline(config, mesh.pp, sharing.schedule), sharing.microbatches)
    except ValueError as error:
        raise UserError(f"--mesh {mesh}: {error}") from error
    if mesh.tp > 1 and isinstance(model.spec_for(config, settings).get("lm_head"), P.lora.Lora):
        raise UserError(
            f"--mesh {mesh}: over tp the vocabulary is divided, where lm_head has no adapter: leave it out of the "
            f"targets of --lora {settings.lora}"
        )

"""Who does what of a run by several processes: what `--mesh` says, held against the settings and the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import params as P
from fnmodels.errors import UserError
from fnmodels.inputs.load_balance import head_tail_order
from train.dist.torchrun import world
from train.optim.base import supports_shards
from train.parallel import Mesh, Strategy
from train.parallel.pipeline.gradients import SCHEDULES, check_microbatches
from train.parallel.pipeline.stages import pipeline_of
from train.parallel.placement import rules_of
from train.parallel.step import not_compiled
from train.parallel.update import check_whole

from . import initial_model
from .recipe import optimizer_for
from .settings import Settings, flag


@dataclass(frozen=True)
class Sharing:
    """Who does what. microbatches: in how many of them a pipeline takes the rows that a stage has."""

    mesh: Mesh
    strategy: Strategy = field(default_factory=Strategy)
    microbatches: int = 1

    def __str__(self) -> str:
        return f"--mesh {self.mesh}"


# What is for one dimension of a mesh alone: the flag, the dimension, and what that is for.
_NEEDED = {
    "sequence": ("tp", "tensor parallelism"),
    "context": ("cp", "context parallelism"),
    "order": ("cp", "context parallelism"),
    "schedule": ("pp", "pipelines"),
    "virtual": ("pp", "pipelines"),
    "microbatches": ("pp", "pipelines"),
}


def checked(text: str | None, settings: Settings, *, microbatches: int | None = None, **given: Any) -> Sharing:
    """What `--mesh` says, and the flags beside it; without `microbatches` each of them has one row.

    given: of `Strategy`: sequence, context, order, schedule, virtual; None and False are as if they were not there.

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
    given = {name: value for name, value in given.items() if value not in (None, False)}
    if given.get("context") == "ulysses":
        given = {"order": None} | given  # all have all columns then, and some kernels want documents in order
    strategy = Strategy(**given)
    why = not_compiled(mesh, strategy)
    if settings.compile == "block" and why is not None:
        raise UserError(f"{place}: {why}: leave --compile block out")
    if several and settings.compile == "block" and settings.remat == "selective":
        raise UserError(
            f"{place}: --remat selective chooses among single operations, which compiled blocks hide: take full"
        )
    if settings.batch_rows // mesh.rows < settings.accumulate:
        left = f"leaves each {settings.batch_rows // mesh.rows} of the {settings.batch_rows} rows of a batch"
        raise UserError(f"{place} {left}, which --accumulate {settings.accumulate} cannot take in so many parts")
    for name, value in (given | {"microbatches": microbatches}).items():
        dim, what = _NEEDED[name]
        if value is not None and mesh.sizes[dim] == 1:
            said = flag(name) if value is True else f"{flag(name)} {value}"
            raise UserError(f"{said} is for {what}, and {place} has none: leave it out, or give --mesh {dim}=2")
    if mesh.pp == 1:
        return Sharing(mesh, strategy)
    if settings.accumulate > 1:
        raise UserError(f"{place}: the parts of a batch in pipelines are --microbatches: leave --accumulate out")
    if strategy.schedule not in SCHEDULES:
        raise UserError(f"--schedule {strategy.schedule} is not one of {', '.join(SCHEDULES)}")
    rows = settings.batch_rows // mesh.rows
    if rows % (microbatches or rows):
        raise UserError(
            f"--microbatches {microbatches} does not divide the {rows} rows that a stage has of a batch (--batch-rows "
            f"{settings.batch_rows}, in {mesh.rows} parts)"
        )
    return Sharing(mesh, strategy, microbatches or rows)


def check_fit(sharing: Sharing, settings: Settings, config: Any) -> None:
    """UserError where the model does not divide so."""
    mesh, how = sharing.mesh, sharing.strategy
    length = min(settings.row_length, config.max_position_embeddings)
    if length % mesh.cp:
        raise UserError(f"--mesh {mesh} takes a row's tokens in {mesh.cp} parts, and a row has {length}")
    try:
        plan = P.plan(initial_model.family_spec(config), rules_of(mesh, config), mesh.sizes)
        if not supports_shards(optimizer_for(initial_model.run_spec(config, settings), settings)):
            check_whole(plan)
        if mesh.pp > 1:
            check_microbatches(pipeline_of(config, mesh, how), sharing.microbatches)
        if mesh.cp > 1 and how.order == "head_tail":
            head_tail_order(length + -length % (mesh.cp * mesh.tp if how.sequence else 1), mesh.cp)  # padded for tp
    except ValueError as error:
        raise UserError(f"--mesh {mesh}: {error}") from error
    heads = [config.num_attention_heads]
    heads.append(getattr(config, "num_key_value_heads", heads[0]))
    if how.context == "ulysses" and any(max(1, number // mesh.tp) % mesh.cp for number in heads):
        raise UserError(
            f"--context ulysses deals out heads, and --mesh {mesh} does not divide the model's so: take gather or ring"
        )
    if mesh.tp > 1 and isinstance(initial_model.run_spec(config, settings).get("lm_head"), P.lora.Lora):
        raise UserError(
            f"--mesh {mesh}: over tp the vocabulary is divided, where lm_head has no adapter: leave it out of the "
            f"targets of --lora {settings.lora}"
        )

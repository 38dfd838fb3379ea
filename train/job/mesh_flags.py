"""Mesh and parallelism strategy of a run, from --mesh and related flags, checked against settings and model."""

from dataclasses import dataclass, field
from typing import Any

import params as P
from fnmodels.errors import UserError
from fnmodels.tree import Tree
from train.comm.torchrun import rank_and_world_size
from train.optim.base import supports_shards
from train.parallel import Mesh, Strategy
from train.parallel.compose import check_family
from train.parallel.mesh import Parallelism
from train.parallel.pipeline.schedule import SCHEDULES, check_microbatches
from train.parallel.pipeline.stages import pipeline_of
from train.parallel.placement import rules_of
from train.parallel.step import not_compiled
from train.parallel.update import check_whole
from train.remat_budget import budget_of

from . import run_folder
from .chosen_settings import Options, choose_settings, overrides_of
from .recipe import optimizer_for
from .settings import MESH_FLAGS, RunSettings, flag


@dataclass(frozen=True)
class MeshSetup:
    """The division of a run's work among its processes. microbatches: those of a pipeline stage's rows per step."""

    mesh: Mesh
    strategy: Strategy = field(default_factory=Strategy)
    microbatches: int = 1


_PURPOSES = {"tp": "tensor parallelism", "cp": "context parallelism", "pp": "pipelines"}


def parse_mesh(text: str | None) -> Mesh:
    """The mesh of --mesh, of one process if there is none. UserError."""
    try:
        return Mesh.parse(text or "")
    except ValueError as error:
        raise UserError(f"--mesh {text}: {error}") from error


def process_count(text: str | None, nproc: int | None) -> int:
    """The number of processes of --mesh. UserError where --nproc contradicts it."""
    if nproc is not None and text is None and nproc > 1:
        raise UserError(f"--nproc {nproc}: {_how_to_share(nproc)}")
    world = parse_mesh(text).world
    if nproc not in (None, world):
        raise UserError(f"--nproc {nproc}: --mesh {text} is of {world} processes: leave --nproc out, or give {world}")
    return world


def _how_to_share(processes: int) -> str:
    return f"say how they share the work, as with --mesh fsdp={processes}"


def resolve_mesh(
    text: str | None,
    settings: RunSettings,
    *,
    processes: int | None = None,
    microbatches: int | None = None,
    **strategy_flags: Any,
) -> MeshSetup:
    """The mesh of --mesh (`text`) and the strategy of the flags beside it. microbatches None: one row in each.

    processes: how many there will be; None: those that there are.
    strategy_flags: fields of `Strategy` (sequence, context, order, schedule, virtual); None, False: not given.
    UserError where the number of processes or other settings do not fit.
    """
    mesh_flag, mesh = f"--mesh {text}", parse_mesh(text)
    _check_processes(text, mesh, settings, processes or rank_and_world_size()[1])
    strategy_flags = {name: value for name, value in strategy_flags.items() if value not in (None, False)}
    if strategy_flags.get("context") == "ulysses":
        # Every rank then has all positions, and some kernels need documents in order.
        strategy_flags = {"order": None} | strategy_flags
    strategy = Strategy(**strategy_flags)
    _check_settings(mesh_flag, Parallelism(mesh, strategy), settings)
    for name, value in (strategy_flags | {"microbatches": microbatches}).items():
        dim = MESH_FLAGS[name][0]
        if value is not None and mesh.sizes[dim] == 1:
            written = flag(name) if value is True else f"{flag(name)} {value}"
            raise UserError(
                f"{written} is for {_PURPOSES[dim]}, and {mesh_flag} has none: leave it out, or give --mesh {dim}=2"
            )
    if mesh.pp == 1:
        return MeshSetup(mesh, strategy)
    if settings.accumulate > 1:
        raise UserError(f"{mesh_flag}: a pipeline accumulates over --microbatches: leave --accumulate out")
    if strategy.schedule not in SCHEDULES:
        raise UserError(f"--schedule {strategy.schedule} is not one of {', '.join(SCHEDULES)}")
    name, batch_rows = settings.rows
    rows = batch_rows // mesh.rows
    if rows % (microbatches or rows):
        raise UserError(
            f"--microbatches {microbatches} does not divide the {rows} rows of a batch that a stage has ({flag(name)} "
            f"{batch_rows} over {mesh.rows} ranks)"
        )
    return MeshSetup(mesh, strategy, microbatches or rows)


def check_before_start(options: Options, defaults: RunSettings, processes: int) -> None:
    """UserError for settings that the mesh cannot share, before its processes are started.

    Only a resumed run without run.json is not looked at: what is wrong with it is for the first process to say.
    """
    recorded = run_folder.read_json(options.run / run_folder.RUN) if options.resume else None
    if options.resume and recorded is None:
        return
    settings = choose_settings(options.run, overrides_of(options, type(defaults)), recorded, defaults, step=None)
    resolve_mesh(options.mesh, settings, processes=processes, **options.mesh_flags)


def _check_processes(text: str | None, mesh: Mesh, settings: RunSettings, processes: int) -> None:
    """UserError unless the mesh is of the processes that run, and its ranks share the rows of a batch evenly."""
    if text is None and processes > 1:
        raise UserError(f"there are {processes} processes: {_how_to_share(processes)}")
    if mesh.world != processes:
        raise UserError(
            f"--mesh {text} is of {mesh.world} processes, and there {'is' if processes == 1 else 'are'} {processes}: "
            f"give torchrun --nproc-per-node {mesh.world}, or leave torchrun out: fnmodels-train starts them itself"
        )
    name, batch_rows = settings.rows
    if batch_rows % mesh.rows:
        raise UserError(
            f"--mesh {text} splits the rows of a batch over {mesh.rows} ranks, and {flag(name)} is {batch_rows}"
        )


def _check_settings(mesh_flag: str, parallelism: Parallelism, settings: RunSettings) -> None:
    """UserError for settings that several processes, or these dimensions of a mesh, do not have."""
    mesh = parallelism.mesh
    several = mesh.world > 1
    if several and settings.compile in ("whole", "step"):
        raise UserError(
            f"{mesh_flag}: gathering of layers cannot be compiled into one graph: take --compile block, or leave it out"
        )
    why = not_compiled(parallelism)
    if settings.compile == "block" and why is not None:
        raise UserError(f"{mesh_flag}: {why}: leave --compile block out")
    if several and settings.one_process is not None:
        raise UserError(f"{mesh_flag}: {settings.one_process}")
    if several and budget_of(settings.remat) is not None:
        raise UserError(
            f"{mesh_flag}: --remat {settings.remat} plans from times measured in one process: take full or every:N"
        )
    if several and settings.compile == "block" and settings.remat == "selective":
        raise UserError(
            f"{mesh_flag}: --remat selective selects single operations, which compiled blocks hide: take full"
        )
    batch_rows = settings.rows[1]
    if batch_rows // mesh.rows < settings.accumulate:
        local = f"leaves each rank {batch_rows // mesh.rows} of the {batch_rows} rows of a batch"
        raise UserError(f"{mesh_flag} {local}: too few for --accumulate {settings.accumulate}")


def check_shards(mesh_setup: MeshSetup, settings: RunSettings, config: Any, weights: Tree, spec: Tree) -> None:
    """UserError where the mesh cannot shard the model. weights: the spec of what is sharded; spec: of all leaves."""
    mesh, strategy = mesh_setup.mesh, mesh_setup.strategy
    try:
        plan = P.plan(weights, rules_of(mesh, config), mesh.sizes)
        if not supports_shards(optimizer_for(spec, settings)):
            check_whole(plan)
        if mesh.pp > 1:
            check_microbatches(pipeline_of(config, mesh, strategy), mesh_setup.microbatches)
        check_family(config, mesh, sequence=strategy.sequence)
    except ValueError as error:
        raise UserError(f"--mesh {mesh}: {error}") from error

"""The command `python -m train.simulate`: flags and output."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import fnmodels
import params as P
from fnmodels.errors import UserError
from train.command_line import Parser, program_name, run_command
from train.job.settings.types import POSITIVE, integer
from train.parallel.mesh import Mesh
from train.parallel.pipeline.schedule import SCHEDULES, pipeline

from .facts import Work
from .machine import MACHINES, Machine, measured
from .report import picture, plans, seconds, shown, table, traffic
from .search import search
from .simulation import simulate
from .step_time import step_time

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _name() -> str:
    return program_name("fnmodels-simulate", "train.simulate")


def parser() -> Parser:
    made = Parser(
        prog=_name(),
        description="What each rank of a mesh holds, sends and waits for.",
    )
    made.add_argument("--preset", required=True, metavar="NAME", help="a model of fnmodels.presets()")
    made.add_argument("--mesh", default="", metavar="AXES", help="pp=8,fsdp=4,ep=16 and so on")
    made.add_argument(
        "--rows", type=integer(1).parse, metavar="N", help="of the global batch; default: one per microbatch"
    )
    made.add_argument(
        "--length", type=integer(1).parse, default=4096, metavar="N", help="tokens of a row (default 4096)"
    )
    made.add_argument(
        "--microbatches", type=integer(1).parse, metavar="N", help="per rank; default: twice the stages, or 1"
    )
    made.add_argument("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)}; default 1F1B")
    made.add_argument("--virtual", type=integer(1).parse, metavar="N", help="stages per rank of a looped schedule")
    made.add_argument("--remat", default="none", metavar="HOW", help="none, full or every:N layers (default none)")
    made.add_argument("--dtype", default="bf16", choices=tuple(DTYPES), help="of activations and of weights in use")
    made.add_argument("--memory", type=POSITIVE.parse, default=80.0, metavar="GIB", help="of a device (default 80)")
    made.add_argument("--sync", default="microbatch", choices=("microbatch", "step"), help="of weights and gradients")
    made.add_argument(
        "--machine", choices=(*MACHINES, "here"), help="the time of a step there; here: on this CPU, measured"
    )
    made.add_argument(
        "--search", type=integer(1).parse, metavar="N", help="the fastest meshes of N devices, instead of --mesh"
    )
    made.add_argument("--picture", type=Path, metavar="PNG", help="draw the memory of the ranks there")
    return made


def run(arguments: argparse.Namespace) -> int:
    if arguments.picture:
        from train.job.pictures import check_suffix  # imports matplotlib

        check_suffix(arguments.picture, "--picture")
    try:
        return _search(arguments) if arguments.search else _one_mesh(arguments)
    except ValueError as error:
        raise UserError(str(error)) from error


def _machine(name: str) -> Machine:
    return measured() if name == "here" else MACHINES[name]


def _search(arguments: argparse.Namespace) -> int:
    """Prints the fastest meshes."""
    wrong = [name for name in ("mesh", "microbatches", "virtual", "picture") if getattr(arguments, name)]
    if wrong or arguments.machine is None or arguments.rows is None:
        raise ValueError(
            "--search chooses mesh and microbatches, for --machine and --rows"
            + (f": leave out --{wrong[0]}." if wrong else ", which must be given.")
        )
    config, memory = fnmodels.preset(arguments.preset), arguments.memory * 2**30
    work = Work(arguments.rows, arguments.length, dtype=DTYPES[arguments.dtype], sync=arguments.sync)
    chosen = {"schedules": (arguments.schedule,)} if arguments.schedule else {}
    found = search(config, arguments.search, work, _machine(arguments.machine), memory, **chosen)
    print(
        f"{arguments.preset} on {arguments.search:,} x {arguments.machine}, a step of {work.rows:,} rows of "
        f"{work.length:,} tokens; {len(found)} plans fit into {shown(memory)}\n\n{plans(found[:10])}"
    )
    return 0


def _one_mesh(arguments: argparse.Namespace) -> int:
    """Prints memory, messages and time of one mesh."""
    config, mesh, schedule = fnmodels.preset(arguments.preset), Mesh.parse(arguments.mesh), arguments.schedule
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}.")
    if mesh.pp == 1 and (schedule or arguments.virtual):
        raise ValueError(f"--schedule and --virtual are for a pipeline, and the mesh {mesh} has none: add a pp.")
    schedule = schedule or "1F1B"
    pipe = pipeline(config, mesh.pp, schedule, virtual=arguments.virtual)
    microbatches = arguments.microbatches or (2 * len(pipe.layers) if mesh.pp > 1 else 1)
    work = Work(
        arguments.rows or mesh.rows * microbatches,
        arguments.length,
        microbatches,
        schedule,
        arguments.virtual,
        remat=arguments.remat,
        dtype=DTYPES[arguments.dtype],
        sync=arguments.sync,
    )
    found = simulate(config, mesh, work)
    title = f"{arguments.preset} on " + (f"{mesh}, {mesh.world:,} ranks" if mesh.world > 1 else "one rank")
    tokens, several = work.rows * work.length, "es" if microbatches > 1 else ""
    print(
        f"{title}\n{P.count(config):,} parameters; a step is {work.rows:,} rows of {work.length:,}, {tokens:,} tokens, "
        f"in {microbatches} microbatch{several} on each rank; {schedule if mesh.pp > 1 else 'no pipeline'}, "
        f"remat {work.remat}, {arguments.dtype}\n"
    )
    memory = arguments.memory * 2**30
    each = " of each position in the pipeline" if mesh.pp > 1 else ""
    print(f"bytes held by one rank{each}\n{table(found, memory)}\n")
    print(f"messages of a step, of the rank with the most; bytes are of full tensors\n{traffic(found)}")
    if arguments.machine:
        print(f"\n{seconds(step_time(config, mesh, work, _machine(arguments.machine)))}")
    if arguments.picture:
        from train.job.pictures import plain_style  # imports matplotlib

        with plain_style():
            picture(arguments.picture, found, memory, title)
        print(f"\npicture: {arguments.picture}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, run, argv, needs=("matplotlib",))

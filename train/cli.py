"""Command line of the programs that train: flags derived from their settings, and the mesh's own.

`main` is that of the main job, `python -m train`.
"""

import argparse
import datetime
import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from params.imported import imported_family
from train.comm.torchrun import is_started, rank_and_world_size
from train.job.cpu_memory import bound_product_caches, keep_freed_memory
from train.job.settings import DEFAULT, GROUPS, MESH_FLAGS, RunSettings, Settings, as_flag, flag
from train.job.settings.types import SettingType, integer

from .command_line import NEEDS, RUNS, Parser, program_name, run_command

MINUTES = SettingType(
    "a number of minutes above 0, a day's 1440 at most", "MINUTES", float, lambda value: 0 < value <= 1440
)

DESCRIPTION = """\
Train a small Llama from scratch, by default on the source files of the Python standard library.
The run folder becomes a Hugging Face checkpoint with metrics, loss curves and everything needed to resume.
"""
EXAMPLES = """\
examples:
  fnmodels-train --run runs/first                    the default model and text: a few minutes on two CPU cores
  fnmodels-train --run runs/first --resume           resume after Ctrl-C or a crash
  fnmodels-train --run runs/own --data ~/notes       train on the text files of a folder
  fnmodels-train --run runs/more --init runs/first --data ~/notes --steps 200
  fnmodels-train --run runs/again --config runs/more/settings.toml --seed 1
  fnmodels-train --run runs/four --mesh pp=2,fsdp=2  with four processes on this machine
  fnmodels-sample runs/first --prompt "def "   sample from it
"""


@dataclass(frozen=True)
class Program:
    """A program that trains. script: its console script; task: a module of `train.job.tasks`; needs: packages."""

    script: str
    description: str
    task: str
    needs: tuple[str, ...]
    examples: str | None = None

    @property
    def name(self) -> str:
        """The program, as it was called."""
        return program_name(self.script, RUNS[self.script])


MAIN = Program("fnmodels-train", DESCRIPTION, "train.job.tasks.language_model", NEEDS, EXAMPLES)


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        if "--run" in message and "TORCHELASTIC_RUN_ID" in os.environ:
            message += "; torchrun takes --run for its own, unless the flags stand behind --: "
            message += "torchrun ... -m train -- --run DIR"
        super().error(message)


def parser(program: Program = MAIN, kind: type[RunSettings] = Settings) -> Parser:
    command = _Parser(
        prog=program.name,
        description=program.description,
        epilog=program.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--run",
        type=Path,
        required=True,
        metavar="DIR",
        help="the run folder: new or empty, or with --resume an existing run",
    )
    command.add_argument(
        "--config",
        type=Path,
        metavar="TOML",
        help="a TOML file of settings, named as the flags below with _ for -; flags override it; each run writes one",
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last saved step of the run in DIR; its settings are the defaults, and flags must agree",
    )
    command.add_argument(
        "--mesh",
        metavar="AXES",
        help="how processes share the work, as fsdp=2,tp=2 of pp, dp, fsdp, ep, cp, tp; they are started here, or by "
        "torchrun --nproc-per-node 4 -m train -- and the flags",
    )
    command.add_argument(
        "--nproc",
        type=integer(1).parse,
        metavar="NUMBER",
        help="the number of processes; by default that of the mesh, which it must equal",
    )
    command.add_argument(
        "--threads",
        type=integer(1).parse,
        metavar="NUMBER",
        help="threads that compute in each process; by default those that it may use, by affinity and control groups",
    )
    for name, (dim, setting_type, text) in MESH_FLAGS.items():
        how = (
            {"type": setting_type.parse, "metavar": setting_type.metavar} if setting_type else {"action": "store_true"}
        )
        command.add_argument(flag(name), help=f"{dim}: {text}", **how)
    command.add_argument(
        "--timeout",
        type=MINUTES.parse,
        default=30.0,
        metavar="MINUTES",
        help="several processes: how long they wait for one that hangs (default 30)",
    )
    groups, defaults = {name: command.add_argument_group(name) for name in GROUPS}, kind()
    for entry in fields(kind):
        setting_type, default = entry.metadata["type"], getattr(defaults, entry.name)
        shown = "" if default is None else f" (default {as_flag(default)})"
        groups[entry.metadata["group"]].add_argument(
            flag(entry.name),
            type=setting_type.parse,
            default=argparse.SUPPRESS,
            metavar=setting_type.metavar,
            help=entry.metadata["help"] + shown,
        )
    return command


def job_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `train.job.chosen_settings.Options`; --nproc, --threads and --timeout are of the processes."""
    flags = {name: value for name, value in vars(arguments).items() if name not in ("nproc", "threads", "timeout")}
    options = {name: flags.pop(name) for name in ("run", "config", "resume", "mesh")}
    return options | {"mesh_flags": {name: flags.pop(name) for name in MESH_FLAGS}, "flags": flags}


def run(arguments: argparse.Namespace, program: Program, defaults: RunSettings, argv: Sequence[str]) -> int:
    nproc, limit = arguments.nproc, datetime.timedelta(minutes=arguments.timeout)
    from train.job.chosen_settings import Options
    from train.job.mesh_flags import check_before_start, process_count
    from train.job.processes import controller, launch
    from train.job.processes.threads import set_threads

    set_threads(arguments.threads)
    options = Options(program.script, **job_options(arguments))
    needed = 1 if nproc is None and is_started() else process_count(options.mesh, nproc)
    if needed > 1 and not is_started():
        from train.job.processes import spawn

        check_before_start(options, defaults, needed)
        return spawn.start(partial(train, program, defaults), argv, needed)
    rank, processes = rank_and_world_size()
    if rank and "family" in options.flags:  # what the first process sends names its classes
        imported_family(options.flags["family"])
    if rank:  # without imports for what rank 0 alone does, such as pictures
        with launch.process_group(limit) as timeout:
            return controller.follow(timeout)
    from train.job.run import train_run

    task = import_module(program.task)
    if processes == 1:
        return train_run(options, task, defaults)
    with launch.process_group(limit) as timeout:
        return controller.lead(partial(train_run, replace(options, limit=timeout), task, defaults))


def train(program: Program, defaults: RunSettings, argv: Sequence[str] | None = None) -> int:
    """Runs a program. Returns the exit code: 0, 2 for a user error, 4 for a diverged run, 5 after --stop-after-bad,
    130 when stopped."""
    bound_product_caches()
    keep_freed_memory()
    argv = sys.argv[1:] if argv is None else argv
    first = int(os.environ.get("RANK", 0)) == 0
    flags = partial(parser, program, type(defaults))
    with nullcontext() if first else redirect_stderr(io.StringIO()):  # only rank 0 reports errors
        command = partial(run, program=program, defaults=defaults, argv=argv)
        return run_command(program.name, flags, command, argv, program.needs)


def main(argv: Sequence[str] | None = None, *, defaults: Settings = DEFAULT) -> int:
    """Runs the main job; see `train` for its exit code."""
    return train(MAIN, defaults, argv)

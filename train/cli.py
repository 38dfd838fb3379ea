"""The command line of the main job."""

import argparse
import datetime
import io
import os
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from train.dist.torchrun import world
from train.job.flags import as_flag, value_of
from train.job.setting_types import STRING, SettingType, choice, integer
from train.job.settings import DEFAULT, GROUPS, Settings, flag

from .command_line import NEEDS, Parser, main_job, run_command

MINUTES = SettingType(
    "a number of minutes above 0, a day's 1440 at most", "MINUTES", float, lambda value: 0 < value <= 1440
)

# How the processes of a mesh share the work; like the mesh, it decides no number of the run.
SHARING = {
    "context": (
        choice("gather", "ulysses", "ring"),
        "over cp: how attention fetches the keys of other columns (default gather)",
    ),
    "order": (
        choice("mask", "head_tail"),
        "over cp: which columns a process has (default mask, by what masks let them see; with ulysses, as they are)",
    ),
    "schedule": (
        SettingType("a name", "NAME", str, STRING.accepts),
        "of a pipeline (pp): 1F1B, GPipe, ... (default 1F1B)",
    ),
    "virtual": (integer(1), "of a pipeline whose schedule is looped: how many stages each process has (default 2)"),
    "microbatches": (
        integer(1),
        "of a pipeline: in how many of them a stage takes its rows of a batch (default: one row each)",
    ),
}

DESCRIPTION = """\
Train a small Llama from scratch, on the Python standard library's own source files where no text is given.
The run folder becomes a Hugging Face checkpoint with its metrics, curves and everything needed to resume.
"""
EXAMPLES = """\
examples:
  python -m train --run runs/first                    the default model and text: some minutes on two CPU cores
  python -m train --run runs/first --resume           go on where it was stopped, by Ctrl-C or otherwise
  python -m train --run runs/own --data ~/notes       learn from the text files of a folder
  python -m train --run runs/more --init runs/first --data ~/notes --steps 200
  python -m train --run runs/again --config runs/more/settings.toml --seed 1
  torchrun --nproc-per-node 4 -m train -- --run runs/four --mesh pp=2,fsdp=2
  python -m train.sample runs/first --prompt "def "   let it speak
"""


def parser() -> Parser:
    made = Parser(
        prog=main_job(),
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="the run folder: new, empty, or with --resume"
    )
    made.add_argument(
        "--config",
        type=Path,
        metavar="TOML",
        help="a file of settings, named as the flags below with _ for -; flags win over it; each run writes one",
    )
    made.add_argument(
        "--resume",
        action="store_true",
        help="go on at the last saved step of the run in DIR; flags left out are the run's, others must agree with it",
    )
    made.add_argument(
        "--mesh",
        metavar="AXES",
        help="how processes share the work, as fsdp=2,tp=2 of pp, dp, fsdp, ep, cp, tp; under torchrun, which starts "
        "them",
    )
    for name, (kind, words) in SHARING.items():
        made.add_argument(flag(name), type=value_of(kind), metavar=kind.metavar, help=words)
    made.add_argument("--sequence", action="store_true", help="over tp divide columns too, between its sublayers")
    made.add_argument(
        "--timeout",
        type=value_of(MINUTES),
        default=30.0,
        metavar="MINUTES",
        help="of several processes: how long they wait for one that hangs (default 30)",
    )
    groups = {name: made.add_argument_group(name) for name in GROUPS}
    for entry in fields(Settings):
        kind, default = entry.metadata["type"], getattr(DEFAULT, entry.name)
        shown = "" if default is None else f" (default {as_flag(default)})"
        groups[entry.metadata["group"]].add_argument(
            flag(entry.name),
            type=value_of(kind),
            default=argparse.SUPPRESS,
            metavar=kind.metavar,
            help=entry.metadata["help"] + shown,
        )
    return made


def run(arguments: argparse.Namespace, defaults: Settings) -> int:
    flags = vars(arguments)
    given = {name: flags.pop(name) for name in ("run", "config", "resume", "mesh")}
    sharing = {name: flags.pop(name) for name in ("sequence", *SHARING)}
    limit = datetime.timedelta(minutes=flags.pop("timeout"))
    from train.job.processes import controller, launch
    from train.job.run import Options, train_run

    options = Options(flags=flags, sharing=sharing, **given)
    rank, processes = world()
    if processes == 1:
        return train_run(options, defaults)
    with launch.joined(limit) as held:
        if rank:
            return controller.follow(held)
        return controller.lead(partial(train_run, replace(options, limit=held), defaults))


def main(argv: Sequence[str] | None = None, *, defaults: Settings = DEFAULT) -> int:
    """The main job. Returns the exit code: 0, 2 for a mistake that the user can put right, 130 when stopped."""
    first = int(os.environ.get("RANK", 0)) == 0
    with nullcontext() if first else redirect_stderr(io.StringIO()):  # the first process alone speaks
        return run_command(main_job(), parser, partial(run, defaults=defaults), argv, NEEDS)

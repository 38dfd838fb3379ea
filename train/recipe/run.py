"""python -m train.recipe RECIPE.toml: runs the stages of a recipe that are not done yet, and writes their report.

A killed recipe continues where it was: finished stages are skipped, and the stage in progress is resumed.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import write_text
from train.command_line import NEEDS, Parser, program_name, run_command
from train.job import run_folder
from train.job.processes.signals import handled

from .report import write_report
from .stages import RUNS, Recipe, Stage, read_recipe

STATE = "recipe.json"  # {stage: {"flags": [...], "seconds": N, "done": bool}}
REPORT = "report.html"


def _name() -> str:
    return program_name("fnmodels-recipe", "train.recipe")


def parser() -> Parser:
    flags = Parser(prog=_name(), description="Run the stages of a recipe in turn: from text to a chat and its report.")
    flags.add_argument("recipe", type=Path, metavar="RECIPE", help="a TOML file of stages")
    flags.add_argument("--folder", type=Path, metavar="DIR", help="in place of the folder that the recipe names")
    flags.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="STAGE.KEY=VALUE",
        help="in place of what the recipe has, as pretraining.steps=20; your own code too, as reward.checker=mine.py:f",
    )
    flags.add_argument("--report", action="store_true", help="only write the report of what is there")
    return flags


def cook(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 0, or the exit code of the stage that failed."""
    from .checks import check_stages  # here, as it imports torch, and --help need not

    recipe = read_recipe(arguments.recipe, arguments.folder, arguments.set)
    with run_folder.locked(recipe.folder):
        state: dict[str, Any] = run_folder.read_json(recipe.folder / STATE) or {}
        if not arguments.report:
            check_stages(recipe, [name for name, entry in state.items() if entry["done"]])
        for number, stage in enumerate([] if arguments.report else recipe.stages, 1):
            entry = state.setdefault(stage.name, {"flags": list(stage.flags), "seconds": 0.0, "done": False})
            check_same(recipe, stage, entry)
            if entry["done"]:
                continue
            print(f"== {number}/{len(recipe.stages)} {stage.name}: {shlex.join(stage.shown)}", flush=True)
            began = time.monotonic()
            code = run_stage(recipe, stage)
            entry["seconds"] = round(entry["seconds"] + time.monotonic() - began, 1)
            entry["done"] = code == 0
            run_folder.write_json(recipe.folder / STATE, state)
            if code:
                print(f"{stage.name} ended with exit code {code}; continue with: {again(arguments)}")
                return code
        write_text(recipe.folder / REPORT, write_report(recipe, state))
        print(f"report: {recipe.folder / REPORT}")
    return 0


def again(arguments: argparse.Namespace) -> str:
    """The command line of the same recipe."""
    folder = [] if arguments.folder is None else ["--folder", str(arguments.folder)]
    changes = [word for change in arguments.set for word in ("--set", change)]
    return shlex.join([*_name().split(), str(arguments.recipe), *folder, *changes])


def check_same(recipe: Recipe, stage: Stage, entry: dict[str, Any]) -> None:
    """UserError where a stage that has begun had other flags."""
    if entry["flags"] == list(stage.flags):
        return
    if not entry["done"] and not (recipe.folder / stage.name).exists():
        entry["flags"] = list(stage.flags)
        return
    raise UserError(
        f"{recipe.path}: [{stage.name}] differs from what was run in {recipe.folder}: take another --folder, or remove "
        f"{recipe.folder / stage.name} and its entry in {recipe.folder / STATE}, and those of the stages behind it"
    )


def run_stage(recipe: Recipe, stage: Stage) -> int:
    """Runs a stage; returns its exit code. What a reader prints is kept as NAME.txt."""
    if stage.command in RUNS:
        place = recipe.folder / stage.name
        resume = ["--resume"] if (place / run_folder.RUN).exists() else []
        command = [sys.executable, "-P", "-m", stage.module, "--run", str(place), *resume, *stage.flags]
        return run_process(command, None)[0]
    code, printed = run_process([sys.executable, "-P", *stage.shown[1:]], subprocess.PIPE)
    print(printed, end="")
    if code == 0:
        write_text(recipe.folder / f"{stage.name}.txt", printed)
    return code


def run_process(command: Sequence[str], stdout: int | None) -> tuple[int, str]:
    """(exit code, what it printed into `stdout`) of a command, to which requests to stop are passed on.

    It is a process group of its own: a terminal would send Ctrl-C to both, and a second one stops it at once.
    """
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "text": True, "process_group": 0}
    with (
        subprocess.Popen(command, env=environment(), **options) as process,
        handled(lambda number, _: process.send_signal(number)),
    ):
        printed = process.communicate()[0]
    code = process.returncode
    return 128 - code if code < 0 else code, printed or ""  # as a shell gives the code of one that a signal ended


def environment() -> dict[str, str]:
    """The environment of a stage, whose output appears line by line."""
    return os.environ | {"PYTHONUNBUFFERED": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, cook, argv, NEEDS)

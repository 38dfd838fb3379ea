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
    flags.add_argument("--report", action="store_true", help="only write the report of what is there")
    return flags


def cook(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 0, or the exit code of the stage that failed."""
    recipe = read_recipe(arguments.recipe, arguments.folder)
    if not arguments.report:
        check_flags(recipe)
    with run_folder.locked(recipe.folder):
        state: dict[str, Any] = run_folder.read_json(recipe.folder / STATE) or {}
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
                again = shlex.join(["python", "-m", "train.recipe", str(arguments.recipe)])
                print(f"{stage.name} ended with exit code {code}; continue with: {again}")
                return code
        write_text(recipe.folder / REPORT, write_report(recipe, state))
        print(f"report: {recipe.folder / REPORT}")
    return 0


def check_flags(recipe: Recipe) -> None:
    """UserError for a flag or value of any stage that its command refuses: said before the first stage runs."""
    from train import cli  # here, as these import torch, and --help need not
    from train.commands import sample
    from train.eval import command as evaluation
    from train.rl import command as rewards

    parsers = {"train": cli.parser, "rl": rewards.parser, "eval": evaluation.parser, "sample": sample.parser}
    for stage in recipe.stages:
        place = ["--run", str(recipe.folder / stage.name)] if stage.command in RUNS else [str(stage.checkpoint)]
        try:
            parsers[stage.command]().parse_args([*place, *stage.flags])
        except UserError as error:
            raise UserError(f"{recipe.path}: [{stage.name}] {error}") from error


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
        return subprocess.run(command, check=False, env=environment()).returncode
    command = [sys.executable, "-P", *stage.shown[1:]]
    done = subprocess.run(command, check=False, env=environment(), stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if done.returncode == 0:
        write_text(recipe.folder / f"{stage.name}.txt", done.stdout)
    return done.returncode


def environment() -> dict[str, str]:
    """That of a stage, whose output appears line by line."""
    return os.environ | {"PYTHONUNBUFFERED": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, cook, argv, NEEDS)

"""python -m train.compare RUN_A RUN_B: whether two runs learnt the same, step by step, and where they part.

With --ref the second run is made here: the settings of RUN_A, trained again by another revision of this repository in a
worktree of its own. So a refactoring shows that it changed nothing, or what it changed.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fnmodels.errors import UserError
from train.command_line import NEEDS, Parser, at_least, check_installed, run_command
from train.job import run_folder
from train.job.flags import as_flag
from train.job.settings import DEFAULT, MODEL_SIZES, flag, from_json

SHOWN = 20  # rows of the table


@dataclass(frozen=True)
class Difference:
    """The losses of one step in both runs; NaN where one was not finite."""

    step: int
    first: float
    second: float

    @property
    def size(self) -> float:
        """Infinite where one run alone has a finite loss; 0 where neither has."""
        lost = math.isnan(self.first), math.isnan(self.second)
        return abs(self.first - self.second) if not any(lost) else 0.0 if all(lost) else math.inf


def differences(first: Path, second: Path) -> list[Difference]:
    """One for each step that both runs made. UserError where there is none."""
    one, two = all_losses(first), all_losses(second)
    both = sorted(one.keys() & two.keys())
    if not both:
        raise UserError(f"the runs {first} and {second} have no step in common")
    return [Difference(step, one[step], two[step]) for step in both]


def made_alone(first: Path, second: Path, *, called: str) -> list[str]:
    """A line for each run that made steps which the other, `called` so, did not."""
    one, two = all_losses(first).keys(), all_losses(second).keys()
    pairs = ((first, sorted(one - two)), (called, sorted(two - one)))
    return [f"{run} alone made {len(steps)} steps, {steps[0]} to {steps[-1]}" for run, steps in pairs if steps]


def all_losses(run: Path) -> dict[int, float]:
    """{step: train loss} of a run folder, a loss that was not finite as NaN. UserError where it has none."""
    from train.job.pictures import read_run

    rows = [row for row in read_run(run).rows if "loss" in row]
    return {row["step"]: math.nan if row["loss"] is None else row["loss"] for row in rows}


def table(found: list[Difference]) -> str:
    """Some steps, evenly spread, the first and last among them; then what there is to know of all."""
    last = len(found) - 1
    picked = sorted({round(i * last / max(SHOWN - 1, 1)) for i in range(SHOWN)}) if last else [0]
    lines = ["   step       first      second  difference"]
    lines += [f"{d.step:>7} {d.first:>11.6f} {d.second:>11.6f}  {d.size:.3e}" for d in (found[i] for i in picked)]
    worst = max(found, key=lambda d: d.size)
    parted = next((d.step for d in found if d.size), None)
    summary = f"the first difference is at step {parted}, the largest {worst.size:.3e} at {worst.step}"
    lines.append(f"{len(found)} steps; {'all losses equal to the last digit' if parted is None else summary}")
    return "\n".join(lines)


def run_at(revision: str, like: Path, into: Path) -> Path:
    """The run `like`, made anew at a revision of the repository in the working folder; returns its folder.

    What is at its default here is left to the default there, so that a setting which the revision does not have is no
    obstacle; `settings_apart` tells where the two took different ones.
    """
    check_installed(NEEDS)
    from train.job.setup import resolved

    settings = replace(DEFAULT, **settings_of(like))
    plain = resolved(replace(DEFAULT, init=settings.init))
    given = {name: value for name, value in asdict(settings).items() if value != getattr(plain, name)}
    flags = [(flag(name), as_flag(value)) for name, value in given.items() if value is not None]
    tree, run = into / "tree", into / "run"
    git("worktree", "add", "--detach", str(tree), revision)
    try:
        command = [sys.executable, "-m", "train", "--run", str(run), *(text for flag in flags for text in flag)]
        paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])  # also where Python is safe
        if subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": paths}).returncode:
            raise UserError(f"the run at {revision} failed; what it said stands above")
    finally:
        git("worktree", "remove", "--force", str(tree))
    return run


def settings_of(run: Path) -> dict[str, Any]:
    """What decided the run's numbers. UserError where it does not say."""
    recorded = (run_folder.read_json(run / run_folder.RUN) or {}).get("settings")
    found = from_json(recorded) if isinstance(recorded, dict) else {}
    if not found:
        raise UserError(f"{run} has no {run_folder.RUN} with its settings")
    return found


def settings_apart(first: Path, second: Path) -> list[str]:
    """A line for each setting, and each field of the models, in which the runs differ, as far as both say."""
    try:
        one, two = used(first), used(second)
    except UserError:
        return []
    shared = sorted(one.keys() & two.keys())
    return [f"{name}: {one[name]} and {two[name]}" for name in shared if one[name] != two[name]]


def used(run: Path) -> dict[str, Any]:
    """What decided the run's numbers, as it came to be: sizes are those of its model, and not what was asked for."""
    settings, model = settings_of(run), (run_folder.read_json(run / run_folder.RUN) or {}).get("config")
    if not isinstance(model, dict):
        return settings
    longest = model.get("max_position_embeddings")
    if "row_length" in settings and isinstance(longest, int):
        settings["row_length"] = min(settings["row_length"], longest)
    kept = {name: value for name, value in settings.items() if name not in MODEL_SIZES}
    return kept | {f"the model's {name}": value for name, value in model.items()}


def git(*arguments: str) -> None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"git {' '.join(arguments)}: {done.stderr.strip()}")


def parser() -> Parser:
    made = Parser(prog="python -m train.compare", description="Per-step differences of the losses of two runs.")
    made.add_argument("first", type=Path, metavar="RUN_A", help="a run folder")
    made.add_argument("second", type=Path, nargs="?", metavar="RUN_B", help="another one")
    made.add_argument("--ref", metavar="GIT_REV", help="in place of RUN_B: make RUN_A again at this revision")
    made.add_argument("--out", type=Path, metavar="PNG", help="draw both curves here")
    made.add_argument(
        "--within",
        type=at_least(0.0),
        metavar="X",
        help="exit with 1 where a difference is larger than this, or one run made other steps than the other",
    )
    return made


def compare(arguments: argparse.Namespace) -> int:
    if (arguments.second is None) == (arguments.ref is None):
        raise UserError("give either a second run or --ref")
    if arguments.out is not None:
        from train.job.pictures import check_suffix

        check_suffix(arguments.out)  # a run that is made anew may take hours
    with TemporaryDirectory() as temporary:
        second = arguments.second or run_at(arguments.ref, arguments.first, Path(temporary))
        name = arguments.ref or str(second)
        found, alone = differences(arguments.first, second), made_alone(arguments.first, second, called=name)
        print(table(found))
        print("".join(f"{line}\n" for line in alone), end="")
        for line in settings_apart(arguments.first, second):
            print(f"the settings differ in {line}")
        if arguments.out is not None:
            from train.job.pictures import draw_losses

            draw_losses(arguments.out, {str(arguments.first): arguments.first, name: second})
            print(f"curves: {arguments.out}")
    return int(arguments.within is not None and (bool(alone) or max(d.size for d in found) > arguments.within))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("python -m train.compare", parser, compare, argv, needs=("matplotlib", "tensorboard"))

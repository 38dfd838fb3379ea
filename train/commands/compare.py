"""python -m train.compare RUN_A RUN_B: compares the losses of two runs step by step, and finds where they diverge.

With --ref the second run is trained here, with the settings of RUN_A, by another revision of this repository in a git
worktree. It shows whether a refactoring changed results.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fnmodels.errors import UserError
from train.command_line import NEEDS, Parser, check_installed, program_name, run_command, terminal_text
from train.job import run_folder
from train.job.settings import (
    DEFAULT,
    MODEL_SIZES,
    SETTING_TYPES,
    absolute_paths,
    as_flag,
    code_in,
    flag,
    from_json,
    may_name_code,
)
from train.job.settings.types import NUMBER

SHOWN = 20  # rows of the table

CODE = [name for name, kind in SETTING_TYPES.items() if may_name_code(kind)]

Losses = dict[int, float]  # by step


@dataclass(frozen=True)
class Difference:
    """The losses of one step in both runs; NaN for a loss that was not finite."""

    step: int
    first: float
    second: float

    @property
    def size(self) -> float:
        """The absolute difference; infinite where only one loss is finite, 0 where neither is."""
        is_nan = math.isnan(self.first), math.isnan(self.second)
        return abs(self.first - self.second) if not any(is_nan) else 0.0 if all(is_nan) else math.inf


def unshared_steps(one: Losses, two: Losses, *names: str) -> list[str]:
    """A line for each run, of these names, with steps that the other did not make."""
    pairs = zip(names, (sorted(one.keys() - two.keys()), sorted(two.keys() - one.keys())), strict=True)
    return [f"{run} alone made {len(steps)} steps, {steps[0]} to {steps[-1]}" for run, steps in pairs if steps]


def all_losses(run: Path) -> Losses:
    """{step: train loss} of a run folder, NaN for a loss that was not finite. UserError where it has no loss."""
    from train.job.pictures import read_run

    rows = [row for row in read_run(run).rows if "loss" in row]
    return {row["step"]: math.nan if row["loss"] is None else row["loss"] for row in rows}


def table(found: list[Difference]) -> str:
    """A table of evenly spaced steps, with the first and the last one, and a summary of all steps."""
    last = len(found) - 1
    picked = sorted({round(i * last / max(SHOWN - 1, 1)) for i in range(SHOWN)}) if last else [0]
    lines = ["   step       first      second  difference"]
    lines += [f"{d.step:>7} {d.first:>11.6f} {d.second:>11.6f}  {d.size:.3e}" for d in (found[i] for i in picked)]
    worst = max(found, key=lambda d: d.size)
    first_difference = next((d.step for d in found if d.size), None)
    summary = f"the first difference is at step {first_difference}, the largest {worst.size:.3e} at {worst.step}"
    lines.append(f"{len(found)} steps; {'all losses equal to the last digit' if first_difference is None else summary}")
    return "\n".join(lines)


def run_at(revision: str, like: Path, into: Path, code: Mapping[str, str | None] | None = None) -> Path:
    """Trains the run `like` again at a revision of the repository in the working folder; returns the new run's folder.

    Settings at their default are not passed, so that the revision need not have them; `setting_differences` reports
    where the defaults differ. code: {setting: the user's own code} of the command line. UserError where git or the run
    fails, or where the run had other code.
    """
    check_installed(NEEDS)
    from train.job.recipe import resolved

    settings = replace(DEFAULT, **settings_of(like))
    defaults = resolved(replace(DEFAULT, init=settings.init))
    changed = {name: value for name, value in asdict(settings).items() if value != getattr(defaults, name)}
    for name, value in changed.items():
        if code_in(SETTING_TYPES[name], value) and _absolute(name, (code or {}).get(name)) != value:
            raise UserError(
                f"{like} was trained with {flag(name)} {value}, code that a folder may not run: give it too"
            )
    flags = [(flag(name), as_flag(value)) for name, value in changed.items() if value is not None]
    tree, run = into / "tree", into / "run"
    git("worktree", "add", "--detach", str(tree), revision)
    try:
        command = [sys.executable, "-m", "train", "--run", str(run), *(text for flag in flags for text in flag)]
        # also with PYTHONSAFEPATH, which leaves out the working folder
        paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        if subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": paths}).returncode:
            raise UserError(f"the run at {revision} failed; see its output above")
    finally:
        git("worktree", "remove", "--force", str(tree))
    return run


def _absolute(name: str, value: str | None) -> str | None:
    return None if value is None else str(absolute_paths(name, value, Path()))


def settings_of(run: Path) -> dict[str, Any]:
    """The recorded settings that affect the run's results. UserError where run.json has none."""
    recorded = (run_folder.read_json(run / run_folder.RUN) or {}).get("settings")
    found = from_json(recorded) if isinstance(recorded, dict) else {}
    if not found:
        raise UserError(f"{run} has no {run_folder.RUN} with its settings")
    return found


def setting_differences(first: Path, second: Path) -> list[str]:
    """A line for each setting and config field in which the runs differ, of those that both recorded."""
    try:
        one, two = effective_settings(first), effective_settings(second)
    except UserError:
        return []
    shared = sorted(one.keys() & two.keys())
    return [f"{name}: {one[name]} and {two[name]}" for name in shared if one[name] != two[name]]


def effective_settings(run: Path) -> dict[str, Any]:
    """The settings in effect: sizes are those of the model's config, rows are limited by its positions."""
    settings, model = settings_of(run), (run_folder.read_json(run / run_folder.RUN) or {}).get("config")
    if not isinstance(model, dict):
        return settings
    longest = model.get("max_position_embeddings")
    if "row_length" in settings and isinstance(longest, int):
        settings["row_length"] = min(settings["row_length"], longest)
    compared = {name: value for name, value in settings.items() if name not in MODEL_SIZES}
    return compared | {f"the model's {name}": value for name, value in model.items()}


def git(*arguments: str) -> None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"git {' '.join(arguments)}: {done.stderr.strip()}")


def _name() -> str:
    return program_name("fnmodels-compare", "train.compare")


def parser() -> Parser:
    flags = Parser(prog=_name(), description="Per-step differences of the losses of two runs.")
    flags.add_argument("first", type=Path, metavar="RUN_A", help="a run folder")
    flags.add_argument("second", type=Path, nargs="?", metavar="RUN_B", help="another run folder")
    flags.add_argument("--ref", metavar="GIT_REV", help="instead of RUN_B: train RUN_A again at this revision")
    flags.add_argument("--out", type=Path, metavar="PNG", help="plot both loss curves to this file")
    flags.add_argument(
        "--within",
        type=NUMBER.parse,
        metavar="X",
        help="exit with 1 where a difference is larger than X, or the runs made different steps",
    )
    for name in CODE:
        kind = SETTING_TYPES[name]
        flags.add_argument(
            flag(name), metavar="CODE", type=kind.parse, help="with --ref: that of RUN_A again, if it is code"
        )
    return flags


def compare(arguments: argparse.Namespace) -> int:
    if (arguments.second is None) == (arguments.ref is None):
        raise UserError("give either a second run or --ref")
    if arguments.out is not None:
        from train.job.pictures import check_suffix

        check_suffix(arguments.out)  # before training again, which may take hours
    with TemporaryDirectory() as temporary:
        second = arguments.second or run_at(
            arguments.ref, arguments.first, Path(temporary), {name: getattr(arguments, name) for name in CODE}
        )
        name = arguments.ref or str(second)
        one, two = all_losses(arguments.first), all_losses(second)
        if not (both := sorted(one.keys() & two.keys())):
            raise UserError(f"the runs {arguments.first} and {second} have no step in common")
        found = [Difference(n, one[n], two[n]) for n in both]
        alone = unshared_steps(one, two, str(arguments.first), name)
        print(table(found))
        print(terminal_text("".join(f"{line}\n" for line in alone)), end="")
        for line in setting_differences(arguments.first, second):
            print(f"the settings differ in {terminal_text(line)}")
        if arguments.out is not None:
            from train.job.pictures import draw_losses

            draw_losses(arguments.out, {str(arguments.first): arguments.first, name: second})
            print(f"curves: {arguments.out}")
    return int(arguments.within is not None and (bool(alone) or max(d.size for d in found) > arguments.within))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, compare, argv, needs=("matplotlib", "tensorboard"))

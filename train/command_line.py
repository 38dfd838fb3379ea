"""Shared by the commands of train, beyond params.command_line: the packages that a command needs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import params.command_line
from fnmodels.errors import UserError
from params.command_line import Parser, program_name, sentence, suggestion, terminal_text

__all__ = [
    "BAD_STEPS",
    "DIVERGED",
    "NEEDS",
    "NEEDS_OF_RUN",
    "RUNS",
    "Parser",
    "check_installed",
    "main_job",
    "program_name",
    "run_command",
    "sentence",
    "suggestion",
    "terminal_text",
]

BAD_STEPS = 5  # exit code of a run that --stop-after-bad ended
DIVERGED = 4  # exit code of a run whose last steps are not finite
# {command that trains: its module}
RUNS = {"fnmodels-train": "train", "fnmodels-documents": "train.commands.documents", "fnmodels-flow": "train.flow"}
NEEDS_OF_RUN = ("rich", "tensorboard", "matplotlib")
NEEDS = ("tokenizers", *NEEDS_OF_RUN)  # by the main job
EXTRA_OF = {
    "tokenizers": "text",
    "jinja2": "text",
    "tensorboard": "log",
    "matplotlib": "log",
    "PIL": "log",
    "rich": "log",
    "pyarrow": "data",
    "fsspec": "data",
    "lm_eval": "eval",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "starlette": "serve",
    "uvicorn": "serve",
}


def main_job() -> str:
    """The name of the command that trains in this process, as it was called."""
    called = Path(sys.argv[0]).stem
    modules = {module.rpartition(".")[2]: module for module in RUNS.values()}
    return called if called in RUNS else f"python -m {modules.get(called, RUNS['fnmodels-train'])}"


def run_command(
    name: str,
    parser: Callable[[], Parser],
    command: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
    needs: tuple[str, ...],
) -> int:
    """params.command_line.run_command, after a check that the packages in `needs` are installed."""

    def checked(arguments: argparse.Namespace) -> int:
        check_installed(needs)
        return command(arguments)

    return params.command_line.run_command(name, parser, checked, argv)


def check_installed(packages: tuple[str, ...]) -> None:
    """UserError that names the missing packages and the extra of fnmodels that installs them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        extras = ",".join(sorted({EXTRA_OF[package] for package in missing}))
        raise UserError(f'{" and ".join(missing)} must be installed for this: pip install "fnmodels[{extras}]"')

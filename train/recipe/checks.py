"""Checks of a recipe before its first stage runs: the errors that its commands would raise at their start.

A checkpoint that an earlier stage makes is not there yet: what depends on its content is left to its stage.
"""

import argparse
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from fnmodels.errors import CheckpointError, UserError
from params.checkpoint.hub import local_folder
from train import cli
from train.command_line import Parser, check_installed
from train.commands import sample
from train.data.chat import read_template
from train.eval import command as evaluation
from train.eval import pretrained
from train.job import run_folder
from train.job.chosen_settings import Options, choose_settings, overrides_of
from train.job.mesh_flags import process_count, resolve_mesh
from train.job.settings import DEFAULT, Settings
from train.job.tasks import language_model
from train.rl import command as rewards

from .stages import RUNS, Recipe, Stage

PARSERS: dict[str, Callable[[], Parser]] = {
    "train": cli.parser,
    "rl": rewards.parser,
    "eval": evaluation.parser,
    "sample": sample.parser,
}
Made = Callable[[object], bool]  # (a checkpoint's path) -> whether an earlier stage makes it


def check_stages(recipe: Recipe, done: Collection[str]) -> None:
    """UserError that names the stage and the flag where a stage's command would refuse a flag, a file or a checkpoint.

    Args:
        recipe: The stages.
        done: The names of those that are done, of which only the flags are parsed.
    """
    folders = set[str]()
    for stage in recipe.stages:
        try:
            _check(recipe, stage, lambda path: os.path.realpath(str(path)) in folders, flags_alone=stage.name in done)
        except (UserError, CheckpointError) as error:
            raise UserError(f"{recipe.path}: [{stage.name}] {error}") from error
        except OSError as error:
            raise UserError(f"{recipe.path}: [{stage.name}] {error.filename}: {error.strerror}") from error
        if stage.command in RUNS:
            folders.add(os.path.realpath(recipe.folder / stage.name))


def _check(recipe: Recipe, stage: Stage, made: Made, *, flags_alone: bool) -> None:
    run = recipe.folder / stage.name
    place = ["--run", str(run)] if stage.command in RUNS else [str(stage.checkpoint)]
    arguments = PARSERS[stage.command]().parse_args([*place, *stage.flags])
    if flags_alone:
        return
    if stage.command in RUNS and run.exists() and not (run / run_folder.RUN).exists():
        run_folder.check_contents(run, resume=False)
    {"train": _train, "rl": _rewards, "eval": _evaluation, "sample": _answers}[stage.command](arguments, made)


def _train(arguments: argparse.Namespace, made: Made) -> None:
    options = Options(cli.MAIN.script, **cli.job_options(arguments))
    processes = process_count(options.mesh, arguments.nproc)
    flags: dict[str, Any] = dict(options.flags)
    later = "init" in flags and made(flags["init"])
    if later:
        flags["init"] = os.path.realpath(flags["init"])  # which the Hub is not asked for
    overrides = overrides_of(replace(options, flags=flags), Settings)
    settings = choose_settings(options.run, overrides, None, DEFAULT, step=None)
    language_model.check_settings(settings)
    mesh_setup = resolve_mesh(options.mesh, settings, processes=processes, **options.mesh_flags)
    language_model.preflight(settings, None if later else mesh_setup, overrides.keys())


def _rewards(arguments: argparse.Namespace, made: Made) -> None:
    check_installed(rewards.NEEDS)
    rewards.checked(arguments)
    _check_checkpoint("--init", arguments.init, made, chat=True)


def _evaluation(arguments: argparse.Namespace, made: Made) -> None:
    evaluation.checked(arguments)
    _check_checkpoint("checkpoint", arguments.checkpoint, made, chat=False)


def _answers(arguments: argparse.Namespace, made: Made) -> None:
    if arguments.chat:
        check_installed(("jinja2",))
    if not sample.checked(arguments):
        raise UserError("a stage has no terminal for a conversation: give prompt or prompts")
    _check_checkpoint("checkpoint", arguments.checkpoint, made, chat=arguments.chat)


def _check_checkpoint(key: str, path: Path, made: Made, *, chat: bool) -> None:
    """UserError where a checkpoint is neither there nor made by an earlier stage, or lacks a chat template."""
    if made(path):
        return
    try:
        folder = local_folder(path)
        pretrained.load_tokenizer(folder)
        if chat:
            read_template(folder)
    except UserError as error:
        raise UserError(f"{key} {error}") from error

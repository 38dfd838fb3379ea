"""Saving of a run: its state as a saved step, then the checkpoints of the same state."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fnmodels.files import check_folder
from fnmodels.tree import Tree
from train.checkpoint import saved_steps
from train.checkpoint.saved_steps import Checkpoint
from train.state import State

from . import model_card, run_folder
from .processes.controller import Controller
from .recipe import evaluated_params
from .task import Json, Task


@dataclass(frozen=True)
class Position:
    """The progress of a run: steps made, target tokens trained on, and the position of streamed data."""

    step: int
    tokens: int
    skipped: int = 0  # batches that were passed over at returns to a save (train.job.rewind)
    rewinds: int = 0  # such returns
    data: Any = None  # of a stream, see `Task.data_position`


def progress_of(task: Task, position: Position) -> Json:
    """The run's progress, as JSON that is saved beside the state."""
    returns = {"skipped": position.skipped, "rewinds": position.rewinds} if position.rewinds else {}
    place = {} if position.data is None else {"data_position": position.data}
    return {"tokens": position.tokens, "run": task.identity} | returns | place


def position_of(saved: Checkpoint | None) -> Position:
    """The position that a saved step records; that of step 0 without a save."""
    if saved is None:
        return Position(step=0, tokens=0)
    numbers = {name: saved.progress.get(name, 0) for name in ("tokens", "skipped", "rewinds")}
    return Position(saved.step, **{name: value if type(value) is int else 0 for name, value in numbers.items()})


def save_state(task: Task, state: State, position: Position) -> None:
    """Saves the step of a run in one process, then writes the checkpoints of the same state."""
    steps = task.path / run_folder.STEPS
    saved_steps.save(steps, position.step, state, progress_of(task, position), keep=task.settings.keep)

    def params(averaged: bool) -> Tree:
        return evaluated_params(state, task.settings) if averaged else state.params

    write_checkpoints(task, params)
    model_card.write(task, position.step, None)


def save_shards(task: Task, controller: Controller, position: Position) -> None:
    """Saves the step of a run over a mesh, then writes the checkpoints of the same state."""
    steps = task.path / run_folder.STEPS
    controller.do("save", steps, position.step, progress_of(task, position), task.settings.keep)
    write_checkpoints(task, partial(controller.do, "gather_checkpoint"))
    model_card.write(task, position.step, None)


def save_now(task: Task, controller: Controller, position: Position) -> None:
    """Saves the run's state, of one process or a mesh."""
    if controller.several:
        save_shards(task, controller, position)
    else:
        save_state(task, task.blueprint.state_to_save(controller.state), position)


def write_checkpoints(task: Task, params: Callable[[bool], Tree]) -> None:
    """Writes the run's model and, with --ema, a complete one of the averaged weights. params: (averaged) -> these."""
    folders = {False: task.model_path}
    if task.settings.ema is not None:
        folders[True] = task.path / run_folder.EMA
    for averaged, folder in folders.items():
        check_folder(folder)
        task.write(folder, params(averaged))

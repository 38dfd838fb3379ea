"""The return of a run in trouble to its last good save, from where it goes on with another data order.

The batches that led into the trouble are passed over, as large runs do by hand (PaLM, arXiv 2204.02311, section 5.1):
step k after the return trains on the batch that step k + `skipped` would have had.
"""

from dataclasses import replace

from train.checkpoint import saved_steps

from . import run_folder
from .processes.controller import Controller
from .saving import Position, position_of
from .task import Task

MOST = 3  # returns of a run: more of them do not help it


def returned(task: Task, controller: Controller, now: Position, bad: int) -> Position | None:
    """Loads the newest save from before the bad steps, and sets later ones aside; None: there is none to return to.

    Args:
        task: The run.
        controller: Of its processes.
        now: Where it stands.
        bad: The number of bad steps, the last ones.

    Returns:
        The position from which the run goes on.
    """
    steps = task.path / run_folder.STEPS
    saved_steps.set_aside(steps, after=now.step - bad)
    saved = None if now.rewinds >= MOST else saved_steps.newest(steps)[0]
    if saved is None:
        return None
    controller.do("load", saved)
    passed = now.step - saved.step
    print(
        f"back to the save of step {saved.step}, from where {passed} batches are passed over "
        f"(return {now.rewinds + 1} of {MOST})",
        flush=True,
    )
    return replace(position_of(saved), skipped=now.skipped + passed, rewinds=now.rewinds + 1)

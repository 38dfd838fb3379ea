"""The user's own function of each step, by `--on-step`."""

from collections.abc import Callable, Sequence
from typing import Any

from train.job.metrics_log import Row
from train.job.settings import RunSettings, imports
from train.state import State

from .failures import naming_code


def callback(settings: RunSettings, rows: Sequence[Row]) -> Callable[[State, Row], str | None]:
    """The function that a run calls after each step, in the first process alone.

    Args:
        settings: Of the run; its `on_step` names the user's function of (state, metrics).
        rows: Of the steps before; a function that has a method `replay` takes them in.

    Returns:
        (state, row of the step) -> why the run ends after it, None: it goes on. The next step overwrites the state.
    """
    found = imports(settings).get("on_step")
    if found is None:
        return lambda state, row: None
    function = found.function
    replay: Any = getattr(function, "replay", None)
    if replay is not None:
        with naming_code(settings):
            replay(rows)

    def called(state: State, row: Row) -> str | None:
        with naming_code(settings, f"at step {row['step']}"):
            result = function(state, dict(row))
        if not result:
            return None
        return result if isinstance(result, str) else f"{found.path} has returned {result!r:.80}"

    return called

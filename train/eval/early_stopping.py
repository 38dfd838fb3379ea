"""Early stopping, as a function for `--on-step`: a run ends where its held-out loss has not fallen for a while.

fnmodels-train ... --on-step train.eval.early_stopping:on_step
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """A function of (state, metrics) that ends a run; its bests are those of one run.

    Attributes:
        patience: The number of evaluations without a new lowest held-out loss after which the run ends.
        least: By how much a loss must be lower to count, in its units.
    """

    patience: int = 3
    least: float = 0.0

    def __post_init__(self) -> None:
        self._best, self._best_step, self._since = float("inf"), 0, 0

    def __call__(self, state: Any, metrics: Mapping[str, Any]) -> str | None:
        """The reason to end the run after this step, or None.

        Args:
            state: The State, which is not read.
            metrics: The step's row of metrics.jsonl; without `heldout_loss` it changes nothing.
        """
        loss = metrics.get("heldout_loss")
        if loss is None:
            return None
        if loss < self._best - self.least:
            self._best, self._best_step, self._since = loss, metrics["step"], 0
            return None
        self._since += 1
        if self._since < self.patience:
            return None
        best = f"{self._best:.4f} at step {self._best_step}"
        return f"the held-out loss has not been below {best} in {self._since} evaluations"

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begins anew, with the rows before the step from which a run is started or resumed."""
        self.__post_init__()
        for row in rows:
            self(None, row)


on_step = EarlyStopping()

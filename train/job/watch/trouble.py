"""Signs of a run in trouble, from the rows of metrics.jsonl: the same rows give the same signs, also after a resume.

The loss of a step is compared with the median of the last good steps and their median absolute deviation. The bound is
far out, since batches differ, and a single step slightly above it is no jump.
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from train.job.metrics_log import Row

WINDOW = 50  # good steps that a loss is compared with
DEVIATIONS = 8.0
FAR = 5.0  # times as far as the bound: one such step is a jump, nearer ones are where two follow each other
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
# (good steps, the least deviation as a fraction of the median): few steps say little about the spread
FLOORS = ((WINDOW, 0.03), (8, 0.1), (1, 0.25))
SMALLEST = 0.01  # nats: a loss near 0 varies by more than a fraction of it
FIRST_LOOK = 128  # steps until the first look at whether the loss decreases, and then at twice as many
NAMES = {
    "skipped_updates": "updates skipped, as their gradients were not finite",
    "loss_jumps": "jumps of the loss",
    "zero_gradients": "series of steps whose gradients were all zero",
    "no_decrease": "looks at the loss that saw no decrease",
    "rewinds": "returns to an earlier save",
}


class Trouble:
    """The signs in the rows so far.

    Attributes:
        bad: The number of bad steps up to the last, without a good one between them: their gradients are not finite
            or all zero, or their loss is above the bound.
        counts: {kind: number} of `NAMES`, but for rewinds.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.bad, self.counts = 0, dict.fromkeys(NAMES.keys() - {"rewinds"}, 0)
        self._good, self._losses, self._reported = deque[float](maxlen=WINDOW), list[float](), False
        for row in rows:
            self.observe(row)

    def observe(self, row: Row) -> list[str]:
        """The sentences about the next row, mostly none."""
        loss, step, said = row["loss"], row["step"], list[str]()
        if row.get("finite") is False or not _is_finite(loss):
            self.bad += 1
            self.counts["skipped_updates"] += 1
            if not self._reported:
                self._reported = True
                said.append(f"step {step}: the loss or its gradients are not finite, so the step changes no weights")
            return said
        self._losses.append(loss)
        excess, is_zero = self._excess(loss), row.get("grad_norm") == 0.0
        if excess > 1 or is_zero:
            self.bad += 1
            if (self.bad >= 2 or excess > FAR) and not self._reported:
                self._reported = True
                self.counts["zero_gradients" if is_zero else "loss_jumps"] += 1
                usual = f"the median of the {len(self._good)} good steps before is {median(self._good):.3f}"
                jump = f"the loss has jumped to {loss:.3f}; {usual}"
                said.append(f"step {step}: {'all gradients are zero, so nothing is learned' if is_zero else jump}")
            if self.bad >= WINDOW:  # it stays there: what comes is compared with this level
                self._good.clear()
        else:
            if self._reported:
                said.append(f"step {step}: a good step, with the loss {loss:.3f}, after {self.bad} bad ones")
            self.bad, self._reported = 0, False
            self._good.append(loss)
        return said + self._look(step)

    def _excess(self, loss: float) -> float:
        """The excess of a finite loss over the median of the good steps before it, in units of the bound's distance."""
        if not self._good:
            return 0.0
        middle = median(self._good)
        floor = next(fraction for least, fraction in FLOORS if len(self._good) >= least)
        spread = MAD_TO_DEVIATION * median(abs(value - middle) for value in self._good)
        return (loss - middle) / (DEVIATIONS * max(spread, floor * abs(middle), SMALLEST))

    def _look(self, step: int) -> list[str]:
        """At steps 128, 256, 512, ...: whether the last quarter of the losses is below the first."""
        if step < FIRST_LOOK or step & (step - 1) or len(self._losses) < 4:
            return []
        quarter = len(self._losses) // 4
        first, last = median(self._losses[:quarter]), median(self._losses[-quarter:])
        if last < first:
            return []
        self.counts["no_decrease"] += 1
        return [f"step {step}: the loss has not decreased: its median is {first:.3f} at first and {last:.3f} now"]


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)

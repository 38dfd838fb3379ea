"""Processes that compute slower than the others, from the times of `train.job.processes.pace`."""

from collections import Counter
from collections.abc import Sequence

EVERY = 50  # steps between two measurements
SLOWER = 1.7  # times as long as the median rank
IN_A_ROW = 3  # measurements until a rank is called slow


class SlowRanks:
    """Compares the measurements of the ranks."""

    def __init__(self) -> None:
        self._slow = Counter[int]()

    def observe(self, step: int, seconds: Sequence[float]) -> list[str]:
        """The sentences about the ranks that were slow `IN_A_ROW` times, or are no longer. seconds: of each rank."""
        usual, said = sorted(seconds)[(len(seconds) - 1) // 2], []
        for rank, own in enumerate(seconds):
            if own <= SLOWER * usual:
                if self._slow.pop(rank, 0) >= IN_A_ROW:
                    said.append(f"step {step}: process {rank} computes as fast as the others again")
                continue
            self._slow[rank] += 1
            if self._slow[rank] == IN_A_ROW:
                said.append(
                    f"step {step}: process {rank} of the run computes {own / usual:.1f} times as long as the others, "
                    "which wait for it in every step"
                )
        return said

"""Steps that wait for processors: their wall time is far above the time that the process computed."""

SECONDS = 20.0  # of steps that are looked at together
LEAST = 0.6  # seconds of processor time per second: a single thread that is not interrupted has 1


class Waiting:
    """Compares the wall time and the processor time of steps; says once that they differ.

    Two threads that share a busy core wait for each other at each operation, so that one is faster.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._wall, self._cpu, self._said = threads, 0.0, 0.0, False

    def observe(self, step: int, wall: float, cpu: float) -> list[str]:
        """The sentence about the steps up to this one, mostly none. wall, cpu: seconds of this step."""
        self._wall, self._cpu = self._wall + wall, self._cpu + cpu
        if self._said or self._wall < SECONDS:
            return []
        wall, cpu, self._wall, self._cpu = self._wall, self._cpu, 0.0, 0.0
        if cpu >= LEAST * wall:
            return []
        self._said = True
        busy = f"step {step}: steps of {wall:.0f} s had {cpu:.0f} s of processor time, as other programs compute too"
        if self._threads == 1:
            return [busy]
        return [f"{busy}; {self._threads} threads then wait for each other, and --threads 1 may be faster"]

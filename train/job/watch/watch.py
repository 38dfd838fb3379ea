"""The watch over the steps of a run: prints the signs of trouble when they appear, and says when the run must end."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from train.job.metrics_log import Row
from train.job.processes.controller import Controller
from train.job.settings import RunSettings

from .slow_ranks import EVERY, SlowRanks
from .trouble import Trouble
from .waiting import Waiting

BAD_STEPS = 5  # in a row, upon which a run goes back without --stop-after-bad


@dataclass(frozen=True)
class Watch:
    """Over the steps of one process or mesh. limit: bad steps in a row that end the run; None: none do."""

    trouble: Trouble
    limit: int | None
    waiting: Waiting
    slow_ranks: SlowRanks = field(default_factory=SlowRanks)

    @classmethod
    def of(cls, settings: RunSettings, rows: Sequence[Row]) -> "Watch":
        """The watch of a run that has logged `rows`."""
        limit = BAD_STEPS if settings.on_divergence else None
        return cls(Trouble(rows), settings.stop_after_bad or limit, Waiting(torch.get_num_threads()))

    def look(self, row: Row, cost: Row, controller: Controller) -> None:
        """Takes in the rows of a step. All ranks take part every `EVERY` steps."""
        said, step = self.trouble.observe(row), row["step"]
        if not controller.several:  # processes of a mesh wait for each other
            said += self.waiting.observe(step, cost["seconds"], cost["cpu_seconds"])
        elif step % EVERY == 0:
            said += self.slow_ranks.observe(step, controller.do("seconds_of_ranks"))
        for sentence in said:
            print(f"warning: {sentence}", file=sys.stderr, flush=True)

    @property
    def ends(self) -> int:
        """The number of bad steps, where it is so high that the run must end; else 0."""
        return self.trouble.bad if self.limit is not None and self.trouble.bad >= self.limit else 0

    @property
    def defers_saves(self) -> bool:
        """Whether a save waits for a good step: a run that ends by bad ones goes on from a save before them."""
        return self.limit is not None and self.trouble.bad > 0

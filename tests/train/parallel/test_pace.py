"""How fast each rank computes by itself."""

import torch.distributed as dist

from tests.support.ranks_pool import Ranks
from train.job.processes.pace import product, seconds_of_ranks


def measured(slow: int) -> list[float]:
    def work() -> None:
        for _ in range(20 if dist.get_rank() == slow else 1):
            product()

    return seconds_of_ranks(work)


def test_each_rank_times_its_own_work(ranks: Ranks) -> None:
    first, second = ranks(2)(measured, 1)
    assert first == second and first[1] > 4 * first[0] > 0

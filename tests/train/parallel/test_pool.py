"""The pool itself: results come back, and a failure names its rank and leaves a pool that works."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks_pool import Ranks


def total(start: int) -> float:
    x = torch.full((1,), start + float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def process() -> int:
    return os.getpid()


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("something is wrong here")
    dist.all_reduce(torch.zeros(1))


def one_ends() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_jobs_run_in_ranks_that_stay(ranks: Ranks) -> None:
    assert ranks(2)(total, 3) == [7.0, 7.0]
    first = ranks(2)(process)
    assert len(set(first)) == 2 and os.getpid() not in first
    assert ranks(2)(process) == first


def test_a_failure_names_its_rank_and_the_next_job_gets_new_ones(ranks: Ranks) -> None:
    first = ranks(2)(process)
    with pytest.raises(AssertionError, match="something is wrong here") as raised:
        ranks(2)(one_fails)
    assert "rank 1: Traceback" in str(raised.value)
    with pytest.raises(AssertionError, match="rank 1: it has ended without an answer"):
        ranks(2)(one_ends)
    assert ranks(2)(total, 0) == [1.0, 1.0]
    assert not set(ranks(2)(process)) & set(first)

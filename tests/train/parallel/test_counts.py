"""Counts are added up exactly: a loss that counts in fp32, or in a narrow integer, loses nothing to other microbatches.

fp32 knows no odd number above 2^24, so 2^24 + 1 + 1 + 1 is 2^24 in it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from tests.support.one_process import batch, config_of, placed
from tests.support.ranks_pool import Ranks
from train.engine import Engine
from train.job.heldout import in_batches, mean_loss
from train.losses import policy, values
from train.losses.moe_balance import update_bias
from train.optim.adamw import sgd
from train.parallel import Mesh

COUNTS = (2**24, 1, 1, 1)
DTYPES = (torch.float32, torch.int32, torch.int64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def counting_loss(dtype: torch.dtype) -> Callable[..., Any]:
    """A loss of one's own: its count and its aux are numbers of the batch, in this dtype."""

    def loss(params: Any, batch: Any) -> tuple[Tensor, Tensor, Any]:
        count = batch["count"].sum().to(dtype)
        return params["w"].sum() * 0, count, {"counts": {"right": count}}

    return loss


def microbatches() -> list[dict[str, Tensor]]:
    return [{"count": torch.tensor([[count]])} for count in COUNTS]


def params() -> dict[str, Tensor]:
    return {"w": torch.ones(2)}


@every_dtype
def test_step_of_microbatches_counts_exactly(dtype: torch.dtype) -> None:
    state = train.init_state(params(), sgd(0.1))
    _, metrics = train.make_step(counting_loss(dtype), sgd(0.1))(state, microbatches())
    assert int(metrics["count"]) == int(metrics["aux"]["counts"]["right"]) == sum(COUNTS)


@every_dtype
def test_evaluation_counts_exactly(dtype: torch.dtype) -> None:
    found = train.make_eval_step(counting_loss(dtype))(params(), microbatches())
    assert int(found["count"]) == int(found["aux"]["counts"]["right"]) == sum(COUNTS)


@every_dtype
def test_engine_counts_exactly_over_calls(dtype: torch.dtype) -> None:
    engine, loss = Engine(config_of("llama"), params(), sgd(0.1)), counting_loss(dtype)
    added = [engine.forward_backward([part], loss)["count"] for part in microbatches()]
    assert [int(count) for count in added] == list(COUNTS)
    metrics = engine.optim_step()
    assert int(metrics["count"]) == int(metrics["aux"]["counts"]["right"]) == sum(COUNTS)


def test_heldout_loss_counts_weights_that_are_no_whole_numbers() -> None:
    rows = {"tokens": torch.zeros(16, 1), "weights": torch.full((16, 1), 0.05)}
    loss = mean_loss(lambda batch: (batch["weights"].sum(), batch["weights"].sum()), in_batches(rows))
    assert loss == pytest.approx(1.0)


def own_loss(config: Any) -> Callable[..., Any]:
    """The next-token loss with a count in fp32, the sum of the batch's."""

    def loss(params: Any, batch: Any) -> tuple[Tensor, Tensor, Any]:
        total, _ = train.next_token_loss(params, batch, config=config, length=24)
        count = batch["count"][:, 0].float().sum()
        return total, count, {"right": count}

    return loss


def counted_batches() -> list[dict[str, Tensor]]:
    """Two microbatches whose first rows count 2^24 and 1."""
    given = batch()
    count = torch.zeros_like(given["tokens"])
    count[0], count[4] = 2**24, 1
    return [{name: t[rows] for name, t in {**given, "count": count}.items()} for rows in (slice(4), slice(4, 8))]


def count_over(mesh_text: str) -> list[int]:
    """[the step's count, its aux, the evaluation's] over a mesh."""
    mesh = Mesh.parse(mesh_text)
    loss, layers = own_loss(config_of("llama", 3 if mesh.pp > 1 else None)), 3 if mesh.pp > 1 else None
    params, optimizer = placed("llama", mesh, layers=layers), sgd(0.1)
    found = train.make_eval_step(loss, mesh=mesh)(params, counted_batches())
    step = train.make_step(loss, optimizer, mesh=mesh)
    _, metrics = step(train.init_state(params, optimizer), counted_batches())
    return [int(metrics["count"]), int(metrics["aux"]["right"]), int(found["count"])]


@pytest.mark.parametrize("mesh", ["fsdp=2", "pp=2"])
def test_ranks_count_exactly(mesh: str, ranks: Ranks) -> None:
    assert all(found == [2**24 + 1] * 3 for found in ranks(2)(count_over, mesh))


def test_selection_bias_is_moved_by_counts_that_fp32_does_not_tell_apart() -> None:
    counts = torch.tensor([2**24, 2**24 + 1])
    assert update_bias(torch.zeros(2), counts, 0.5).tolist() == [0.5, -0.5]


def test_metrics_that_are_counts_are_integers() -> None:
    ones = torch.ones(3)
    valid, zero = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3)
    metrics = [
        policy.dpo_loss(ones, -ones, ones, ones)[2]["accuracy"],
        policy.policy_loss(zero + 3, zero, zero + 1, valid)[2]["clipped"],
        values.value_loss(zero + 3, zero, zero + 9, valid)[2]["clipped"],
        values.reward_loss(ones, -ones)[2]["accuracy"],
    ]
    assert all(metric.dtype == torch.int64 for metric in metrics)
    assert [int(metric) for metric in metrics] == [3, 3, 3, 3]

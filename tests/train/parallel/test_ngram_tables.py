"""Tables of n-grams that several ranks hold: which rows travel, and what happens where values cannot be read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.models.common.spec import embedding
from params import Rules, plan
from params.axes import NGRAM
from params.sharding import Sharding
from tests.support.one_process import errors_of, one_process, worst
from tests.support.ranks_pool import Ranks, devices
from train.comm import collectives
from train.parallel import Mesh, ngram_tables
from train.parallel.ngram_tables import sharded_table

ROWS, WIDTH = 37, 6  # of which no mesh divides the rows


def ids_of(rank: int, shape: tuple[int, ...] = (2, 5, 3)) -> Tensor:
    return torch.randint(ROWS, shape, generator=torch.Generator().manual_seed(rank)) % 11 * 3


def values() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def sharding_over(mesh: str) -> Sharding:
    leaf = embedding(ROWS, WIDTH, axis=NGRAM, size_axis="ngram_latent")
    axes = {NGRAM: "tp"} if "tp" in mesh else {}
    how: Sharding = plan({"table": leaf}, Rules(axes, spread="fsdp"), devices(Mesh.parse(mesh)))["table"]
    return how


def looked_up(mesh: str, shape: tuple[int, ...], away: bool) -> tuple[float, float, int]:
    """(how far rows and gradients are from those of one process, the rows that this rank was sent)."""
    how, received = sharding_over(mesh), []
    right = collectives.exchange

    def watched(x: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        received.append(sum(came) if x.is_floating_point() else 0)
        return right(x, sent, came, group)

    rank, world = torch.distributed.get_rank(), Mesh.parse(mesh).world
    local = values()[how.local_box()].clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_tables, "exchange", watched)
        patch.setattr(ngram_tables, "host_is_away", lambda: away)
        found = F.embedding(ids_of(rank, shape), sharded_table(local, how, torch.float64))  # type: ignore[arg-type]
    factor = torch.arange(found.numel(), dtype=torch.float64).view(found.shape).sin()
    (grad,) = torch.autograd.grad((found * factor).sum(), [local])
    whole = values().requires_grad_()
    every = [F.embedding(ids_of(r, shape), whole) for r in range(world)]
    (want,) = torch.autograd.grad(sum((rows * factor).sum() for rows in every), [whole])  # type: ignore[arg-type]
    off = float((grad - want[how.local_box()]).abs().max())
    return float((found - every[rank]).abs().max()), off, received[-1] if received else -1


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=4"])
@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 40)])
def test_rows_and_gradients_are_those_of_one_process(
    ranks: Ranks, mesh: str, shape: tuple[int, ...], away: bool
) -> None:
    """Each row that a rank asks for comes once; where no shape may depend on values there are sums over ranks."""
    for rank, (rows, grads, came) in enumerate(ranks(Mesh.parse(mesh).world)(looked_up, mesh, shape, away)):
        assert rows == 0 and grads < 1e-12
        unique = len(ids_of(rank, shape).unique())
        assert came == (-1 if away else unique) and unique < ids_of(rank, shape).numel()


def refused(mesh: str) -> str:
    """The error of an id that only the first rank has."""
    how, rank = sharding_over(mesh), torch.distributed.get_rank()
    ids = ids_of(rank).clamp(min=ROWS if rank == 0 else 0)
    table: Any = sharded_table(values()[how.local_box()].clone(), how, torch.float64)
    with pytest.raises(IndexError) as error:
        F.embedding(ids, table)
    return str(error.value)


def test_an_id_out_of_range_is_refused_on_every_rank(ranks: Ranks) -> None:
    assert ranks(2)(refused, "fsdp=2") == ["index out of range"] * 2


def errors_without_host() -> dict[str, float]:
    one_process("qwen4_exp_ngrams")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_tables, "host_is_away", lambda: True)
        return errors_of("qwen4_exp_ngrams", "fsdp=2", {}, {})


def errors_of_rows_sent_to_the_wrong_rank() -> dict[str, float]:
    """A planted bug: the gradients of a row go to the next row."""
    one_process("qwen4_exp_ngrams")
    right = ngram_tables.ShardedTable._by_rows

    def read(table: Any, ids: Tensor, group: Any) -> Tensor:
        rows = right(table, ids, group)
        return rows.detach() + (rows - rows.detach()).roll(1, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_tables.ShardedTable, "_by_rows", read)
        return errors_of("qwen4_exp_ngrams", "fsdp=2", {}, {})


def test_a_step_whose_shapes_depend_on_no_values_is_that_of_one_process(ranks: Ranks) -> None:
    assert worst(ranks(2)(errors_without_host), "gradient")[0] < 1e-5


def test_gradients_of_other_rows_are_found(ranks: Ranks) -> None:
    assert worst(ranks(2)(errors_of_rows_sent_to_the_wrong_rank), "gradient")[0] > 1e-3

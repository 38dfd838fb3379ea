"""kernel="flex" over ranks that gather keys: each reads the choice of its own queries among the keys of all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import fnmodels
from fnmodels.ops.attention import flex, select
from fnmodels.ops.attention.choice import Choice
from tests.support import cases
from tests.support.ranks_pool import Ranks
from tests.train.parallel.test_context import batch_of, config_of, world_group
from train.parallel.context import api as context


def prepared(config: Any, batch: dict[str, Tensor]) -> Any:
    given = {name: batch[name] for name in ("positions", "segment_ids")}
    return fnmodels.prepare(config, batch["tokens"], **given)


def apart(name: str, mistake: bool = False) -> float:
    """How far the logits of this rank's tokens are from those of one process, without a compiler and a dense mask.

    mistake: a query attends to what its neighbour chose.
    """
    config, params, batch = config_of(name), cases.generic_params(config_of(name)), batch_of(name)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        wanted = fnmodels.forward(params, *prepared(config, batch), config=config, kernel="math")
        part = context.shard_batch(batch | {"wanted": wanted}, rank, ranks, order="mask", config=config)
        patch.setattr(flex, "_compiled", lambda: dict.fromkeys((None, False), flex_attention))
        patch.setattr(Choice, "dense", None)
        right = select.choice_block_mask
        patch.setattr(select, "choice_block_mask", lambda choice, heads: right(turned(choice, mistake), heads))
        kernel = context.context_kernel("gather", world_group(), inner="flex")
        logits = fnmodels.forward(params, *prepared(config, part), config=config, kernel=kernel)
    valid = part["segment_ids"] > 0
    return float((logits - part["wanted"])[valid].abs().max() / wanted.abs().max())


def turned(choice: Choice, mistake: bool) -> Choice:
    if not mistake:
        return choice
    return Choice(choice.index.roll(1, 1), choice.seen.roll(1, 1), choice.keys, choice.groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_flex_over_ranks_reads_the_choice_of_its_queries(ranks: Ranks, name: str) -> None:
    assert max(ranks(2)(apart, name)) < 1e-5
    assert min(ranks(2)(apart, name, True)) > 1e-3

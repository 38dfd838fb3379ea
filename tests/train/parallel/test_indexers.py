"""D1 of the loss that trains indexers: over fsdp, tp and cp a step is that of one process, in both stages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.copies import may_differ
from tests.support.one_process import CHOOSING, errors_of, one_process, worst
from tests.support.ranks_pool import Ranks
from train.losses.indexers import teaching
from train.parallel import Mesh

LIMIT = 1e-5
MESHES: dict[str, dict[str, Any]] = {"fsdp=2": {"remat": "full"}, "tp=2": {}, "cp=2": {}}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stage", CHOOSING)
def test_indexer_loss_over_a_mesh_is_that_of_one_process(ranks: Ranks, stage: str, mesh: str) -> None:
    """Every gradient, those of indexers among them, and every parameter after a step."""
    found = ranks(Mesh.parse(mesh).world)(errors_of, stage, mesh, {}, MESHES[mesh])
    named = {what for errors in found for what in errors}
    assert any(what.startswith("gradient of") and ".indexer." in what for what in named) and "indexer_kl" in named
    assert worst(found)[0] < LIMIT, worst(found)


def errors_without(what: str) -> dict[str, float]:
    """Of a step over tp=2 or cp=2 with a planted bug."""
    one_process("dense")
    with pytest.MonkeyPatch.context() as patch, may_differ():
        if what == "heads of other ranks":
            patch.setattr(teaching.collectives, "summed", lambda x, *_: x)
            return errors_of("dense", "tp=2")
        if what == "choices of other ranks":
            patch.setattr(teaching.collectives, "all_gather", lambda x, dim, group: x.repeat(1, 2, 1, 1))
            return errors_of("sparse blocks", "tp=2")
        gather = teaching.keys_of_ranks
        patch.setattr(teaching, "keys_of_ranks", lambda kernel: _Detached(gather(kernel)))
        return errors_of("dense", "cp=2")


class _Detached:
    """Keys of other ranks without a gradient, which their ranks then lack."""

    def __init__(self, ranks: Any) -> None:
        self.mask, self.group, self.of_all = ranks.mask, ranks.group, ranks.gather

    def gather(self, k: Tensor) -> Tensor:
        shards = list(self.of_all(k.detach()).chunk(self.group.size(), 1))
        shards[self.group.rank()] = k
        return torch.cat(shards, 1)


@pytest.mark.parametrize("what", ["heads of other ranks", "choices of other ranks", "gradients of other ranks' keys"])
def test_indexer_loss_over_a_mesh_mistakes_are_seen(ranks: Ranks, what: str) -> None:
    assert worst(ranks(2)(errors_without, what), "gradient")[0] > 100 * LIMIT


def refusal() -> str:
    with pytest.raises(ValueError, match="Indexers are trained") as error:
        errors_of("dense", "tp=2", {"sequence": True})
    return str(error.value)


def test_indexer_loss_over_shards_of_positions_is_refused(ranks: Ranks) -> None:
    assert all("sequence=False, or cp" in said for said in ranks(2)(refusal))

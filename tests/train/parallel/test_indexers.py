"""D1 of the loss that trains indexers: a step over fsdp, tp (with sequence too) and cp is that of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.copies import may_differ
from tests.support.one_process import CHOOSING, errors_of, one_process, worst
from tests.support.ranks_pool import Ranks
from train.losses.indexers import teaching
from train.parallel import Mesh
from train.parallel.tensor.leaf_wrappers import RegionEntry

LIMIT = 1e-5
MESHES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fsdp=2": ("fsdp=2", {}, {"remat": "full"}),
    "tp=2": ("tp=2", {}, {}),
    "tp=2 with sequence": ("tp=2", {"sequence": True}, {}),
    "fsdp=2,tp=2 with sequence": ("fsdp=2,tp=2", {"sequence": True}, {"remat": "full"}),
    "cp=2": ("cp=2", {}, {}),
}


# Shards know no stage: each third one has fsdp alone, another third over tp. Windows of layers of their own and those
# of earlier layers have tp in turn.
SHARDED = {"fsdp=2": 2, "fsdp=2,tp=2 with sequence": 1}
TURNS = {"sparse windows": "tp=2 with sequence", "sparse shared windows": "tp=2"}  # those that they lack
EACH = [
    (stage, mesh)
    for i, stage in enumerate(CHOOSING)
    for mesh in MESHES
    if i % 3 == SHARDED.get(mesh, i % 3) and TURNS.get(stage) != mesh
]


@pytest.mark.parametrize(("stage", "mesh"), EACH)
def test_indexer_loss_over_a_mesh_is_that_of_one_process(ranks: Ranks, stage: str, mesh: str) -> None:
    """Every gradient, those of indexers among them, and every parameter after a step."""
    found = ranks(Mesh.parse(MESHES[mesh][0]).world)(errors_of, stage, *MESHES[mesh])
    named = {what for errors in found for what in errors}
    assert any(what.startswith("gradient of") and ".indexer." in what for what in named) and "indexer_kl" in named
    assert worst(found)[0] < LIMIT, worst(found)


def errors_without(what: str) -> dict[str, float]:
    """Of a step over tp=2 or cp=2 with a planted bug."""
    one_process("dense")
    with pytest.MonkeyPatch.context() as patch, may_differ():
        if what == "heads of other ranks":
            patch.setattr(teaching.collectives, "summed", lambda x, *_: x)
            return errors_of("dense", "tp=2", {"sequence": True})
        if what == "positions of other ranks":  # of which the indexer's gradients would be a part
            patch.setattr(RegionEntry, "__call__", positions_alone)
            return errors_of("dense", "tp=2", {"sequence": True})
        if what == "choices of other ranks":
            patch.setattr(teaching.collectives, "all_gather", lambda x, dim, group: x.repeat(1, 2, 1, 1))
            return errors_of("sparse blocks", "tp=2")
        gather = teaching.keys_of_ranks
        patch.setattr(teaching, "keys_of_ranks", lambda kernel: _Detached(gather(kernel)))
        return errors_of("dense", "cp=2")


def positions_alone(entry: RegionEntry, x: Tensor) -> Tensor:
    """All positions of what has a gradient, and of what the indexer reads this rank's with zeros for the others."""
    whole = entry.region.enter(x)
    if x.requires_grad or not torch.is_grad_enabled():
        return whole
    first = entry.region.rank * x.shape[1]
    own = torch.zeros_like(whole)
    own[:, first : first + x.shape[1]] = x
    return own


class _Detached:
    """Keys of other ranks without a gradient, which their ranks then lack."""

    def __init__(self, ranks: Any) -> None:
        self.mask, self.group, self.of_all = ranks.mask, ranks.group, ranks.gather

    def gather(self, k: Tensor) -> Tensor:
        shards = list(self.of_all(k.detach()).chunk(self.group.size(), 1))
        shards[self.group.rank()] = k
        return torch.cat(shards, 1)


MISTAKES = ("heads of other ranks", "positions of other ranks", "choices of other ranks")
MISTAKES += ("gradients of other ranks' keys",)


@pytest.mark.parametrize("what", MISTAKES)
def test_indexer_loss_over_a_mesh_mistakes_are_seen(ranks: Ranks, what: str) -> None:
    assert worst(ranks(2)(errors_without, what), "gradient")[0] > 100 * LIMIT

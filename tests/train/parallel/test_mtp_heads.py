"""MTP heads whose block is not a layer like the model's last one, over a mesh: of several layers, of another kind."""

from typing import Any

import pytest

from fnmodels import tree
from tests.support.one_process import HEADS, errors_of, spec_of, worst
from tests.support.ranks_pool import Ranks
from train.parallel import Mesh

WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fsdp": ("fsdp=2", {}, {"remat": "full"}),
    "tp": ("tp=2", {}, {}),
    "sequence": ("tp=2", {"sequence": True}, {}),
    "cp": ("cp=2", {}, {}),
    "pp": ("pp=2", {"schedule": "1F1B"}, {"accumulate": 2}),
}


# shards and pieces of rows know no family: each third one has them; Step 3.5, with output heads of its own, the second
THIRD = {"fsdp": 0, "sequence": 1, "cp": 2}


@pytest.mark.parametrize(
    ("name", "way"), [(n, w) for i, n in enumerate(HEADS) for w in WAYS if w not in THIRD or i % 3 == THIRD[w]]
)
def test_a_step_is_that_of_one_process(ranks: Ranks, way: str, name: str) -> None:
    mesh, strategy, options = WAYS[way]
    found = ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, options)
    heads = {f"{path} after a step" for path in tree.flatten(spec_of(name)) if path.startswith("mtp.")}
    assert heads <= {what for errors in found for what in errors}
    assert worst(found)[0] < 1e-5, worst(found)

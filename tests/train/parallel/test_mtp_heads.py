"""MTP heads whose block is not a layer like the model's last one, over a mesh: of several layers, of another kind."""

from typing import Any

import pytest

from fnmodels import mtp, tree
from tests.support.one_process import HEADS, config_of, errors_of, spec_of, worst
from tests.support.ranks_pool import Ranks
from train.parallel import Mesh

WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fsdp": ("fsdp=2", {}, {"remat": "full"}),
    "tp": ("tp=2", {}, {}),
    "sequence": ("tp=2", {"sequence": True}, {}),
    "cp": ("cp=2", {}, {}),
    "pp": ("pp=2", {"schedule": "1F1B"}, {"accumulate": 2}),
}
SPLIT = ("pp=2", {"schedule": "InterleavedZeroBubble", "virtual": 2}, {"accumulate": 2})  # of four layers


# Shards and pieces of rows know no family: each sixth one has them; every one has tp or pp, in turn. Step 3.5, with
# output heads of its own, has the second too. Heads that read streams have all of them, of two models, fsdp of one.
SIXTH = {"fsdp": 0, "sequence": 2, "cp": 4}
STREAMS = ["mtp_deepseek_v4", "mtp_qwen4_exp_ngrams"]
OTHERS = [name for name in HEADS if not mtp.source_taps(config_of(name))]
TURNS = ("tp", "pp")
CASES = [
    (name, way)
    for i, name in enumerate(OTHERS)
    for way in WAYS
    if (i % 6 == SIXTH[way] if way in SIXTH else way == TURNS[i % len(TURNS)])
]


CASES += [
    *((name, way) for name in STREAMS for way in WAYS if (name, way) != (STREAMS[1], "fsdp")),
    (STREAMS[0], "split"),
    ("mtp_step3p5", "sequence"),
]
CASES += [("mtp_glm5_next", "cp")]  # whose block chooses pools of keys


@pytest.mark.parametrize(("name", "way"), dict.fromkeys(CASES))
def test_a_step_is_that_of_one_process(ranks: Ranks, way: str, name: str) -> None:
    mesh, strategy, options = WAYS.get(way, SPLIT)
    found = ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, options)
    heads = {f"{path} after a step" for path in tree.flatten(spec_of(name)) if path.startswith("mtp.")}
    assert heads <= {what for errors in found for what in errors}
    assert worst(found)[0] < 1e-5, worst(found)

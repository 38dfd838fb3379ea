"""A step over a mesh is that of jax and optax in one process, in fp64. Skipped without jax.

NamedSharding and shard_map there. That a mesh of jax has the result of its single device is jax's own promise.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import llama, tree
from tests.support.ranks_pool import Ranks, devices
from train.comm.dtensor import local_tree
from train.parallel import Mesh, Strategy
from train.parallel.placement import rules_of, shardings

pytestmark = pytest.mark.slow  # jax compiles for seconds
CONFIG = llama.Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
STEPS, ROWS, LENGTH, EPS = 3, 4, 8, 1e-3  # for eps see tests/train/test_idioms.py


def start() -> Any:
    whole = P.init(CONFIG, 0, dtype=torch.float64)
    return tree.map(lambda leaf: 5 * leaf if leaf.ndim == 2 else leaf, whole)


def batch(seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    places = {"positions": torch.arange(LENGTH).expand(ROWS, LENGTH), "segment_ids": torch.ones_like(tokens)}
    return {"tokens": tokens, **places, "labels": tokens.roll(-1, 1)}


def stepped(text: str, strategy: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """(the losses of the steps, {path: (the [start, stop] of this rank's shard in each dimension, its values)})."""
    mesh, how = Mesh.parse(text), Strategy(**strategy)
    placements = P.plan(fnmodels.family_of(CONFIG).spec(CONFIG), rules_of(mesh, CONFIG), devices(mesh))
    whole = tree.flatten(start())
    placed = {path: h.distribute(whole[path][h.local_box()].clone()) for path, h in tree.flatten(placements).items()}
    optimizer, loss = train.adamw(1e-2, eps=EPS), functools.partial(train.next_token_loss, config=CONFIG)
    step = train.make_step(loss, optimizer, mesh=mesh, strategy=how, **options)
    state, losses = train.init_state(tree.unflatten(placed), optimizer), []
    for seed in range(STEPS):
        state, metrics = step(state, batch(seed))
        losses.append(metrics["loss"].item())
    boxes, held = tree.flatten(shardings(state.params)), tree.flatten(local_tree(state.params))
    ends = {path: [[part.start, part.stop] for part in boxes[path].local_box()] for path in held}
    return losses, {path: (ends[path], leaf.tolist()) for path, leaf in held.items()}


@functools.cache
def in_jax() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same of one process in jax."""
    from tests.support import llama_in_jax as theirs

    theirs.jax.config.update("jax_enable_x64", True)
    try:
        other, q, losses = theirs.optax.adamw(1e-2, **theirs.BETAS), theirs.of_jax(start()), []
        state = q, other.init(q)
        for seed in range(STEPS):
            state, value = theirs.their_step(other, state, theirs.of_jax(batch(seed)))
            losses.append(float(value))
        return losses, tree.flatten(P.from_jax(state[0]))
    finally:
        theirs.jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(
    ("mesh", "strategy", "options"),
    [
        ("dp=2", {}, {}),
        ("fsdp=2,tp=2", {"sequence": True}, {"accumulate": 2, "remat": "full"}),
        ("cp=2", {}, {}),
    ],
    ids=str,
)
def test_steps_over_a_mesh_are_those_of_jax(
    ranks: Ranks, mesh: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    pytest.importorskip("optax")
    found = ranks(Mesh.parse(mesh).world)(stepped, mesh, strategy, options)
    losses, after = in_jax()
    for rank_losses, shards in found:
        torch.testing.assert_close(rank_losses, losses, rtol=1e-10, atol=1e-10)
        assert shards.keys() == after.keys()
        for path, (ends, values) in shards.items():
            want = after[path][tuple(slice(*pair) for pair in ends)]
            shard = torch.tensor(values, dtype=torch.float64)
            torch.testing.assert_close(shard, want, rtol=1e-10, atol=1e-10, msg=path)

"""The engine as a guest: a foreign loop drives it in a process group that somebody else has made, over fsdp x pp."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from tests.parallel.pool import Ranks, devices
from tests.parallel.test_pipeline import batch_of
from tests.parallel.test_stages import even
from tests.support import generic_params
from train.engine import Engine
from train.parallel import Mesh, Strategy
from train.parallel.dtensors import local_tree
from train.parallel.gather import shardings
from train.parallel.stages import stage_plan
from train.parallel.step import rules_of

pytestmark = pytest.mark.xdist_group("ranks")


def surroundings() -> list[Any]:
    """What a guest leaves as it was."""
    return [
        dist.group.WORLD,
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.initial_seed(),
        torch.random.get_rng_state().sum().item(),
        warnings.filters[:],
        dict(os.environ),
    ]


def rollouts(config: Any) -> list[list[dict[str, Tensor]]]:
    """Lists of microbatches, cut by the loop; those of the second are of unequal length."""
    parts = fnmodels.split(batch_of(config, 4), 4)
    more = fnmodels.split(batch_of(config, 8), 8)[4:]
    shorter = [tree.map(lambda t, i=i: t[:, : 12 - i], part) for i, part in enumerate(more)]
    return [[tree.map(lambda t: torch.cat((t, t)), part) for part in parts], shorter]


def driven(name: str, text: str, strategy: dict[str, Any], clip: float | None) -> dict[str, float]:
    """{what: how far from an engine in one process}. With plain gradient descent, so that parameters show gradients."""
    config, mesh, how = even(name), Mesh.parse(text), Strategy(**strategy)
    spec, whole = fnmodels.family_of(config).spec(config), generic_params(config)
    optimizer = train.sgd(0.5, spec=spec)
    plan = stage_plan(P.plan(spec, rules_of(mesh, config), devices(mesh)), config, devices(mesh), how)
    flat = tree.flatten(whole)
    made = iter([where.distribute(flat[path][where.here()].clone()) for path, where in tree.flatten(plan).items()])
    given = tree.map(lambda _: next(made), plan)
    loss = functools.partial(train.next_token_loss, config=config, kernel="math")
    logprobs = functools.partial(train.token_logprobs, config=config, kernel="math")
    before = surroundings()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours = Engine(config, given, optimizer, clip=clip, mesh=mesh, strategy=how)
    assert ["is used as it is" in str(w.message) for w in warned if w.category is UserWarning] == [True]
    theirs = Engine(config, whole, optimizer, clip=clip)
    found: dict[str, float] = {}
    for _ in range(2):
        for batches in rollouts(config):
            added, expected = ours.forward_backward(batches, loss), theirs.forward_backward(batches, loss)
            for key, value in expected.items():
                found[key] = max(abs(float(added[key] / value) - 1), found.get(key, 0.0))
        measured, metrics = ours.optim_step(), theirs.optim_step()
        for key in ("loss", "count", "grad_norm"):
            found[f"{key} of a step"] = abs(float(measured[key] / metrics[key]) - 1)
    shards = tree.flatten(shardings(ours.params))
    after = tree.flatten(theirs.params)
    for path, leaf in tree.flatten(local_tree(ours.params)).items():
        change = (after[path] - flat[path]).abs().max().clamp(min=1e-30)  # in which a gradient is not lost
        found[path] = float((leaf - after[path][shards[path].here()]).abs().max() / change)
    batches = rollouts(config)[1]
    for results, expected in zip(ours.infer(batches, logprobs), theirs.infer(batches, logprobs), strict=True):
        for key, one, other in zip(("logp", "entropy", "valid"), results, expected, strict=True):
            assert one.shape == other.shape
            far = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30)
            found[key] = max(float(far), found.get(key, 0.0))
    handed, wanted = dict(ours.export()), dict(theirs.export())
    assert handed.keys() == wanted.keys() and all(handed[n].shape == t.shape for n, t in wanted.items())
    found["export"] = max(float((handed[n] - t).abs().max() / t.abs().max()) for n, t in wanted.items())
    assert surroundings() == before
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "clip"),
    [
        ("llama_tied", "pp=2,fsdp=2", {}, None),
        ("deepseek_v3", "pp=2,fsdp=2", {"schedule": "Interleaved1F1B"}, 0.1),
    ],
)
def test_it_is_that_of_one_process(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], clip: float | None
) -> None:
    found = ranks(4)(driven, name, mesh, strategy, clip)
    assert {path for far in found for path in far} >= set(tree.flatten(generic_params(even(name))))
    assert not {what: far for one in found for what, far in one.items() if not far < 1e-4}

"""Dropout by keys of tokens: a step over any mesh has the masks of one process bit for bit, and its results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch.distributed as dist

import train
from fnmodels import tree
from fnmodels.inputs import noise_keys
from fnmodels.models.common import context
from fnmodels.ops.dropout import Dropout, Noise
from tests.support import masks
from tests.support.cases import generic_params
from tests.support.one_process import CLIP, LENGTH, batch, by_one_rank, config_of, error, optimizer_of, placed, worst
from tests.support.ranks_pool import Ranks
from train.comm.dtensor import local_tree
from train.parallel import Mesh, Strategy
from train.parallel.placement import shardings

RATES = Dropout(weights=0.3, attention=0.2, mlp=0.1, embedding=0.15, neurons=0.25)


def one_shard_of_neurons(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Noise, "read_by", lambda noise, name: (noise.neurons, 0))


def one_shard_of_heads(patch: pytest.MonkeyPatch) -> None:
    real = context.dropped_weights
    first = lambda weights, noise, *how: real(weights, dataclasses.replace(noise, head_shard=0), *how)  # noqa: E731
    patch.setattr(context, "dropped_weights", first)


PLANTS = {plant.__name__: plant for plant in (one_shard_of_neurons, one_shard_of_heads)}


def planted(plant: str, *job: Any) -> dict[str, Any]:
    alone(job[0], None)  # before it is spoiled
    with pytest.MonkeyPatch.context() as patch:
        PLANTS[plant](patch)
        return stepped(*job)


class Setting:
    """A model with dropout, its loss and optimizer, rows with keys and without, and a recorder of its masks."""

    def __init__(self, name: str, layers: int | None) -> None:
        self.config = dataclasses.replace(config_of(name, layers), dropout=RATES)
        self.loss = functools.partial(train.next_token_loss, config=self.config, length=LENGTH)
        self.optimizer, self.rows = optimizer_of(name, layers), batch()
        valid = self.rows["segment_ids"] > 0
        keys = masks.keyed(noise_keys(7, self.rows["positions"], self.rows["segment_ids"]), valid)
        self.recording = functools.partial(masks.recording, keys, valid, self.config.num_hidden_layers)
        self.keyed = self.rows | {"rng": keys}


def alone(name: str, layers: int | None) -> tuple[dict[str, Any], dict[str, Any], float, Any]:
    """Of one process: the parameters after a step, its metrics, how far one without dropout is from it, its masks."""
    return by_one_rank(f"dropout-{name}-{layers}", lambda: _alone(Setting(name, layers)))


def _alone(its: Setting) -> tuple[dict[str, Any], dict[str, Any], float, Any]:
    step, params = train.make_step(its.loss, its.optimizer, clip=CLIP), generic_params(its.config)
    with its.recording() as whole:
        one, metrics = step(train.init_state(params, its.optimizer), its.keyed)
    off, _ = step(train.init_state(params, its.optimizer), its.rows)
    apart = max(map(error, tree.leaves(off.params), tree.leaves(one.params)))
    return tree.flatten(one.params), metrics, apart, masks.written(whole.grids)


def stepped(name: str, text: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """How far a step over the mesh is from that of one process, and one without dropout ("off"), and masks of both.

    counts: how often a mask was made in the layers, at most.
    """
    mesh, how, layers = Mesh.parse(text), Strategy(**strategy), 3 if "pp" in text else None
    its = Setting(name, layers)
    after, expected, apart, whole = alone(name, layers)
    placed_params = placed(name, mesh, strategy=how, layers=layers)
    step = train.make_step(its.loss, its.optimizer, clip=CLIP, mesh=mesh, strategy=how, **options)
    with its.recording() as own:
        state, metrics = step(train.init_state(placed_params, its.optimizer), its.keyed)
    shards, held = tree.flatten(shardings(state.params)), tree.flatten(local_tree(state.params))
    found = {path: error(leaf, after[path][shards[path].local_box()]) for path, leaf in held.items()}
    found |= {key: error(metrics[key].double(), expected[key].double()) for key in ("loss", "count", "grad_norm")}
    found["off"] = apart
    grids = {"own": masks.written(own.grids)} | ({"whole": whole} if dist.get_rank() == 0 else {})
    return {"errors": found, **grids, "counts": max(n for (_, layer), n in own.counts.items() if layer >= 0)}


def check_masks(found: list[dict[str, Any]]) -> None:
    whole = masks.read(found[0]["whole"])
    assert all(((grid == 0).any() and (grid == 1).any()) for grid in whole.values())
    masks.check_same(masks.joined([masks.read(rank["own"]) for rank in found]), whole)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "options"),
    [
        ("llama", "dp=2", {}, {"accumulate": 2}),
        ("llama", "fsdp=2", {}, {}),
        ("llama", "fsdp=2,tp=2", {"sequence": True}, {"remat": "full"}),
        ("llama", "tp=2", {"sequence": True}, {"accumulate": 2}),
        ("gpt_oss", "tp=2", {}, {}),
        ("deepseek", "ep=2", {}, {}),
        ("deepseek", "ep=2,tp=2", {}, {}),
        ("deepseek", "ep=2,tp=2", {"sequence": True}, {}),
        ("llama", "cp=2", {}, {"remat": "full"}),
        ("gpt_oss", "cp=2", {"context": "ring", "order": "head_tail"}, {}),
        ("llama", "cp=2", {"context": "ulysses", "order": None}, {}),
        ("llama", "cp=2,tp=2", {"context": "ulysses", "order": None, "sequence": True}, {}),
        ("llama", "pp=2", {}, {"accumulate": 4}),
        ("llama", "pp=2,tp=2", {"sequence": True}, {"accumulate": 4, "remat": "full"}),
        ("deepseek", "pp=2,fsdp=2", {"schedule": "InterleavedZeroBubble", "virtual": 1}, {"accumulate": 4}),
    ],
)
def test_dropout_over_a_mesh_is_that_of_one_process(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    found = ranks(Mesh.parse(mesh).world)(stepped, name, mesh, strategy, options)
    check_masks(found)
    if options.get("remat") == "full":
        assert all(rank["counts"] == 2 * options.get("accumulate", 1) for rank in found)
    errors = [rank["errors"] for rank in found]
    assert all(one.pop("off") > 1e-3 for one in errors)  # what another mask would leave
    assert worst(errors)[0] < 1e-5, worst(errors)


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_masks_of_another_shard_are_found(ranks: Ranks, plant: str) -> None:
    found = ranks(2)(planted, plant, "llama", "tp=2", {}, {})
    with pytest.raises(AssertionError):
        check_masks(found)

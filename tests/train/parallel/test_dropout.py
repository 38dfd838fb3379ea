"""Dropout by keys of tokens: a step over any mesh is that of one process, whose masks it therefore has."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import train
from fnmodels import tree
from fnmodels.inputs import noise_keys
from fnmodels.ops.dropout import Dropout
from tests.support.cases import generic_params
from tests.support.one_process import CLIP, LENGTH, batch, config_of, error, optimizer_of, placed, worst
from tests.support.ranks_pool import Ranks
from train.comm.dtensor import local_tree
from train.parallel import Mesh, Strategy
from train.parallel.placement import shardings

RATES = Dropout(weights=0.3, attention=0.2, mlp=0.1, embedding=0.15, neurons=0.25)


def stepped(name: str, text: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """{what: how far a step over the mesh is from that of one process}, and of one without dropout: "off"."""
    mesh, how, layers = Mesh.parse(text), Strategy(**strategy), 3 if "pp" in text else None
    config = dataclasses.replace(config_of(name, layers), dropout=RATES)
    loss = functools.partial(train.next_token_loss, config=config, length=LENGTH)
    optimizer, rows = optimizer_of(name, layers), batch()
    keyed = rows | {"rng": noise_keys(7, rows["positions"], rows["segment_ids"])}
    params = generic_params(config)
    one, expected = train.make_step(loss, optimizer, clip=CLIP)(train.init_state(params, optimizer), keyed)
    off, _ = train.make_step(loss, optimizer, clip=CLIP)(train.init_state(params, optimizer), rows)

    placed_params = placed(name, mesh, strategy=how, layers=layers)
    step = train.make_step(loss, optimizer, clip=CLIP, mesh=mesh, strategy=how, **options)
    state, metrics = step(train.init_state(placed_params, optimizer), keyed)
    after, shards = tree.flatten(one.params), tree.flatten(shardings(state.params))
    held = tree.flatten(local_tree(state.params))
    found = {path: error(leaf, after[path][shards[path].local_box()]) for path, leaf in held.items()}
    found |= {key: error(metrics[key].double(), expected[key].double()) for key in ("loss", "count", "grad_norm")}
    return found | {"off": max(map(error, tree.leaves(off.params), tree.leaves(one.params)))}


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "options"),
    [
        ("llama", "dp=2", {}, {"accumulate": 2}),
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
    assert all(errors.pop("off") > 1e-3 for errors in found)  # what another mask would leave
    assert worst(found)[0] < 1e-5, worst(found)

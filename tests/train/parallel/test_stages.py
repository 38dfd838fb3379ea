"""`make_step` over meshes with `pp`: gradients' norm, loss, count and every parameter after steps are one process'."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import tree
from tests.support.ranks_pool import Ranks, devices
from tests.train.parallel.test_pipeline import batch_of, config_of
from train.comm.dtensor import local_tree
from train.parallel import Mesh, Strategy
from train.parallel.pipeline.runner import _Stage
from train.parallel.pipeline.stages import init_stage, stage_plan
from train.parallel.placement import rules_of, shardings


def even(name: str) -> Any:
    """With a vocabulary, heads and experts that 2 divides."""
    config = dataclasses.replace(config_of(name, 4), vocab_size=64, num_attention_heads=4)
    experts = {"n_routed_experts": 6, "n_group": 2} if name == "deepseek_v3" else {}
    return dataclasses.replace(config, **experts)


def whole() -> str:
    """Parameters of all layers on every rank, of which each would teach its own."""
    config, mesh = even("llama_tied"), Mesh(pp=2)
    spec = fnmodels.family_of(config).spec(config)
    optimizer = train.adamw(1e-2, spec=spec)
    state = train.init_state(P.init(config, 0, plan=P.plan(spec, rules_of(mesh, config), devices(mesh))), optimizer)
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer, mesh=mesh, accumulate=2)
    odd = tree.map(lambda t: t[:3], batch_of(config, 2))
    with pytest.raises(ValueError, match="3 rows, which 2 microbatches over the mesh pp=2 do not divide"):
        step(state, odd)
    with pytest.raises(ValueError) as error:
        step(state, batch_of(config, 2))
    return str(error.value)


def test_a_rank_with_all_layers_is_refused(ranks: Ranks) -> None:
    said = ranks(2)(whole)
    assert "The params hold 'norm', which is not of stages [0]" in said[0]
    assert "The params hold layer 0, which is not of stages [1]" in said[1]


def drawn() -> bool:
    """Each process draws its own layers' parts, with the numbers of the whole."""
    config, mesh = even("deepseek_v3"), Mesh(pp=2, fsdp=2)
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    made = init_stage(config, 3, stage_plan(plan, config, devices(mesh), Strategy()))
    whole, shards = tree.flatten(P.init(config, 3)), tree.flatten(shardings(made))
    return all(torch.equal(leaf, whole[p][shards[p].local_box()]) for p, leaf in tree.flatten(local_tree(made)).items())


def test_stages_are_drawn_as_the_whole_is(ranks: Ranks) -> None:
    assert all(ranks(4)(drawn))


def test_a_stage_sends_no_tensor_of_another_form() -> None:
    like, index = torch.zeros(2, 3), torch.tensor(0)
    for sent, words in (
        ({"x": torch.zeros(2, 4)}, r"sends x \[2, 4\] in torch.float32, and the next one receives \[2, 3\]"),
        ({"x": like.double()}, r"sends x \[2, 3\] in torch.float64"),
        ({"y": like}, r"sends \['y'\], and the next one receives \['x'\]"),
    ):
        stage = _Stage(lambda *_, sent=sent: (sent, None, {}), {"x": like}, {"x": like})
        stage.bind({}, [None])  # type: ignore[list-item]
        with pytest.raises(RuntimeError, match=words):
            stage(like, index=index)

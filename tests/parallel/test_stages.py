"""`make_step` over meshes with `pp`: gradients' norm, loss, count and every parameter after steps are one process'."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import tree
from tests.parallel.pool import Ranks, devices
from tests.parallel.test_pipeline import batch_of, config_of
from tests.support import generic_params
from train.parallel import Mesh, Strategy, stages
from train.parallel import step as step_module
from train.parallel.dtensors import local_tree
from train.parallel.gather import shardings
from train.parallel.stages import init_stage, stage_plan
from train.parallel.step import loss_over, rules_of

pytestmark = pytest.mark.xdist_group("ranks")


def even(name: str) -> Any:
    """With a vocabulary, heads and experts that 2 divides."""
    config = dataclasses.replace(config_of(name, 4), vocab_size=64, num_attention_heads=4)
    experts = {"n_routed_experts": 6, "n_group": 2} if name == "deepseek_v3" else {}
    return dataclasses.replace(config, **experts)


def steps(name: str, text: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """{what: how far it is from one process}, of two steps."""
    config, mesh, how = even(name), Mesh.parse(text), Strategy(**strategy)
    spec = fnmodels.family_of(config).spec(config)
    optimizer = train.adamw(1e-2, eps=1e-3, weight_decay=0.1, spec=spec)
    plan = stage_plan(P.plan(spec, rules_of(mesh, config), devices(mesh)), config, devices(mesh), how)
    flat = tree.flatten(generic_params(config))
    made = iter([where.distribute(flat[path][where.here()].clone()) for path, where in tree.flatten(plan).items()])
    loss = functools.partial(train.next_token_loss, config=config, kernel="math")
    state = train.init_state(tree.map(lambda _: next(made), plan), optimizer)
    one = train.init_state(generic_params(config), optimizer)
    batch = batch_of(config, 4)  # 8 rows
    ours = train.make_step(loss, optimizer, clip=0.5, accumulate=2, mesh=mesh, strategy=how, **options)
    plain = {name: value for name, value in options.items() if name == "balance_rate"}
    theirs = train.make_step(loss, optimizer, clip=0.5, **plain)
    found: dict[str, float] = {}
    held_out = [float(x) for x in loss_over(mesh, loss, how, trainable=optimizer.trainable)(state.params, batch)]
    for name, told, value in zip(("sum", "labels"), held_out, loss(one.params, batch), strict=True):
        found[name] = abs(told / float(value) - 1)
    for _ in range(2):
        state, measured = ours(state, batch)
        one, metrics = theirs(one, batch)
        for metric in ("loss", "count", "grad_norm"):
            found[metric] = abs(float(measured[metric]) / float(metrics[metric]) - 1)
        if "aux" in metrics:  # of all layers, on every rank
            found["counts"] = float((measured["aux"]["counts"] - metrics["aux"]["counts"]).abs().max())
    shards, whole = tree.flatten(shardings(state.params)), tree.flatten(one.params)
    for path, leaf in tree.flatten(local_tree(state.params)).items():
        expected = whole[path]
        found[path] = float((leaf - expected[shards[path].here()]).abs().max() / expected.abs().max())
    return found


@pytest.mark.parametrize(
    ("name", "text", "strategy", "options"),
    [
        ("llama_tied", "pp=2", {}, {"remat": "full"}),
        ("llama_tied", "pp=2,fsdp=2", {"schedule": "Interleaved1F1B"}, {}),
        ("deepseek_v3", "pp=2,fsdp=2", {"split": (3, 1)}, {"balance_rate": 0.01}),
        ("gpt_oss", "pp=2,tp=2", {}, {}),
        ("llama_tied", "pp=2,tp=2", {"sequence": True}, {}),
        ("deepseek_v3", "pp=2,ep=2", {}, {}),
        ("gpt_oss", "pp=2,cp=2", {"schedule": "GPipe"}, {"remat": "full"}),
        ("llama_tied", "pp=2,dp=2", {"schedule": "GPipe"}, {}),
    ],
)
def test_steps_are_those_of_one_process(
    ranks: Ranks, name: str, text: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    found = ranks(Mesh.parse(text).world)(steps, name, text, strategy, options)
    assert {path for off in found for path in off} >= set(tree.flatten(generic_params(even(name))))
    assert not {path: value for off in found for path, value in off.items() if not value < 1e-5}


def counted_twice() -> dict[str, float]:
    """A tied embedding that both of its stages count in the norm."""
    with mock.patch.object(stages, "copies", return_value=frozenset()):
        return steps("llama_tied", "pp=2", {}, {})


def unsummed() -> dict[str, float]:
    """A loss of the last stage alone, on each rank its own."""
    with mock.patch.object(step_module, "_global", lambda sums, _: sums):
        return steps("llama_tied", "pp=2", {}, {})


def test_mistakes_show(ranks: Ranks) -> None:
    assert all(off["grad_norm"] > 1e-3 for off in ranks(2)(counted_twice))
    assert max(off["count"] for off in ranks(2)(unsummed)) == 1


def whole() -> str:
    """Parameters of all layers on every rank, of which each would teach its own."""
    config, mesh = even("llama_tied"), Mesh(pp=2)
    spec = fnmodels.family_of(config).spec(config)
    optimizer = train.adamw(1e-2, spec=spec)
    state = train.init_state(P.init(config, 0, plan=P.plan(spec, rules_of(mesh, config), devices(mesh))), optimizer)
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer, mesh=mesh, accumulate=2)
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
    return all(torch.equal(leaf, whole[p][shards[p].here()]) for p, leaf in tree.flatten(local_tree(made)).items())


def test_stages_are_drawn_as_the_whole_is(ranks: Ranks) -> None:
    assert all(ranks(4)(drawn))

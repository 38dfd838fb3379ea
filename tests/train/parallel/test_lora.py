"""Adapters over a mesh: divided as their weights are, and trained as one process trains them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import params as P
from fnmodels import tree
from params import lora
from tests.support.cases import generic, generic_params
from tests.support.one_process import batch, config_of, error, loss_of, spec_of, worst
from tests.support.ranks_pool import Ranks, devices
from train import adamw, init_state, make_step
from train.dist.dtensor import local_tree
from train.optim.base import with_paths
from train.parallel import Mesh, Strategy
from train.parallel.placement import rules_of, shardings
from train.parallel.tensor import leaf_roles

HOW: dict[str, Any] = {"rank": 3, "alpha": 6.0, "seed": 4}


def noisy(path: str, leaf: Tensor) -> Tensor:
    """Adapters that are neither at their zero beginning."""
    return 0.3 * generic(path, leaf) if path.endswith((".a", ".b")) else leaf


def targets_of(name: str) -> tuple[str, ...]:
    """Every linear map of a layer."""
    leaves = tree.flatten(spec_of(name)).items()
    return tuple({path.rpartition(".")[2] for path, leaf in leaves if lora.is_linear(path, leaf)} - {"lm_head"})


def errors_of(name: str, mesh_text: str, strategy: dict[str, Any], folder: str) -> dict[str, float]:
    """{what: how far it is from one process}: after two steps, and of what is made of the adapters."""
    config, mesh = config_of(name), Mesh.parse(mesh_text)
    bare = generic_params(config)
    placements = P.plan(spec_of(name), rules_of(mesh, config), devices(mesh))
    parts = tree.map(lambda how, leaf: how.distribute(leaf[how.local_box()].clone()), placements, bare)
    fresh, placed = (lora.add(config, params, targets=targets_of(name), **HOW) for params in (bare, parts))
    shards = tree.flatten(shardings(placed))
    found: dict[str, float] = {}

    def compare(what: str, ours: Any, theirs: Any) -> None:
        whole = tree.flatten(theirs)
        for path, leaf in tree.flatten(local_tree(ours)).items():
            found[f"{what} {path}"] = error(leaf, whole[path][shards[path].local_box()])

    compare("drawn", placed, fresh)
    one = with_paths(noisy, fresh)
    if folder:
        many = lora.load_adapters(folder, config, parts)
    else:
        whole = tree.flatten(one)
        many = with_paths(
            lambda path, leaf: shards[path].distribute(whole[path][shards[path].local_box()].clone()), placed
        )
    compare("given", many, one)
    merged = tree.flatten(lora.merge(one))
    for path, leaf in tree.flatten(local_tree(lora.merge(many))).items():
        found[f"merged {path}"] = error(leaf, merged[path][tree.flatten(placements)[path].local_box()])
    optimizer = adamw(1e-2, eps=1e-3, spec=lora.spec(config, one))
    alone, together = init_state(one, optimizer), init_state(many, optimizer)
    step = make_step(loss_of(name), optimizer, clip=0.5)
    shared = make_step(loss_of(name), optimizer, clip=0.5, mesh=mesh, strategy=Strategy(**strategy))
    for _ in range(2):
        alone, alone_metrics = step(alone, batch())
        together, metrics = shared(together, batch())
        for metric in ("loss", "grad_norm"):
            found[metric] = error(metrics[metric], alone_metrics[metric])
    compare("stepped", together.params, alone.params)
    moved = [
        path for path, leaf in tree.flatten(alone.params).items() if not torch.equal(leaf, tree.flatten(one)[path])
    ]
    assert moved and all(path.endswith((".a", ".b")) for path in moved)
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("llama", "fsdp=2,tp=2", {"sequence": True}),
        ("gpt_oss", "dp=2,tp=2", {}),
        ("llama", "tp=4", {}),
        ("deepseek", "fsdp=2,tp=2", {}),
    ],
)
def test_adapters_are_those_of_one_process(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], tmp_path: Any
) -> None:
    folder = ""
    if name == "llama":
        config, folder = config_of(name), str(tmp_path)
        adapted = lora.add(config, generic_params(config), targets=targets_of(name), **HOW)
        lora.save_adapters(folder, config, with_paths(noisy, adapted))
    found = ranks(4)(errors_of, name, mesh, strategy, folder)
    assert worst(found, "drawn")[0] == worst(found, "given")[0] == 0
    assert worst(found)[0] < 1e-5, worst(found)
    assert len(found[0]) > 50


def unsummed() -> dict[str, float]:
    """Adapters whose gradients stay those of one process' heads."""
    with pytest.MonkeyPatch.context() as patch:
        plain = leaf_roles.Use("plain", False)
        patch.setattr(leaf_roles, "_adapted", lambda use, _: dict.fromkeys(("weight", "a", "b"), plain))
        return errors_of("gpt_oss", "dp=2,tp=2", {}, "")


def test_a_mistake_is_seen(ranks: Ranks) -> None:
    found = ranks(4)(unsummed)
    assert all(worst(found, f"stepped layers.0.attention.{leaf}")[0] > 1e-3 for leaf in ("q_proj.a", "o_proj.b"))


def refused() -> list[str]:
    mesh, config = Mesh(tp=2), config_of("gpt_oss")
    placements = P.plan(spec_of("gpt_oss"), rules_of(mesh, config), devices(mesh))
    params = lora.add(config, P.init(config, 0, plan=placements), targets=("lm_head",), **HOW)
    optimizer = adamw(1e-2, spec=lora.spec(config, params))
    with pytest.raises(ValueError) as error:
        make_step(loss_of("gpt_oss"), optimizer, mesh=mesh)(init_state(params, optimizer), batch())
    with pytest.raises(ValueError) as second:
        lora.save_adapters("nowhere", config, params)
    return [str(error.value), str(second.value)]


def test_what_cannot_be_divided_is_said(ranks: Ranks) -> None:
    for first, second in ranks(2)(refused):
        assert "lm_head has an adapter, and over 'tp' the vocabulary is sharded" in first
        assert "lm_head is a DTensor; only plain tensors can be saved" in second

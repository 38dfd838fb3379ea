"""A loss of a user's own, which the package has never seen: one process, fsdp x tp and pp give the same step.

So does a lambda around one of `train.losses`. Neither names a keyword for what a mesh does.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnmodels
import train
from fnmodels import tree
from tests.support.cases import generic_params
from tests.support.one_process import (
    CLIP,
    LENGTH,
    batch,
    batch_for,
    by_one_rank,
    config_of,
    error,
    loss_of,
    optimizer_of,
    placed,
    worst,
)
from tests.support.ranks_pool import Ranks
from train.comm.dtensor import local_tree
from train.engine import Engine
from train.parallel import Mesh, Strategy
from train.parallel.placement import shardings


def focal_loss(config: Any, gamma: float = 2.0, smoothing: float = 0.1) -> Any:
    """Focal (arXiv 1708.02002) and label-smoothed, with a head of its own over the hidden states."""

    def loss(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, masks, freqs_cis = fnmodels.prepare(
            config, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"]
        )
        x = fnmodels.hidden(params, inputs, masks, freqs_cis, config=config)
        logp = fnmodels.family_of(config).unembed(params, x, config=config).log_softmax(-1)
        valid = batch["labels"] != -100
        label = logp.gather(-1, batch["labels"].where(valid, 0)[..., None])[..., 0]
        smooth = (1 - smoothing) * label + smoothing * logp.mean(-1)
        losses = -((1 - label.exp()) ** gamma) * smooth
        return losses.where(valid, 0.0).sum(), valid.sum()

    return loss


def losses_of(name: str, layers: int | None) -> dict[str, Any]:
    config = config_of(name, layers)
    balance = train.Balance(sequence=0.3, z=0.1) if name == "deepseek" else None
    return {
        "own": focal_loss(config),
        "lambda": lambda params, batch: train.next_token_loss(
            params, batch, config=config, length=LENGTH, balance=balance, aux=balance is not None
        ),
    }


def alone(form: str, name: str, layers: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and metrics of a step in one process."""
    loss, optimizer = losses_of(name, layers)[form], optimizer_of(name, layers)
    state, metrics = train.make_step(loss, optimizer, clip=CLIP)(
        train.init_state(generic_params(config_of(name, layers)), optimizer), batch()
    )
    return tree.flatten(state.params), metrics


def stepped(form: str, name: str, text: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """{what: how far a step over the mesh is from that of one process}, and what an evaluation finds."""
    mesh, how, layers = Mesh.parse(text), Strategy(**strategy), 3 if "pp" in text else None
    loss, optimizer = losses_of(name, layers)[form], optimizer_of(name, layers)
    after, expected = by_one_rank(f"own-{form}-{name}-{layers}", lambda: alone(form, name, layers))
    params = placed(name, mesh, strategy=how, layers=layers)
    evaluated = train.make_eval_step(loss, mesh=mesh, strategy=how)(params, batch())
    step = train.make_step(loss, optimizer, clip=CLIP, mesh=mesh, strategy=how, **options)
    state, metrics = step(train.init_state(params, optimizer), batch())
    shards, held = tree.flatten(shardings(state.params)), tree.flatten(local_tree(state.params))
    found = {path: error(leaf, after[path][shards[path].local_box()]) for path, leaf in held.items()}
    found |= {key: error(metrics[key].double(), expected[key].double()) for key in ("loss", "count", "grad_norm")}
    found["evaluated"] = error(evaluated["loss"], expected["loss"])
    for key, value in expected.get("aux", {}).items():
        found[key] = error(metrics["aux"][key].double(), value.double())
    return found


@pytest.mark.parametrize("form", ["own", "lambda"])
@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "options"),
    [
        ("llama", "fsdp=2,tp=2", {"sequence": True}, {"remat": "full"}),
        ("llama", "pp=2", {}, {"accumulate": 4}),
        ("deepseek", "pp=2,fsdp=2", {"schedule": "InterleavedZeroBubble", "virtual": 1}, {"accumulate": 4}),
        ("length", "cp=2", {}, {}),
        ("gpt_oss", "ep=2,cp=2", {}, {}),
    ],
)
def test_a_loss_of_ones_own_is_that_of_one_process(
    ranks: Ranks, form: str, name: str, mesh: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    found = ranks(Mesh.parse(mesh).world)(stepped, form, name, mesh, strategy, options)
    assert worst(found)[0] < 1e-5, worst(found)
    assert {path for errors in found for path in errors} > set(
        tree.flatten(generic_params(config_of(name, 3 if "pp" in mesh else None)))
    )


def said(call: Any) -> str:
    try:
        call()
    except ValueError as refused:
        return str(refused)
    return "runs"


def refused_by_one_process(layers: int | None) -> str:
    config, optimizer = config_of("mtp", layers), optimizer_of("mtp", layers)
    plain = functools.partial(train.next_token_loss, config=config, length=LENGTH)
    state = train.init_state(generic_params(config), optimizer)
    return said(lambda: train.make_step(plain, optimizer)(state, batch_for("mtp")))


def unreached_of(text: str, strategy: dict[str, Any], options: dict[str, Any], engine_too: bool) -> dict[str, Any]:
    """What one process and this rank say to a loss without the MTP heads, and with them frozen, and of both losses."""
    mesh, how, layers = Mesh.parse(text), Strategy(**strategy), 4 if "schedule" in strategy else None
    config, optimizer = config_of("mtp", layers), optimizer_of("mtp", layers)
    plain = functools.partial(train.next_token_loss, config=config, length=LENGTH)
    expected = by_one_rank(f"unreached-{layers}", lambda: refused_by_one_process(layers))
    params = placed("mtp", mesh, strategy=how, layers=layers)
    state, before = train.init_state(params, optimizer), tree.map(torch.clone, local_tree(params))
    step = train.make_step(plain, optimizer, mesh=mesh, strategy=how, **options)
    found = [said(lambda: step(state, batch_for("mtp"))) for _ in range(2)]
    same = all(map(torch.equal, tree.leaves(before), tree.leaves(local_tree(state.params)))) and int(state.step) == 0

    frozen = train.partition({"mtp.**": None, "**": optimizer})
    step = train.make_step(plain, frozen, mesh=mesh, strategy=how, **options)
    found.append(said(lambda: step(train.init_state(params, frozen), batch_for("mtp"))))

    both = loss_of("mtp", layers)
    step, hooks = train.make_step(both, optimizer, mesh=mesh, strategy=how, **options), []
    with pytest.MonkeyPatch.context() as patch:
        register = Tensor.register_hook
        patch.setattr(Tensor, "register_hook", lambda x, hook: (hooks.append(1), register(x, hook))[1])
        state, _ = step(state, batch_for("mtp"))
        first = len(hooks)
        state, _ = step(state, batch_for("mtp"))
    found.append(said(lambda: None))

    if engine_too:
        engine = Engine(config, params, optimizer, mesh=mesh, strategy=how)
        parts = fnmodels.split(batch_for("mtp"), 2)
        engine.forward_backward(parts, plain)
        engine.forward_backward(parts, both)
        found.append(said(engine.optim_step))
        engine.forward_backward(parts, plain)
        found.append(said(engine.optim_step))
    return {"expected": expected, "found": found, "same": same, "hooks": [first > 0, len(hooks) - first]}


@pytest.mark.parametrize(
    ("mesh", "strategy", "options", "engine_too"),
    [
        ("dp=2", {}, {}, False),
        ("fsdp=2", {}, {"remat": "full"}, True),
        ("ep=2,tp=2", {"sequence": True}, {"remat": "every:2"}, False),
        ("cp=2", {}, {}, True),
        ("pp=2,fsdp=2", {"schedule": "InterleavedZeroBubble"}, {"accumulate": 2}, True),
    ],
)
def test_parameters_that_the_loss_does_not_reach_are_refused_as_in_one_process(
    ranks: Ranks, mesh: str, strategy: dict[str, Any], options: dict[str, Any], engine_too: bool
) -> None:
    """engine_too: by `Engine.optim_step` as well, whose sums are those of a step."""
    for found in ranks(Mesh.parse(mesh).world)(unreached_of, mesh, strategy, options, engine_too):
        refused = found["expected"]
        assert "does not reach" in refused
        assert found["found"] == [refused, refused, "runs", "runs", *(["runs", refused] if engine_too else [])]
        assert found["same"]
        assert found["hooks"] == [True, 0]


def reached_by_one_rank(text: str, which: int) -> str:
    """Of the MTP heads, whose layers are frozen, only the loss of the rank `which` reads the other leaves."""
    mesh, config = Mesh.parse(text), config_of("mtp")
    optimizer = train.partition({"mtp.*.block.**": None, "**": optimizer_of("mtp")})
    here = dist.get_rank() == which

    def loss(params: Any, part: Any) -> tuple[Tensor, Tensor]:
        total, count = train.next_token_loss(params, part, config=config, length=LENGTH)
        heads = [{name: leaf for name, leaf in head.items() if name != "block"} for head in params["mtp"]]
        return total + sum(leaf.sum() for leaf in tree.leaves(heads)) if here else total, count

    step = train.make_step(loss, optimizer, mesh=mesh)
    return said(lambda: step(train.init_state(placed("mtp", mesh), optimizer), batch_for("mtp")))


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_parameters_that_the_loss_of_one_rank_reaches_are_reached(ranks: Ranks, mesh: str) -> None:
    assert ranks(2)(reached_by_one_rank, mesh, 1) == ["runs"] * 2
    refused = ranks(2)(reached_by_one_rank, mesh, 2)
    assert "does not reach" in refused[0]
    assert refused[0] == refused[1]

"""Losses and functions of tokens without gradients, over meshes: whole in every process, and those of one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from tests.support import encoder_losses
from tests.support.cases import generic_params
from tests.support.one_process import LENGTH, batch, config_of, loss_of, placed
from tests.support.ranks_pool import Ranks, devices
from train import make_eval_step, make_forward_only, token_logprobs
from train.comm.dtensor import local_tree
from train.parallel import Mesh, Strategy
from train.parallel.batch_shards import own_positions
from train.parallel.eval_steps import trained_in
from train.parallel.fsdp import gather_layers, sharded_params
from train.parallel.placement import place, shardings


def lists() -> list[dict[str, Tensor]]:
    """Microbatches with other rows and lengths."""
    whole = batch()
    return [whole, {name: tensor[4:, :10] for name, tensor in whole.items()}]


def ran(name: str, text: str, strategy: dict[str, Any]) -> dict[str, float]:
    """{what: how far it is from one process}."""
    config, mesh, how = config_of(name), Mesh.parse(text), Strategy(**strategy)
    params, whole = placed(name, mesh, strategy=how), generic_params(config)
    routed = "deepseek" in name
    loss = functools.partial(loss_of(name), aux=routed)
    logprobs = functools.partial(token_logprobs, config=config, kernel="math", length=LENGTH)
    given = lists()
    evaluated = make_eval_step(loss, mesh=mesh, strategy=how)(params, given)
    expected = make_eval_step(loss)(whole, given)
    found = {key: abs(float(evaluated[key] / expected[key]) - 1) for key in ("loss", "total", "count")}
    if routed:
        found["counts"] = float((evaluated["aux"]["counts"] - expected["aux"]["counts"]).abs().max())
    run = make_forward_only(logprobs, mesh=mesh, strategy=how)
    for part, ours, theirs in zip(given, run(params, given), make_forward_only(logprobs)(whole, given), strict=True):
        for key, one, other in zip(("logp", "entropy", "valid"), ours, theirs, strict=True):
            assert one.shape == other.shape == part["tokens"].shape and not one.requires_grad
            far = (one.double() - other.double()).abs().max() / other.double().abs().max()
            found[key] = max(float(far), found.get(key, 0.0))
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("llama", "fsdp=2,cp=2", {}),
        ("gpt_oss", "cp=2,tp=2", {"sequence": True}),  # which do not divide rows of 10
        ("deepseek", "dp=2,ep=2", {}),
        ("deepseek", "pp=2,fsdp=2", {"schedule": "GPipe"}),  # the first stage has no experts
    ],
)
def test_they_are_those_of_one_process(ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any]) -> None:
    for found in ranks(4)(ran, name, mesh, strategy):
        assert not {what: far for what, far in found.items() if not far < 1e-5}


def velocity(params: Any, batch: dict[str, Tensor], *, config: Any) -> Tensor:
    """Flux's output [B, I, C] for latents as they are."""
    own = {name: batch[name] for name in ("positions", "segment_ids", "text_segment_ids")}
    conditions = {name: batch[name] for name in config.conditions}
    prepared = fnmodels.diffusion.prepare_denoising(config, batch["latents"], batch["text"], conditions, **own)
    found: Tensor = fnmodels.forward(params, *prepared, config=config)
    return found


def flows(text: str) -> float:
    config, _, halves = encoder_losses.SETTINGS["flow"]()
    whole, mesh = encoder_losses.weights_of(config), Mesh.parse(text)
    batch = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    held, function = encoder_losses.placed(config, mesh, Strategy()), functools.partial(velocity, config=config)
    ours, theirs = make_forward_only(function, mesh=mesh)(held, batch), make_forward_only(function)(whole, batch)
    assert ours.shape == theirs.shape == (*batch["latents"].shape[:2], config.out_channels)
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2", "pp=2"])
def test_batches_of_latents_are_those_of_one_process(ranks: Ranks, mesh: str) -> None:
    assert max(ranks(2)(flows, mesh)) < 1e-5


def narrow() -> bool:
    """A router's bias, which no gradient teaches, is sent in its own dtype, in evaluation and over stages too."""
    config, mesh = config_of("deepseek"), Mesh(fsdp=2)
    how = Strategy(gather_dtype=torch.bfloat16)
    params = placed("deepseek", mesh)
    trains = place(mesh, params, config, how, functools.partial(trained_in, config)).trains
    seen: dict[str, torch.dtype] = {}

    def block(layer: Any) -> None:
        seen.update((path, leaf.dtype) for path, leaf in tree.flatten(layer).items())

    given = sharded_params(shardings(params), dtype=how.gather_dtype, trains=trains)
    gather_layers(block)(given(local_tree(params))["layers"][1])
    assert seen.pop("mlp.selection_bias") == torch.float32 and set(seen.values()) == {torch.bfloat16}
    return all(on != path.endswith("selection_bias") for path, on in tree.flatten(trains).items())


def refused() -> list[str]:
    """What every process says alike."""
    name = "gpt_oss"
    said = []
    params = placed(name, Mesh(dp=2))
    for make, given in (
        (lambda: make_forward_only(loss_of(name), mesh=Mesh(dp=2)), batch()),
        (lambda: make_forward_only(loss_of(name), mesh=Mesh(dp=2)), {n: t[:3] for n, t in batch().items()}),
        (lambda: make_eval_step(loss_of(name), mesh=Mesh(fsdp=2)), batch()),
        (lambda: make_eval_step(loss_of(name), mesh=Mesh(dp=2), compile="whole"), batch()),
        (lambda: make_eval_step(loss_of(name), strategy=Strategy()), batch()),
    ):
        with pytest.raises(ValueError) as error:
            make()(params, given)
        said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        own_positions({"tokens": torch.zeros(2, 3)}, devices(Mesh(tp=2)), Strategy(sequence=True))
    return [*said, str(error.value)]


def test_unsupported_evaluations_raise_on_all_ranks(ranks: Ranks) -> None:
    ours, theirs = ranks(2)(refused)
    assert ours == theirs
    words = (
        "losses are for make_eval_step",
        "takes them in 2 equal parts",
        "lie on dp=2",
        "must be",
        "needs a mesh",
        "no segment_ids",
    )
    for sentence, part in zip(ours, words, strict=True):
        assert part in sentence, sentence
    assert all(ranks(2)(narrow))

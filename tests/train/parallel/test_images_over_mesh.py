"""Images in packed rows over a mesh: log-probabilities and gradients are those of one process."""

import dataclasses
import warnings
from typing import Any

import pytest
from torch import Tensor

import fnmodels
import train
from fnmodels import tree
from tests.support.cases import generic_params
from tests.support.image_texts import ImageCase
from tests.support.ranks_pool import Ranks
from tests.train.data.test_image_rows import _rows
from tests.train.generation.test_images import CASES
from tests.train.parallel.test_engine import placed_params
from train.engine import Engine
from train.losses.output_loss import logprob_loss
from train.parallel import Mesh, Strategy


def even(name: str) -> ImageCase:
    """A case whose vocabulary tp divides."""
    case = next(one for one in CASES if one.name == name)
    text = dataclasses.replace(case.config.text, vocab_size=64)
    return dataclasses.replace(case, config=dataclasses.replace(case.config, text=text))


def weights(case: ImageCase) -> Any:
    """Of the whole model, in fp64."""
    return tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, generic_params(case.config))


def _loss(case: ImageCase) -> Any:
    def judged(logp: Tensor, entropy: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return -(logp * (batch["tokens"] % 5 - 2.0)).sum(), logp.new_ones(())

    return logprob_loss(judged, config=case.config)


def differences(name: str, text: str, strategy: dict[str, Any]) -> dict[str, float]:
    """{what: how far from an engine in one process}, relative to the largest number of each; and what pp says."""
    case = even(name)
    params, config, mesh = weights(case), case.config.text, Mesh.parse(text)
    _, batches, _, _ = _rows(case, params, 60)
    optimizer = train.sgd(0.1, spec=fnmodels.family_of(config).spec(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = placed_params(config, mesh, params["text"])
        ours = Engine(config, given, optimizer, mesh=mesh, strategy=Strategy(**strategy))
    theirs = Engine(config, params["text"], optimizer)
    added, expected = (one.forward_backward(batches, _loss(case))["outputs"] for one in (ours, theirs))
    found = {
        f"logp {number}": float((one["logp"] - other["logp"]).abs().max())
        for number, (one, other) in enumerate(zip(added, expected, strict=True))
    }
    wanted = tree.flatten(theirs.gradients())
    for path, grad in tree.flatten(ours.gradients(full=True)).items():
        found[path] = float((grad - wanted[path]).abs().max() / wanted[path].abs().max().clamp(min=1e-30))
    return found


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("qwen2_5_vl", {}), ("qwen2_5_vl", {"sequence": True}), ("qwen3_vl", {}), ("gemma3", {"sequence": True})],
    ids=str,
)
def test_tensor_parallelism_reads_images(name: str, strategy: dict[str, Any], ranks: Ranks) -> None:
    """Positions of several axes, features of several layers, and masks that images set."""
    for found in ranks(2)(differences, name, "tp=2", strategy):
        assert len(found) > 4 and max(found.values()) < 1e-9, found


def refusal(name: str, text: str, strategy: dict[str, Any]) -> str:
    """What an engine says."""
    case = even(name)
    params, config, mesh = weights(case), case.config.text, Mesh.parse(text)
    _, batches, _, _ = _rows(case, params, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given, how = placed_params(config, mesh, params["text"]), Strategy(**strategy)
        engine = Engine(config, given, train.sgd(0.1), mesh=mesh, strategy=how)
    try:
        engine.forward_backward(batches, _loss(case))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "text", "strategy", "words"),
    [
        ("qwen2_5_vl", "pp=2", {}, "The batch has image_features, which the stages of a pipeline do not take"),
        ("qwen3_vl", "tp=2", {"sequence": True}, "The images of qwen3_vl are edits of layers at all positions"),
    ],
)
def test_other_meshes_refuse_images(name: str, text: str, strategy: dict[str, Any], words: str, ranks: Ranks) -> None:
    for said in ranks(2)(refusal, name, text, strategy):
        assert said.startswith(words)

"""Losses of documents over a mesh: pairs of all ranks together, and what a mesh cannot do is refused on all ranks."""

from typing import Any

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import tree
from tests.support.cases import generic_params
from tests.support.copies import may_differ
from tests.support.encoder_losses import errors_over, flow_setting, image_setting, pair_setting, setting, shared_setting
from tests.support.one_process import worst
from tests.support.ranks_pool import Ranks, devices
from tests.train.parallel.test_agreement import kinds
from train.parallel import Mesh, Strategy, compose
from train.parallel.compose import all_documents
from train.parallel.placement import rules_of


@pytest.mark.parametrize(
    ("setting", "over", "words"),
    [
        (pair_setting, "cp=2", "A t5 has two stacks of layers with rows of different lengths"),
        (image_setting, "cp=2", "A clip has two stacks of layers"),
        (image_setting, "pp=2", r"A clip has towers \(text and vision\) that run beside each other.*leave pp out"),
        (shared_setting, "cp=2", "The layers of a mpnet read tensors of full rows beside the residual stream"),
        (flow_setting, "cp=2", "The layers of a FluxTransformer2DModel read tensors of full rows"),
    ],
)
def test_meshes_that_do_not_divide_a_model(setting: Any, over: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose.check_family(setting()[0], Mesh.parse(over), sequence=False)
    compose.check_family(setting()[0], Mesh.parse("fsdp=2,tp=2"), sequence=False)
    with pytest.raises(ValueError, match="nor sequence=True"):
        compose.check_family(setting()[0], Mesh.parse("fsdp=2"), sequence=True)


def stepped_without_others() -> dict[str, float]:
    """A planted error: the candidates of other ranks get no gradient."""
    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(compose, "all_documents", lambda groups, x: all_documents(groups, x).detach())
        return errors_over("none", "fsdp=2")


def test_candidates_of_other_ranks_have_gradients(ranks: Ranks) -> None:
    assert worst(ranks(2)(stepped_without_others))[0] > 1e-3


def refused(over: str, labels: tuple[int, ...] | None = None) -> str:
    """The error of a step, on every rank."""
    config, loss, halves = setting("none")
    batch = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    if labels is not None:
        batch["labels"] = batch["labels"].where(batch["labels"] != labels[0], labels[1])
    optimizer, mesh, params = train.adamw(1e-2), Mesh.parse(over), generic_params(config)
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    held = tree.map(lambda how, leaf: how.distribute(leaf[how.local_box()].clone()), plan, params)
    try:
        train.make_step(loss, optimizer, mesh=mesh)(train.init_state(held, optimizer), batch)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "no error"


def test_all_ranks_refuse_alike(ranks: Ranks) -> None:
    """The pairs of one rank have two positives; documents of which a rank has a part."""
    assert set(ranks(2)(refused, "fsdp=2", (2, 0))) == {
        "The query of pair 0 has 2 positives here; it needs exactly one, in the same microbatch."
    }
    assert all("leave cp out" in message for message in ranks(2)(refused, "cp=2"))


WITH_CLASSES = ("classification", "none", "labels", "numbers", "tokens", "answers", "pictures")
LOSSES = {name: kinds()[name] for name in WITH_CLASSES}


def in_sequence(name: str) -> tuple[str, bool]:
    """(what a loss says where ranks of tp have some positions each, whether it takes the step with full rows)."""
    config, loss, batch = LOSSES[name]()
    mesh, optimizer = Mesh(tp=2), train.sgd(0.1)
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    whole = generic_params(config)

    def step(sequence: bool) -> Any:
        held = tree.map(lambda how, leaf: how.distribute(leaf[how.local_box()].clone()), plan, whole)
        taken = train.make_step(loss, optimizer, mesh=mesh, strategy=Strategy(sequence=sequence))
        return taken(train.init_state(held, optimizer), batch)[1]["finite"]

    with pytest.raises(NotImplementedError) as refused:
        step(True)
    return str(refused.value), bool(step(False))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_documents_and_classes_say_that_they_read_full_rows(ranks: Ranks, name: str) -> None:
    for words, runs in ranks(2)(in_sequence, name):
        assert "take Strategy(sequence=False)" in words and runs

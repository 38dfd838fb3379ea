"""D1 of encoders, towers, texts with images, pairs of stacks, diffusion: ways to share the work, borders of stages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from fnmodels import tree
from tests.support.copies import may_differ
from tests.support.encoder_losses import SETTINGS, TWO_TOWERS, errors_over, one_process, spec_of
from tests.support.one_process import worst
from tests.support.ranks_pool import Ranks
from train.parallel import Mesh
from train.parallel.pipeline import gradients, staged_loss
from train.parallel.tensor import api

LIMIT = 1e-5
# {mesh: the step's options}
ALONE: dict[str, dict[str, Any]] = {"fsdp=2": {"remat": "full"}, "tp=2": {}, "pp=2": {"accumulate": 2}}


def checked(found: list[dict[str, float]], name: str) -> None:
    """Every leaf is compared, in one stage at least, by its gradient and after a step."""
    spec = tree.flatten(spec_of(name))
    every = {f"gradient of {path}" for path, leaf in spec.items() if leaf.trainable}
    assert {what for errors in found for what in errors} >= every | {f"{path} after a step" for path in spec}
    assert worst(found)[0] < LIMIT, worst(found)


# Shards know no family: each sixth one has fsdp=2. Pipelines refuse two towers, see test_document_losses.
EACH = [
    (name, mesh)
    for index, name in enumerate(SETTINGS)
    for mesh in ALONE
    if (mesh != "fsdp=2" or index % 6 == 0) and (mesh != "pp=2" or name not in TWO_TOWERS)
]


@pytest.mark.parametrize(("name", "mesh"), EACH)
def test_a_step_is_that_of_one_process(ranks: Ranks, name: str, mesh: str) -> None:
    whole = name == "none" and mesh == "pp=2"  # other pairs of a microbatch are negatives: one microbatch
    strategy, options = ({"schedule": "GPipe"}, {"accumulate": 1}) if whole else ({}, ALONE[mesh])
    checked(ranks(Mesh.parse(mesh).world)(step_of, name, mesh, strategy, options), name)


def step_of(name: str, mesh: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    return errors_over(name, mesh, strategy, **options)


# (setting, mesh, strategy). The border is inside of the encoder, at its end, inside of the decoder; a table of biases
# is on all stages; the last stage has single layers alone; one rank has the first and the last stage.
BORDERS: list[tuple[str, str, dict[str, Any]]] = [
    ("pairs", "pp=2", {"split": (1, 3)}),
    ("pairs", "pp=2", {"split": (3, 1)}),
    ("pairs", "pp=4", {"schedule": "GPipe"}),
    ("pairs", "pp=2", {"schedule": "ZBVZeroBubble"}),
    ("sound", "pp=2", {"split": (2, 3)}),
    ("sound", "pp=2", {"schedule": "InterleavedZeroBubble"}),
    ("flow", "pp=2", {"split": (3, 2)}),
    ("flow", "pp=2", {"schedule": "ZBVZeroBubble"}),
    ("mpnet", "pp=2", {"schedule": "Interleaved1F1B", "virtual": 1}),
    ("pairs", "pp=2,fsdp=2", {"schedule": "GPipe"}),
    ("pairs", "pp=2,tp=2", {}),
    ("flow", "pp=2,tp=2", {}),
    ("mpnet", "pp=2,fsdp=2", {"schedule": "GPipe"}),
    ("pairs", "fsdp=2,tp=2", {}),
    ("none", "dp=2,fsdp=2", {}),
    ("none", "dp=2,tp=2", {}),
    ("qwen3_vl", "fsdp=2,tp=2", {}),
    ("gte", "tp=2", {"sequence": True}),  # with dropout inside of MLPs
]


@pytest.mark.parametrize(("name", "mesh", "strategy"), BORDERS)
def test_borders_and_several_dimensions(ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any]) -> None:
    sizes = Mesh.parse(mesh)
    options = {"accumulate": 1 if sizes.fsdp > 1 or sizes.pp == 1 else 2}
    checked(ranks(sizes.world)(step_of, name, mesh, strategy, options), name)


def no_gradient(memory: Tensor) -> Tensor:
    return memory.detach()


def of_another_row(memory: Tensor) -> Tensor:
    return memory.roll(1, 1)


# {what is wrong with what a decoder's stages read of the encoder: change of it}
MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"no gradient": no_gradient, "other tokens": of_another_row}


def errors_with(what: str) -> dict[str, float]:
    one_process("pairs")  # before it is spoiled
    right = staged_loss._through

    def through(stack: Any, numbers: range, given: Any, part: Any, earlier: Any) -> Any:
        changed = {name: MISTAKES[what](x) if name == "memory" else x for name, x in earlier.items()}
        return right(stack, numbers, given, part, changed)

    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(staged_loss, "_through", through)
        return errors_over("pairs", "pp=2", {"split": (3, 1)}, accumulate=2)


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_of_the_memory_are_seen(ranks: Ranks, what: str) -> None:
    assert worst(ranks(2)(errors_with, what), "gradient")[0] > 100 * LIMIT


def errors_without_sums(name: str) -> dict[str, float]:
    """A planted error: each stage keeps its own gradient of a parameter that several hold."""
    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(gradients, "_sum_copies", lambda *_: None)
        return errors_over(name, "pp=2", accumulate=2)


@pytest.mark.parametrize(("name", "leaf"), [("mpnet", "relative_bias"), ("flow", "time.up_proj")])
def test_gradients_that_stages_do_not_sum_are_seen(ranks: Ranks, name: str, leaf: str) -> None:
    assert worst(ranks(2)(errors_without_sums, name), f"gradient of {leaf}")[0] > 100 * LIMIT


def errors_with_roles_of_the_tower() -> dict[str, float]:
    """A planted error: the text's leaves have the roles of the tower's, which has a key head for each rank."""
    right = api.uses_of

    def uses_of(*given: Any) -> Any:
        found = right(*given)
        for uses in found.values():
            uses |= {path: dataclasses.replace(use, shared=False, rows=None) for path, use in uses.items()}
        return found

    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(api, "uses_of", uses_of)
        return errors_over("qwen2_5_vl", "tp=2")


def test_a_wrong_role_of_a_text_with_images_is_seen(ranks: Ranks) -> None:
    found = ranks(2)(errors_with_roles_of_the_tower)
    assert worst(found, "gradient of text.layers.0.attention.k_proj")[0] > 100 * LIMIT

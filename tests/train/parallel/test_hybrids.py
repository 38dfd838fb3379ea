"""D1 of the families with recurrent layers, convolutions, chosen or borrowed keys: each way to share the work, alone.

Pairs of ways are in `test_compositions` too; methods of context parallelism, and what they hand on, in `test_context`.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.models.common.family import parsed
from tests.support.copies import may_differ
from tests.support.one_process import HYBRIDS, SEQUENTIAL, config_of, errors_of, one_process, spec_of, worst
from tests.support.ranks_pool import Ranks
from train.parallel import Mesh
from train.parallel.pipeline import staged_loss

LIMIT = 1e-5
FAMILIES = (*HYBRIDS, *SEQUENTIAL)
# {mesh: the step's options}
ALONE: dict[str, dict[str, Any]] = {
    "fsdp=2": {"remat": "full"},
    "tp=2": {},
    "cp=2": {},
    "cp=4": {"remat": "full"},
    "pp=2": {"accumulate": 2},
    "ep=2": {},
}


def kinds_of(name: str) -> tuple[str, ...]:
    return fnmodels.family_of(config_of(name)).kinds(config_of(name))


def has_experts(name: str) -> bool:
    return any(kind.routed for kind in parsed(kinds_of(name)))


def checked(found: list[dict[str, float]], name: str) -> None:
    """Every leaf is compared, in one stage at least, by its gradient and after a step."""
    spec = tree.flatten(spec_of(name))
    every = {f"gradient of {path}" for path, leaf in spec.items() if leaf.trainable}
    assert {what for errors in found for what in errors} >= every | {f"{path} after a step" for path in spec}
    assert worst(found)[0] < LIMIT, worst(found)


@pytest.mark.parametrize("mesh", ALONE)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_that_of_one_process(ranks: Ranks, name: str, mesh: str) -> None:
    if mesh == "ep=2" and not has_experts(name):
        pytest.skip("it has no experts")
    strategy = {"schedule": "1F1B"} if "pp" in mesh else {}
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, ALONE[mesh]), name)


# (model, mesh, strategy, microbatches): choices, and keys and values, cross one border, or pass through a stage
BORDERS = [
    ("glm_moe_dsa", "pp=4", {"schedule": "1F1B"}, 4),
    ("glm_moe_dsa", "pp=2", {"schedule": "ZBVZeroBubble"}, 4),
    ("glm_moe_dsa", "pp=2,cp=2", {"split": (1, 3)}, 2),
    ("glm_moe_dsa", "pp=2,tp=2", {"split": (1, 3), "sequence": True}, 2),
    ("gemma4_e", "pp=4", {"schedule": "1F1B"}, 4),
    ("gemma4_e", "pp=2", {"schedule": "ZBVZeroBubble"}, 4),
    ("gemma4_e", "pp=2", {"schedule": "InterleavedZeroBubble"}, 4),
    ("gemma4_e", "pp=2,cp=2", {}, 2),
    ("gemma4_e", "pp=2,tp=2", {"sequence": True}, 2),
    ("gemma4_e", "pp=2,fsdp=2", {"schedule": "InterleavedZeroBubble"}, 4),
    ("gemma4_moe", "pp=2,ep=2", {}, 2),
]


@pytest.mark.parametrize(("name", "mesh", "strategy", "parts"), BORDERS)
def test_what_later_stages_read_crosses_borders(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], parts: int
) -> None:
    assert any(kind.source or kind.indexed for kind in parsed(kinds_of(name))) or name == "gemma4_moe"
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, {"accumulate": parts}), name)


# residual streams of several rows, keys of windows of tokens, and experts by token id
STREAMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fsdp=2", {}, {"remat": "full"}),
    ("tp=2", {}, {}),
    ("tp=2", {"sequence": True}, {"remat": "full"}),
    ("cp=2", {}, {}),
    ("ep=2", {}, {}),
    ("pp=2", {"schedule": "1F1B"}, {"accumulate": 2}),
    ("pp=2", {"schedule": "ZBVZeroBubble"}, {"accumulate": 4}),
    ("pp=2,tp=2", {"sequence": True}, {"accumulate": 2}),
    ("cp=2,tp=2", {}, {}),
]


# tables of n-grams that the embedding reads, and what half of a layer leaves for the other
NGRAMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fsdp=2", {}, {"remat": "full"}),
    ("tp=2", {"sequence": True}, {}),
    ("cp=2", {}, {}),
    ("ep=2", {}, {}),
    ("pp=2", {"schedule": "1F1B"}, {"accumulate": 2}),
    ("pp=2,tp=2", {"sequence": True}, {"accumulate": 2}),
]


@pytest.mark.parametrize(("mesh", "strategy", "options"), NGRAMS)
def test_ngrams_and_a_summand_of_the_layer_before(
    ranks: Ranks, mesh: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    name = "longcat_flash_ngram"
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, options), name)


@pytest.mark.parametrize(("mesh", "strategy", "options"), STREAMS)
def test_streams_and_keys_of_windows(
    ranks: Ranks, mesh: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    checked(ranks(Mesh.parse(mesh).world)(errors_of, "deepseek_v4", mesh, strategy, options), "deepseek_v4")


def another_choice(carried: dict[str, Any]) -> dict[str, Any]:
    """Without the latest key."""
    chosen = carried["chosen"]
    return carried | {"chosen": chosen.where(chosen != chosen.amax(-1, keepdim=True), -1)}


def no_gradient(carried: dict[str, Any]) -> dict[str, Any]:
    return tree.map(Tensor.detach, carried)


def of_another_kind(carried: dict[str, Any]) -> dict[str, Any]:
    """Keys as values."""
    return carried | {"kv": {kind: {"k": kv["v"], "v": kv["k"]} for kind, kv in carried["kv"].items()}}


def first_layers_inputs(beside: Tensor) -> Tensor:
    return beside.flip(2)


# {what is wrong: (model, keyword of run_layers, change of it in the second stage)}
MISTAKES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "another choice": ("glm_moe_dsa", "carried", another_choice),
    "keys and values without a gradient": ("gemma4_e", "carried", no_gradient),
    "keys as values": ("gemma4_e", "carried", of_another_kind),
    "inputs of other layers": ("gemma4_e", "layer_inputs", first_layers_inputs),
    "inputs of layers without a gradient": ("gemma4_e", "layer_inputs", Tensor.detach),
}


def errors_with(what: str) -> dict[str, float]:
    name, keyword, change = MISTAKES[what]
    one_process(name)  # before it is spoiled
    right = fnmodels.run_layers

    def run(params: Any, x: Tensor, masks: Any, freqs: Any, lo: int, hi: int, **how: Any) -> Any:
        how |= {keyword: change(how[keyword])} if lo else {}
        return right(params, x, masks, freqs, lo, hi, **how)

    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(staged_loss.fnmodels, "run_layers", run)
        split = {"split": (1, 3) if name == "glm_moe_dsa" else (2, 2)}
        return errors_of(name, "pp=2", split, {"accumulate": 2})


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_at_borders_are_seen(ranks: Ranks, what: str) -> None:
    assert worst(ranks(2)(errors_with, what), "gradient")[0] > 100 * LIMIT

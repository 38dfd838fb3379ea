"""What layers leave for later ones, when `run_layers` runs a stack in parts: choices of keys, keys and values."""

import functools
from typing import Any

import pytest
import torch

import fnmodels
from fnmodels import tree
from fnmodels.apply import layer_inputs_of
from fnmodels.models.common.carried import borrowed, joins, takes_choice
from fnmodels.models.common.family import LayerKind, parsed
from tests.support.cases import (
    Case,
    batch_of,
    cases,
    generic_params,
    gradients,
    richest,
    segments,
    shared_of,
    structures,
    trainable,
)

MIXED = segments((-3, 5, 11), (19,), (12, 3, -4), (-19,))


def kinds_of(case: Case) -> tuple[str, ...]:
    return fnmodels.family_of(case.config).kinds(case.config)


def is_carried(kind: str) -> bool:
    """Whether layers of this kind read what earlier ones leave."""
    return "shared" in kind or LayerKind.parse(kind).source is not None or LayerKind.parse(kind).joins


CARRYING = [c for c in cases() if any(map(is_carried, kinds_of(c)))]
STRUCTURES = {c.name: c for c in (*structures(), *richest(lambda c: c.config.model_type)) if c in CARRYING}.values()
every_case = pytest.mark.parametrize("case", list(STRUCTURES), ids=str)


def parts(case: Case, params: Any, bounds: tuple[int, ...]) -> tuple[torch.Tensor, list[Any]]:
    """(hidden states, what is carried over each border) of a stack that is run in parts."""
    inputs, masks, freqs_cis = batch_of(case.config, MIXED).prepared()
    x = fnmodels.family_of(case.config).embed(params, inputs, config=case.config)
    beside = layer_inputs_of(params, inputs, x, config=case.config)
    run = functools.partial(fnmodels.run_layers, config=case.config, kernel="math", valid=inputs["valid"])
    run = functools.partial(run, **shared_of(case.config, params, inputs))
    carried: Any = {}
    found = []
    for lo, hi in zip((0, *bounds), (*bounds, len(kinds_of(case))), strict=True):
        tail = None if beside is None else beside[:, :, lo:]
        x, carried = run(params, x, masks, freqs_cis, lo, hi, layer_inputs=tail, carried=carried)
        found.append(carried)
    return x, found


def test_there_are_cases() -> None:
    gemma, longcat = {"gemma4_text", "gemma3n_text", "gemma3n"}, {"longcat_flash", "longcat_flash_ngram"}
    assert {case.config.model_type for case in CARRYING} == {
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_vl_text",
        "glm5_next_text",
        "glm5_next",
        "rwkv7",
        "zamba2",
        "mistral_large4",
        "mistral_large4_text",
        "inkling2",
        "inkling2_text",
        "inkling2_loop_text",
        "inkling2_loop",
        "kimi_k3",
        "deepseek_v41",
        "deepseek_v41_text",
        "ouro",
    } | gemma | longcat


@every_case
def test_a_stack_in_parts_is_the_whole_stack(case: Case) -> None:
    """Its bits, cut anywhere, and its gradients, cut everywhere; nothing is carried but what a later layer reads."""
    leaves, layers = trainable(generic_params(case.config)), len(kinds_of(case))
    prepared = batch_of(case.config, MIXED).prepared()
    want = fnmodels.hidden(leaves, *prepared, config=case.config, kernel="math")
    wanted = tree.flatten(gradients(want.square().sum(), leaves))
    for bounds in (*((cut,) for cut in range(1, layers)), tuple(range(1, layers))):
        x, carried = parts(case, leaves, bounds)
        assert torch.equal(x, want) and carried[-1] == {}
        for border, left in zip(bounds, carried, strict=False):
            assert ("chosen" in left) == takes_choice(kinds_of(case), border)
            assert [*left.get("kv", {})] == borrowed(kinds_of(case), border)
            assert ("left" in left) == joins(kinds_of(case), border)
    found = tree.flatten(gradients(x.square().sum(), leaves))  # of all parts
    assert all(torch.allclose(found[path], grad, rtol=1e-4, atol=1e-6) for path, grad in wanted.items())


@every_case
def test_what_is_not_carried_is_missed(case: Case) -> None:
    inputs, masks, freqs_cis = batch_of(case.config, MIXED).prepared()
    params, kinds = generic_params(case.config), kinds_of(case)
    x = fnmodels.family_of(case.config).embed(params, inputs, config=case.config)
    beside = layer_inputs_of(params, inputs, x, config=case.config)
    cut = next(i for i, kind in enumerate(kinds) if is_carried(kind))
    run = functools.partial(fnmodels.run_layers, params, x, masks, freqs_cis, config=case.config, layer_inputs=beside)
    run = functools.partial(run, **shared_of(case.config, params, inputs))
    with pytest.raises(
        ValueError, match=r"takes the choice of keys of an earlier one|reads the keys and|reads what layer"
    ):
        run(cut, len(kinds))
    if any(kind.source for kind in parsed(kinds)):
        source = LayerKind.parse(kinds[cut]).source
        lends = max(i for i in range(cut) if kinds[i] == source)
        words = rf"Layers from {cut} on borrow the keys and values .* {source!r}, which has not run"
        with pytest.raises(ValueError, match=words):
            run(lends + 1, cut, carried={})
    if beside is not None:
        with pytest.raises(ValueError, match=r"dimension 2 has the model's .* layers, or those from layer 0"):
            run(0, 1, layer_inputs=beside[:, :, :1])

"""A kernel computes the given mask or refuses it (B8); a row's bits do not depend on other rows (R3)."""

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.inputs.mask import MaskLike, attention_part, with_attention
from fnmodels.models.common.family import LayerKind, field_of
from fnmodels.ops.attention.select import attention
from tests.fnmodels.inputs.test_mask import POSITIONS, RULES, SEGMENTS, SPANS, slow
from tests.support.cases import (
    Batch,
    Case,
    attending,
    attending_layers,
    attention_of,
    batch_of,
    generic_params,
    layer_structures,
    off,
    representatives,
    segments,
    supports,
    tokens_of,
    with_kernels,
)

STRUCTURES = attending(layer_structures())
every_structure = pytest.mark.parametrize("case", STRUCTURES, ids=str)
ROWS = slice(0, 2)  # their documents are in order, so that there is a layout


def logits_under(case: Case, mask: MaskLike, kernel: str) -> Tensor:
    """Logits of two rows with one mask replacing those of the family; 0 on padding."""
    batch = Batch(case.config, tokens_of(case.config, 2, 10), POSITIONS[ROWS], SEGMENTS[ROWS], length=24)
    inputs, masks, freqs_cis = batch.prepared()
    layout = fnmodels.layout(masks) if kernel in ("auto", "blocks") else None
    masks = {
        kind: made if isinstance(made, fnmodels.inputs.Segments) else with_attention(made, mask)
        for kind, made in masks.items()
    }
    logits = fnmodels.forward(
        generic_params(case.config), inputs, masks, freqs_cis, config=case.config, kernel=kernel, layout=layout
    )
    return logits.masked_fill(~batch.valid[..., None], 0)


@functools.cache
def dense_mask(rule: str) -> Tensor:
    """One of RULES evaluated pair by pair."""
    return slow(RULES[rule][1])[ROWS]


FIRST = {attention_of(case): case for case in reversed(STRUCTURES)}.values()  # with each form of attention


def rules_of(case: Case) -> list[str]:
    """All for the first case with each form of attention, every third of them in turn for the others."""
    others = case in STRUCTURES and case not in FIRST
    return [*RULES][STRUCTURES.index(case) % 3 :: 3] if others else [*RULES]


@with_kernels(STRUCTURES, ("math", "sdpa", "blocks", "auto"))
def test_every_rule_through_every_kernel(case: Case, kernel: str) -> None:
    """B8: equal to a dense mask evaluated pair by pair, also for rules that the family does not use itself."""
    for name in rules_of(case):
        rule = RULES[name][0]
        mask = fnmodels.inputs.build_mask(rule, POSITIONS[ROWS], SEGMENTS[ROWS], spans=SPANS[ROWS])
        assert off(logits_under(case, mask, kernel), logits_under(case, dense_mask(name), "math")) < 1e-5, name


@pytest.mark.parametrize("case", attending(representatives()), ids=str)
def test_a_mask_without_a_rule(case: Case) -> None:
    """B8: a mask that no rule expresses is applied unchanged; kernels that read rules refuse it and name another."""
    drawn = torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(0)) < 0.4
    wanted = logits_under(case, drawn, "math")
    assert off(logits_under(case, dense_mask("causal"), "math"), wanted) > 1e-2
    for kernel in ("sdpa", "auto"):
        if supports(case, kernel):
            assert off(logits_under(case, drawn, kernel), wanted) < 1e-5, kernel
    for kernel in ("blocks", "varlen"):
        assert re.search(r'kernel="(sdpa|math)"', refusal(case, drawn, kernel)), kernel


def refusal(case: Case, mask: MaskLike, kernel: str) -> str:
    try:
        logits_under(case, mask, kernel)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", layer_structures(), ids=str)
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(case: Case) -> None:
    """R3, with kernel="math". Rows of 32 tokens: what fills no vector register at the end of a tensor torch computes
    with other instructions, so that the bits of an activation depend on where in memory a shorter row ends."""
    mixed = batch_of(case.config, segments((-3, 17, 12), (32,), (7, 1, -24), (1, 30, -1)))
    whole = mixed.forward(generic_params(case.config))
    for b in range(len(whole)):
        row = mixed.take(slice(b, b + 1), slice(None))
        assert torch.equal(row.forward(generic_params(case.config))[0], whole[b])


def _beside_rules(kind: LayerKind) -> bool:
    """Whether its layers attend by a mask that they make themselves, of chosen keys or with keys of windows."""
    return kind.indexed or kind.compresses


@every_structure
def test_a_kernel_of_the_callers_own(case: Case) -> None:
    """It is called in every layer, with the mask as the family made it or of chosen keys, and its result is used."""
    batch = batch_of(case.config, segments((7, 3), (-4, 6)))
    inputs, masks, freqs_cis = batch.prepared()
    kinds, weights, factor = fnmodels.family_of(case.config).kinds(case.config), generic_params(case.config), 1
    asked: list[MaskLike] = []

    def own(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, **how: Any) -> Tensor:
        asked.append(mask)
        return factor * attention(q, k, v, mask, kernel="math", **how)

    def logits() -> Tensor:
        return fnmodels.forward(weights, inputs, masks, freqs_cis, config=case.config, kernel=own)

    wanted = batch.forward(weights)
    assert off(logits(), wanted) < (5e-6 if field_of(case.config, "passes") else 1e-6)  # errors of passes add up
    kinds = [kinds[index] for index in attending_layers(case.config)]
    pairs = zip(asked, kinds, strict=True)
    assert all(
        given is attention_part(masks[k]) or (_beside_rules(LayerKind.parse(k)) and given.ndim == 4)
        for given, k in pairs
    )
    factor = 0
    assert off(logits(), wanted) > 1e-3

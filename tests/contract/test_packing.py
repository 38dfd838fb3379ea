"""Packed documents equal the same documents alone; rows without labels contribute nothing and give no NaN."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import testing, tree
from fnmodels.models.common.family import field_of
from tests.support.cases import (
    Batch,
    Case,
    attention_of,
    batch_of,
    forward,
    generic_params,
    gradients,
    is_routed,
    layer_structures,
    off,
    representatives,
    richest,
    segments,
    short,
    subject_of,
    summed_loss,
    tokens_of,
    trainable,
    with_kernels,
)

every_structure_and_kernel = with_kernels(layer_structures())
# Rows that begin in the middle of a document lack what is before them: ESM's factor for masked tokens is of whole
# documents, n-grams read preceding tokens, and DeepSeek V4 keys of windows that began earlier.
_WHOLE = {"esm", "deepseek_v4", "deepseek_v41"}
_CUT = tuple(
    case for case in layer_structures() if case.family not in _WHOLE and not field_of(case.config, "ngram_size")
)
every_structure_in_turn = with_kernels(_CUT, in_turn=True)
# Every model type too: the table of docs/models.md says for each whether packing holds.
_TYPES = (*layer_structures(), *map(short, richest(lambda case: case.config.model_type)))


@with_kernels(layer_structures(), ("math", "sdpa"))  # "auto" below
def test_packed_equals_separate(case: Case, kernel: str) -> None:
    """P1: logits and gradients agree to 1e-10 of the largest."""
    testing.check_packing(subject_of(case, kernel, dtype=torch.float64, tolerance=1e-11))


@every_structure_in_turn
def test_a_cut_document_equals_it_separate(case: Case, kernel: str) -> None:
    """P1 for rows that begin in the middle of a document."""
    testing.check_packing_of_a_cut_document(subject_of(case, kernel, dtype=torch.float64, tolerance=1e-11))


@pytest.mark.parametrize("case", [short(case) for case in richest(attention_of)], ids=str)
def test_packed_equals_separate_in_single_precision(case: Case) -> None:
    testing.check_packing(subject_of(case, "auto"))


@with_kernels(tuple({str(case): case for case in _TYPES}.values()))
def test_what_stands_in_padding_does_not_matter(case: Case, kernel: str) -> None:
    weights, row = generic_params(case.config), batch_of(case.config, segments((-2, 4, -1, 3, -2)))
    other = torch.where(row.valid, row.tokens, (row.tokens + 7) % case.config.vocab_size)
    positions = torch.where(row.valid, row.positions, row.positions + 3)
    before = row.forward(weights, kernel=kernel)
    after = Batch(case.config, other, positions, row.segment_ids, row.length).forward(weights, kernel=kernel)
    assert torch.equal(before[row.valid], after[row.valid])


@every_structure_and_kernel
def test_what_is_not_finite_in_padding_does_not_matter(case: Case, kernel: str) -> None:
    """M1 for every family: as an embedding, or as the row of a pad token unless tied; and it gets no gradient."""
    family, config = fnmodels.family_of(case.config), case.config
    batch = batch_of(config, segments((-2, 4, -1, 3, -2), (12,), (-12,)))
    pad = config.vocab_size - 1
    batch = replace(batch, tokens=torch.where(batch.valid, batch.tokens % pad, pad))
    inputs, masks, freqs_cis = batch.prepared()
    taps = ("layers.*.counts",) if is_routed(config) else ("embed",)

    def run(params: Any, vectors: Tensor | None) -> Any:
        fed = inputs if vectors is None else {**inputs, "tokens": vectors}
        logits, tapped = forward(params, (fed, masks, freqs_cis), config=config, kernel=kernel, taps=taps)
        loss = summed_loss(logits, batch.labels)
        learned = {"params": params} if vectors is None else {"params": params, "x": vectors}
        return logits[batch.valid].detach(), loss.detach(), list(tapped.values()), gradients(loss, learned)

    params = trainable(generic_params(config))
    x = family.embed(params, inputs, config=config).detach()
    vectors = [t.requires_grad_() for t in (x.clone(), torch.where(batch.valid[..., None], x, torch.nan))]
    assert off(run(params, vectors[1]), run(params, vectors[0])) == 0
    if "lm_head" not in params:
        return
    poisoned = trainable(params)
    with torch.no_grad():
        poisoned["embed_tokens"][pad] = torch.nan
    want, got = run(params, None), run(poisoned, None)
    assert off(got, want) == 0 and not got[3]["params"]["embed_tokens"][pad].any()


def _embedding_gradient(batch: Batch, labels: Tensor, kernel: str) -> tuple[Tensor, Tensor, Any]:
    weights = trainable(generic_params(batch.config))
    inputs, masks, freqs_cis = batch.prepared()
    x = fnmodels.family_of(batch.config).embed(weights, inputs, config=batch.config).detach().requires_grad_()
    logits = forward(weights, ({**inputs, "tokens": x}, masks, freqs_cis), config=batch.config, kernel=kernel)
    loss = summed_loss(logits, labels)
    got = gradients(loss, {"x": x, "weights": weights})
    assert logits.isfinite().all()
    return loss, got["x"], got["weights"]


@every_structure_and_kernel
def test_rows_of_padding_and_of_one_token(case: Case, kernel: str) -> None:
    """P4: finite everywhere, and no gradient from or to padding."""
    mixed = batch_of(case.config, segments((-6,), (1, -5), (6,), (-5, 1), (1, 1, 1, 1, 1, 1), (-2, 3, -1)))
    loss, to_embedding, to_weights = _embedding_gradient(mixed, mixed.labels, kernel)
    assert loss > 0 and to_embedding.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in tree.leaves(to_weights))
    assert not to_embedding[~mixed.valid].any()
    assert not to_embedding[[1, 3, 4]].any()  # a document of one token has no label
    assert to_embedding[2, :5].any(-1).all()


@with_kernels(representatives(), in_turn=True)
def test_a_batch_without_a_label(case: Case, kernel: str) -> None:
    """P4: zero loss and zero gradient, with all rows padding or all documents of one token."""
    for segment_ids in (segments((-4,), (-4,)), segments((1, 1, 1, 1)), segments((1,), (1,)), segments((-1,))):
        batch = batch_of(case.config, segment_ids)
        loss, to_embedding, to_weights = _embedding_gradient(batch, batch.labels, kernel)
        assert loss == 0 and not to_embedding.any()
        assert not any(gradient.any() for gradient in tree.leaves(to_weights))


@with_kernels(layer_structures(), in_turn=True)
def test_empty_batches(case: Case, kernel: str) -> None:
    """P4: no rows, or rows of length 0."""
    for shape in ((2, 0), (0, 5), (0, 0)):
        tokens = tokens_of(case.config, *shape)
        prepared = fnmodels.prepare(case.config, tokens, length=24)
        logits = forward(generic_params(case.config), prepared, config=case.config, kernel=kernel)
        assert logits.shape == (*shape, case.config.vocab_size)
        assert fnmodels.prepare(case.config, tokens)[0]["positions"].shape == shape


@with_kernels(layer_structures(), in_turn=True)
def test_uneven_parts_sum_to_the_whole(case: Case, kernel: str) -> None:
    """P5: summed gradients of microbatches with 10, 1 and 0 labels equal the gradient of the sum over all."""
    batch = batch_of(case.config, segments((11,), (2, 1, -8), (1, -10)))
    weights = trainable(generic_params(case.config, torch.float64))
    whole = gradients(summed_loss(batch.forward(weights, kernel=kernel), batch.labels), weights)
    parts = [batch.take(slice(b, b + 1), slice(None)) for b in range(3)]
    losses = [summed_loss(part.forward(weights, kernel=kernel), part.labels) for part in parts]
    total = tree.map(lambda *parts: torch.stack(parts).sum(0), *(gradients(loss, weights) for loss in losses))
    assert off(total, whole) < 1e-10

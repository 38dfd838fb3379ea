"""From documents to gradients: segment ids, labels, and the normalization of loss and gradient over microbatches."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fnmodels
import train
from fnmodels import tree
from tests.support.cases import (
    Batch,
    Case,
    batch_of,
    generic_params,
    layer_structures,
    off,
    representatives,
    segments,
    tokens_of,
)
from train import cross_entropy, next_token_loss
from train.optim.adamw import sgd

every_structure = pytest.mark.parametrize("case", layer_structures(), ids=str)
# The step adds up gradients of any model alike: test_packing.py sums those of parts in every structure.
some_parts = pytest.mark.parametrize("case", representatives()[::4], ids=str)
LENGTHS = (5, 1, 4)


@every_structure
def test_converters_agree_on_documents(case: Case) -> None:
    """P3: segment ids from lengths, end tokens or positions agree, with padding given or detected."""
    lengths = (5, 3, 2)
    row = batch_of(case.config, segments((*lengths, -2)))
    end = case.config.vocab_size - 1
    tokens = row.tokens.clamp(max=end - 1)
    tokens[0, [4, 7, 9]] = end
    found = {
        "lengths": fnmodels.segments_from_lengths([lengths], 12),
        "ends": fnmodels.inputs.segments_from_eos(tokens, end, valid=row.valid),
        "positions": fnmodels.inputs.segments_from_positions(row.positions, valid=row.valid),
        "positions alone": fnmodels.inputs.segments_from_positions(row.positions),
    }
    wanted = Batch(case.config, tokens, row.positions, row.segment_ids, 24).prepared()
    for name, segment_ids in found.items():
        positions = fnmodels.positions_from_segments(segment_ids)
        assert off(Batch(case.config, tokens, positions, segment_ids, 24).prepared(), wanted) == 0, name


def packed(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = fnmodels.pack(documents, 12)
    return rows.batch()


@every_structure
def test_labels_are_the_next_tokens_of_each_document(case: Case) -> None:
    """P6: the loss of packed rows counts every token of a document but the first, given the tokens before it."""
    weights = generic_params(case.config, torch.float64)
    documents = [tokens_of(case.config, 1, n, seed=n)[0] for n in LENGTHS]
    total, count = next_token_loss(weights, packed(documents), config=case.config, kernel="math", length=24)
    wanted = torch.zeros((), dtype=torch.float64)
    for document in documents:
        prepared = fnmodels.prepare(case.config, document[None], length=24)
        logp = fnmodels.forward(weights, *prepared, config=case.config, kernel="math")[0].log_softmax(-1)
        wanted = wanted - sum(logp[t, document[t + 1]] for t in range(len(document) - 1))
    assert int(count) == sum(LENGTHS) - len(LENGTHS)
    assert off(total, wanted) < 1e-10


def test_an_oracle_reaches_zero() -> None:
    """P6: the oracle knows that tokens of a document count upwards, but not where a document ends."""
    batch = packed([torch.arange(n) + 10 * n for n in LENGTHS])
    total, count = cross_entropy(1e4 * F.one_hot(batch["tokens"] + 1, 99).double(), batch["labels"])
    assert float(total) == 0 and int(count) == sum(LENGTHS) - len(LENGTHS)


def one_step(case: Case, batch: dict[str, torch.Tensor], accumulate: int) -> tuple[Any, dict[str, Any]]:
    """(gradient, metrics) of one SGD step with learning rate 1, whose update is the gradient."""
    weights = generic_params(case.config, torch.float64)
    loss = partial(next_token_loss, config=case.config, kernel="math", length=24)
    optimizer = sgd(1.0, spec=fnmodels.family_of(case.config).spec(case.config))
    step = train.make_step(loss, optimizer, accumulate=accumulate, inplace=False)
    state, metrics = step(train.init_state(weights, optimizer), batch)
    return tree.map(torch.sub, weights, state.params), metrics


def uneven(case: Case) -> dict[str, torch.Tensor]:
    """Rows with 10, 0, 1 and 0 labels."""
    batch = batch_of(case.config, segments((11,), (1, -10), (2, 1, -8), (-11,)))
    named = {"tokens": batch.tokens, "positions": batch.positions, "segment_ids": batch.segment_ids}
    return named | {"labels": batch.labels}


@some_parts
def test_any_split_is_the_step_of_one_batch(case: Case) -> None:
    """P5: microbatches with 10 and 1 labels, and microbatches without any."""
    gradient, wanted = one_step(case, uneven(case), 1)
    assert int(wanted["count"]) == 11
    for accumulate in (2, 3, 4):
        got, metrics = one_step(case, uneven(case), accumulate)
        assert off(got, gradient) < 1e-10
        for name in ("loss", "count", "grad_norm"):
            assert off(metrics[name], wanted[name]) < 1e-10, name


@some_parts
def test_a_step_on_nothing(case: Case) -> None:
    """P5: no label in any microbatch: loss 0, gradient exactly 0, no NaN."""
    batch = uneven(case)
    for accumulate in (1, 2):
        gradient, metrics = one_step(case, batch | {"labels": torch.full_like(batch["labels"], -100)}, accumulate)
        assert not any(g.any() for g in tree.leaves(gradient))
        assert float(metrics["loss"]) == 0 and int(metrics["count"]) == 0 and bool(metrics["finite"])

"""Embeddings of n-grams against a loop over the tokens of each document."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels import longcat_flash
from fnmodels.inputs.segments import preceding_tokens
from fnmodels.ops.embedding import NgramHash, add_ngrams, ngram_rows
from tests.support.cases import batch_of, cases, generic_params, segments
from tests.support.status import Shows

HOW = NgramHash(size=4, heads=2, rows=50, vocabulary=20, end=7)
CONFIG: Any = next(case.config for case in cases() if case.name == "longcat_flash_ngram")


def by_loop(document: list[int], how: NgramHash) -> list[list[int]]:
    """The row of each token in each table: of the polynomial of the tokens since the last end of a text."""
    found = []
    for t in range(len(document)):
        text = [*document[: t + 1]][::-1]
        end = next((j for j in range(1, len(text)) if text[j] == how.end), len(text))
        text = text[:end]
        rows = []
        for head in range((how.size - 1) * how.heads):
            order, size = 2 + head // how.heads, how.rows + 2 * head + 1
            rows.append(sum(token * how.vocabulary**j for j, token in enumerate(text[:order])) % size)
        found.append(rows)
    return found


@pytest.mark.parametrize("end", [7, None])
def test_rows_of_ngrams_equal_a_loop(end: int | None) -> None:
    how, lengths = replace(HOW, end=end), (9, 1, 14)
    tokens = torch.randint(20, (1, 24), generator=torch.Generator().manual_seed(3))
    tokens[0, 4] = tokens[0, 15] = tokens[0, 16] = 7
    ids = fnmodels.segments_from_lengths([list(lengths)])
    positions = fnmodels.positions_from_segments(ids)
    rows = torch.stack(ngram_rows(tokens, preceding_tokens(tokens, positions, ids, 3), how), -1)[0]
    want = [row for document in tokens[0].split(lengths) for row in by_loop(document.tolist(), how)]
    assert rows.tolist() == want
    mixed = torch.stack(ngram_rows(tokens, preceding_tokens(tokens, torch.arange(24)[None], ids * 0 + 1, 3), how), -1)
    assert mixed[0].tolist() != want  # a planted bug: the documents of a row as one


def test_embeddings_of_ngrams_equal_a_loop_with_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 12, dtype=torch.float64, requires_grad=True)
    tables = [torch.randn(size, 2, dtype=torch.float64, requires_grad=True) for size in HOW.sizes]
    projections = [torch.randn(12, 2, dtype=torch.float64, requires_grad=True) for _ in HOW.sizes]
    rows = [torch.randint(size, (1, 5)) for size in HOW.sizes]
    want = torch.stack(
        [
            (x[0, t] + sum(p @ e[r[0, t]] for p, e, r in zip(projections, tables, rows, strict=True))) / 7
            for t in range(5)
        ]
    )
    got = add_ngrams(x, tables, projections, rows)
    leaves = [x, *tables, *projections]
    assert torch.allclose(got[0], want)
    weight = torch.randn_like(want)
    for one, other in zip(
        torch.autograd.grad((got[0] * weight).sum(), leaves),
        torch.autograd.grad((want * weight).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(one, other)


def test_a_model_with_ngrams_is_the_one_without_on_other_embeddings(shows: Shows) -> None:
    """The published model: everything after the embedding is LongCat-Flash, which equals transformers."""
    shows("longcat_flash_ngram", "loops")
    params, batch = generic_params(CONFIG), batch_of(CONFIG, segments((9, 3), (12,)))
    inputs, masks, freqs_cis = batch.prepared()
    how = CONFIG.ngrams
    wanted = torch.zeros(*batch.tokens.shape, CONFIG.hidden_size)
    for row, ids in enumerate(batch.segment_ids):
        for document in ids.unique():
            place = ids == document
            own = batch.tokens[row, place]
            x = F.embedding(own, params["embed_tokens"])
            for head, rows in enumerate(zip(*by_loop(own.tolist(), how), strict=True)):
                table, projection = (params["ngrams"][name][head] for name in ("tables", "projections"))
                x = x + table[list(rows)] @ projection.T
            wanted[row, place] = x / (1 + len(how.sizes))
    vectors = fnmodels.forward(params, {**inputs, "tokens": wanted}, masks, freqs_cis, config=CONFIG, kernel="math")
    found = fnmodels.forward(params, inputs, masks, freqs_cis, config=CONFIG, kernel="math")
    assert torch.allclose(found, vectors, atol=1e-5)


def test_bare_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="This model embeds n-grams of tokens: pass the inputs of"):
        longcat_flash.embed(generic_params(CONFIG), torch.ones(1, 4, dtype=torch.long), config=CONFIG)


def test_a_cache_without_the_tokens_before_is_found() -> None:
    """A planted bug: a step whose n-grams begin at the step."""
    params = generic_params(CONFIG)
    tokens = torch.randint(8, 61, (1, 9), generator=torch.Generator().manual_seed(1))
    whole = fnmodels.forward(params, *fnmodels.prepare(CONFIG, tokens), config=CONFIG, kernel="math")

    def last(forget: bool) -> Tensor:
        cache = fnmodels.init_cache(CONFIG, 1, 12)
        for part in tokens.split((4, 3, 1, 1), 1):
            inputs, masks, tables = fnmodels.prepare_step(CONFIG, part, cache)
            if forget:
                inputs["preceding"] = torch.full_like(inputs["preceding"], -1)
            logits, cache = fnmodels.decode(params, inputs, masks, tables, cache, config=CONFIG, kernel="math")
        return logits[:, -1]

    assert torch.allclose(last(forget=False), whole[:, -1], atol=1e-5)
    assert not torch.allclose(last(forget=True), whole[:, -1], atol=1e-2)

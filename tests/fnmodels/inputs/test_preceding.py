"""The tokens before each one in its document, by a loop over tokens; in any order, and over calls."""

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.inputs.segments import preceding_tokens

SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
POSITIONS = torch.tensor([[0, 0, 0, 1, 2, 3, 0, 0, 1, 0], [4, 5, 6, 7, 8, 9, 10, 0, 1, 2]])  # row 1 starts at 4
TOKENS = torch.arange(20).view(2, 10) + 100


def by_loop(tokens: Tensor, positions: Tensor, segments: Tensor, count: int) -> Tensor:
    found = torch.full((*tokens.shape, count), -1)
    for b in range(len(tokens)):
        at = {(int(s), int(p)): t for s, p, t in zip(segments[b], positions[b], tokens[b], strict=True) if s > 0}
        for i in range(tokens.shape[1]):
            for j in range(count):
                found[b, i, j] = at.get((int(segments[b, i]), int(positions[b, i]) - 1 - j), -1)
    return found


@pytest.mark.parametrize("count", [1, 3, 12])
def test_preceding_tokens_are_those_of_the_document(count: int) -> None:
    want = by_loop(TOKENS, POSITIONS, SEGMENTS, count)
    assert torch.equal(preceding_tokens(TOKENS, POSITIONS, SEGMENTS, count), want)
    # a planted bug: the row's, whatever the documents
    shifted = torch.stack([TOKENS.roll(j + 1, 1) for j in range(count)], -1)
    assert not torch.equal(shifted.where(want >= 0, -1).where(shifted >= 0, -1), shifted)


def test_preceding_tokens_of_another_order_are_reordered() -> None:
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    found = preceding_tokens(TOKENS[:, order], POSITIONS[:, order], SEGMENTS[:, order], 2)
    assert torch.equal(found, preceding_tokens(TOKENS, POSITIONS, SEGMENTS, 2)[:, order])


@pytest.mark.parametrize("cut", range(11))
def test_preceding_tokens_of_pieces_are_those_of_the_row(cut: int) -> None:
    whole = preceding_tokens(TOKENS, POSITIONS, SEGMENTS, 3)
    first, second = (tuple(t[:, part] for t in (TOKENS, POSITIONS, SEGMENTS)) for part in (slice(cut), slice(cut, 10)))
    assert torch.equal(preceding_tokens(*first, 3), whole[:, :cut])
    assert torch.equal(preceding_tokens(*second, 3, before=first), whole[:, cut:])


def test_a_count_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 0; n-grams read at least one token"):
        preceding_tokens(TOKENS, POSITIONS, SEGMENTS, 0)


def test_prepare_has_them_where_a_model_embeds_ngrams() -> None:
    plain = fnmodels.preset("llama-3.2-1b")
    config = fnmodels.preset("longcat-flash-lite")
    tokens = torch.arange(6)[None]
    assert "preceding" not in fnmodels.prepare(plain, tokens)[0]
    inputs, _, _ = fnmodels.prepare(config, tokens)
    assert inputs["preceding"].tolist()[0][:5] == [[-1, -1, -1], [0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1]]

"""`documents` and `pool`: one row per document, whatever the order, the padding and the packing."""

import math

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.inputs.documents import POOLINGS
from tests.support.cases import positions_of, segments

ROWS = segments((-2, 3, 1, -1), (7,), (-7,), (2, 2, 3))


def _expected(tokens: Tensor, how: str) -> Tensor:
    """The pooling of one document [S, D], written out."""
    weights = torch.arange(1, len(tokens) + 1, dtype=tokens.dtype)[:, None]
    sums = {
        "mean": lambda: tokens.mean(0),
        "mean_sqrt_len": lambda: tokens.sum(0) / math.sqrt(len(tokens)),
        "weighted_mean": lambda: (tokens * weights).sum(0) / weights.sum(),
        "max": lambda: tokens.amax(0),
        "first": lambda: tokens[0],
        "last": lambda: tokens[-1],
        "sum": lambda: tokens.sum(0),
    }
    return sums[how]()


@pytest.mark.parametrize("how", POOLINGS)
def test_pool(how: str) -> None:
    """Against a loop over documents, with NaN in padding, in another order, with gradients; no gradient to padding."""
    x = torch.randn(*ROWS.shape, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.where((ROWS > 0)[..., None], x, torch.nan).requires_grad_()
    found = fnmodels.documents(ROWS)
    documents = [x[b][ROWS[b] == i] for b in range(len(ROWS)) for i in range(1, int(ROWS[b].max()) + 1)]
    wanted = torch.stack([_expected(document, how) for document in documents])
    got = fnmodels.pool(x, found, how=how)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (got, wanted)))
    order = torch.randperm(ROWS.shape[1], generator=torch.Generator().manual_seed(1))
    moved = fnmodels.documents(ROWS[:, order], positions_of(ROWS)[:, order])
    torch.testing.assert_close(fnmodels.pool(x[:, order], moved, how=how), wanted)
    assert fnmodels.pool(x.bfloat16(), found, how=how).dtype == torch.bfloat16


def test_late_interaction() -> None:
    """Token vectors in any order of the row, NaN at padding, scores as a loop's, gradients through both."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*ROWS.shape, 5, dtype=torch.float64, generator=generator)
    x = torch.where((ROWS > 0)[..., None], x, torch.nan).requires_grad_()
    documents = [x[b][ROWS[b] == i] for b in range(len(ROWS)) for i in range(1, int(ROWS[b].max()) + 1)]
    found = fnmodels.token_vectors(x, fnmodels.documents(ROWS))
    assert found.valid.sum(1).tolist() == [len(d) for d in documents]
    for vectors, valid, document in zip(*found, documents, strict=True):
        assert torch.equal(vectors[valid], document) and not vectors[~valid].any()
    order = torch.randperm(ROWS.shape[1], generator=generator)
    moved = fnmodels.documents(ROWS[:, order], positions_of(ROWS)[:, order])
    assert torch.equal(fnmodels.token_vectors(x[:, order], moved).vectors, found.vectors)
    wanted = torch.stack([torch.stack([(q @ d.T).max(1).values.sum() for d in documents[1:]]) for q in documents[:3]])
    first, rest = (fnmodels.TokenVectors(*(t[part] for t in found)) for part in (slice(3), slice(1, None)))
    got = fnmodels.max_sim(first, rest)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (got, wanted)))
    assert fnmodels.token_vectors(x, fnmodels.documents(0 * ROWS)).vectors.shape == (0, 0, 5)


def test_documents() -> None:
    found = fnmodels.documents(ROWS)
    assert found.row.tolist() == [0, 0, 1, 3, 3, 3] and found.segment.tolist() == [1, 2, 1, 1, 2, 3]
    assert found.first.tolist() == [2, 5, 0, 0, 2, 4] and found.last.tolist() == [4, 5, 6, 1, 3, 6]
    assert found.number[0].tolist() == [6, 6, 0, 0, 0, 1, 6] and len(found) == 6
    none = fnmodels.documents(torch.zeros(2, 3, dtype=torch.int64))
    assert len(none) == 0 and fnmodels.pool(torch.ones(2, 3, 4), none).shape == (0, 4)
    with pytest.raises(ValueError, match="how is 'cls'"):
        fnmodels.pool(torch.ones(4, 7, 2), found, how="cls")
    with pytest.raises(ValueError, match=r"hidden is \[4, 6, 2\]"):
        fnmodels.pool(torch.ones(4, 6, 2), found)
    with pytest.raises(ValueError, match=r"must be \[B, S\]"):
        fnmodels.documents(ROWS[0])
    with pytest.raises(ValueError, match="Cannot split Documents"):
        fnmodels.split({"documents": found}, 2)

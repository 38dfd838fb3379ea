"""Tests of source mixtures: the same documents for any number of ranks and of resumes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from train.data.mixture import Mixture, RowOrigin, batch, batch_origins, epochs
from train.data.rows import Rows, concatenated, pack_documents, pack_stream

ROWS = 8  # of a batch, over all ranks
PACKERS: dict[str, Callable[..., Rows]] = {"stream": pack_stream, "whole documents": pack_documents}


def _rows(packer: Callable[..., Rows], seed: int, number: int) -> Rows:
    """Documents of 1 to 12 tokens; each token's id is its document's number."""
    lengths = np.random.default_rng(seed).integers(1, 13, number)
    return packer(concatenated(np.arange(number).repeat(lengths) + 1000 * seed, lengths), 16)


def _mixture(packer: Callable[..., Rows]) -> Mixture:
    return Mixture(("a", "b", "c"), (_rows(packer, 1, 40), _rows(packer, 2, 15), _rows(packer, 3, 90)), (3, 1, 2))


def _run(mixture: Mixture, sizes: list[tuple[int, int]]) -> list[RowOrigin]:
    """The rows that all ranks together get in a run of segments (ranks, steps); only the step is carried over."""
    found, step = [], 0
    for ranks, steps in sizes:
        for now in range(step, step + steps):
            for rank in range(ranks):
                found += batch_origins(mixture, 5, now, ROWS, rank=rank, ranks=ranks)
        step += steps
    return found


@pytest.mark.parametrize("packer", PACKERS)
def test_documents_are_the_same_after_resuming_with_other_numbers_of_ranks(packer: str) -> None:
    mixture = _mixture(PACKERS[packer])
    whole_run = _run(mixture, [(1, 12)])
    assert _run(mixture, [(1, 3), (2, 2), (4, 5), (1, 2)]) == whole_run
    assert len(whole_run) == 12 * ROWS and max(row.epoch for row in whole_run) > 0
    assert {row.source for row in whole_run} == {"a", "b", "c"}


@pytest.mark.parametrize("packer", PACKERS)
def test_batch_origins_are_the_documents_of_the_batch(packer: str) -> None:
    mixture = _mixture(PACKERS[packer])
    thousands = {"a": 1000, "b": 2000, "c": 3000}
    for step in (0, 1, 9):
        whole_batch = batch(mixture, 5, step, ROWS)
        for ranks in (1, 2, 4):
            parts = [batch(mixture, 5, step, ROWS, rank=rank, ranks=ranks) for rank in range(ranks)]
            for name, tensor in whole_batch.items():
                assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
        for row, origin in enumerate(batch_origins(mixture, 5, step, ROWS)):
            tokens, segments = whole_batch["tokens"][row], whole_batch["segment_ids"][row]
            starts = [int(tokens[segments == n][0]) for n in range(1, int(segments.max()) + 1)]
            assert starts == [thousands[origin.source] + document for document in origin.documents]


def test_every_document_of_a_source_is_seen_once_in_an_epoch() -> None:
    mixture = Mixture(("",), (_rows(pack_documents, 1, 40),), (1,))
    steps = -(-mixture.counts[0] // 4)
    found = [row for step in range(steps) for row in batch_origins(mixture, 0, step, 4) if row.epoch == 0]
    assert sorted(document for row in found for document in row.documents) == list(range(40))
    assert epochs(mixture, steps, 4)[""] == pytest.approx(steps * 4 / mixture.counts[0])


def test_epochs_are_reported_by_source() -> None:
    mixture = _mixture(pack_stream)
    found = [row for step in range(6) for row in batch_origins(mixture, 1, step, ROWS)]
    for name, count in zip(mixture.names, mixture.counts, strict=True):
        rows = sum(row.source == name for row in found)
        assert rows / count == pytest.approx(epochs(mixture, 6, ROWS)[name])


def test_fill_is_that_of_the_rows_that_are_drawn() -> None:
    full = pack_documents(concatenated(np.arange(16), np.array([16])), 16)
    mixture = Mixture(("a", "b"), (full, _rows(pack_documents, 2, 3)), (3, 1))
    assert mixture.rows[1].fill < 1
    assert mixture.fill == pytest.approx((3 + mixture.rows[1].fill) / 4)


def test_sources_that_cannot_be_mixed_are_named() -> None:
    rows = _rows(pack_stream, 1, 9)
    with pytest.raises(ValueError, match=r"source b has .* and the weight 0"):
        Mixture(("a", "b"), (rows, rows), (1, 0))
    with pytest.raises(ValueError, match="source b has 0 rows"):
        Mixture(("a", "b"), (rows, pack_stream(concatenated(np.zeros(0), np.zeros(0, np.int64)), 16)), (1, 1))
    with pytest.raises(ValueError, match=r"source b has .* rows of 8 tokens"):
        Mixture(("a", "b"), (rows, pack_stream(rows.tokens, 8)), (1, 1))
    with pytest.raises(ValueError, match="does not divide over 3 ranks"):
        batch(Mixture(("",), (rows,), (1,)), 0, 0, 8, ranks=3)

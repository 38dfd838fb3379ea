"""Tests of packed rows with random access, against fnmodels.pack, which makes all of them at once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fnmodels import pack
from train.data.rows import (
    Tokens,
    all_rows,
    concatenated,
    document_indices,
    make_batch,
    pack_documents,
    pack_stream,
    truncate_documents,
)

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


def _tokens(lengths: list[int], dtype: type = np.int32) -> Tokens:
    return concatenated(np.arange(1, sum(lengths) + 1, dtype=dtype), np.array(lengths))


def _documents(lengths: list[int]) -> list[torch.Tensor]:
    return list(torch.arange(1, sum(lengths) + 1).split(lengths))


@given(LENGTHS, st.integers(1, 7))
def test_a_stream_is_what_the_packer_makes(lengths: list[int], length: int) -> None:
    rows, packed = pack_stream(_tokens(lengths), length), pack(_documents(lengths), length)
    found = all_rows(rows)
    assert rows.count == packed.report.rows
    assert rows.fill == pytest.approx(packed.report.overall_fill)
    for name in ("tokens", "labels", "segment_ids"):
        assert torch.equal(found[name], getattr(packed, name)), name
    for row in range(rows.count):
        pieces = packed.pieces[packed.pieces[:, 2] == row]
        assert document_indices(rows, row) == pieces[:, 0].tolist()
        assert torch.equal(make_batch(rows, [row])["tokens"], packed.tokens[row : row + 1])


@given(LENGTHS, st.integers(5, 9))
def test_whole_documents_are_packed_as_the_packer_does(lengths: list[int], length: int) -> None:
    packed = pack(_documents(lengths), length, method="first_fit", split=False, overlong="drop")
    rows = pack_documents(_tokens(lengths), length, overlong="drop")
    found = all_rows(rows)
    assert (rows.count, rows.dropped) == (packed.report.rows, packed.report.documents_dropped)
    assert rows.fill == pytest.approx(packed.report.overall_fill)
    for name in ("tokens", "labels", "segment_ids", "positions"):
        assert torch.equal(found[name], getattr(packed, name)), name


@given(LENGTHS, st.integers(1, 7))
def test_positions_count_from_the_start_of_each_piece(lengths: list[int], length: int) -> None:
    batch = all_rows(pack_stream(_tokens(lengths), length))
    segments, positions = batch["segment_ids"], batch["positions"]
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    expected = torch.where(follows, positions[:, :-1] + 1, 0)
    assert torch.equal(positions[:, 1:], expected) and not positions[:, 0].any()


def test_rows_predict_every_token_of_every_document_once() -> None:
    lengths = [5, 1, 0, 9, 3]
    labels = all_rows(pack_stream(_tokens(lengths), 4))["labels"]
    firsts = {1, 6, 7, 16}
    assert sorted(labels[labels >= 0].tolist()) == sorted(set(range(1, 19)) - firsts)


def test_documents_lie_in_several_arrays_of_any_dtype() -> None:
    parts = (np.array([1, 2, 3], np.uint16), np.zeros(0, np.uint32), np.array([70_000, 70_001], np.uint32))
    tokens = Tokens(parts, np.array([0, 2, 3, 5]), np.array([2, 1, 2, 0]))
    batch = make_batch(pack_stream(tokens, 3), [0, 1])
    assert batch["tokens"].tolist() == [[1, 2, 3], [70_000, 70_001, 0]]
    assert batch["labels"].tolist() == [[2, -100, -100], [70_001, -100, -100]]


def test_what_is_not_learnt_is_no_label() -> None:
    tokens = concatenated(np.arange(1, 7), np.array([4, 2]), np.array([False, True, False, True, True, False]))
    assert all_rows(pack_stream(tokens, 6))["labels"].tolist() == [[2, -100, 4, -100, -100, -100]]
    with pytest.raises(ValueError, match=r"loss_mask has shape \(2,\)"):
        concatenated(np.arange(3), np.array([3]), np.array([True, False]))


def test_beginnings_hold_something_to_learn() -> None:
    loss_mask = np.array([True, False, False, True, False, True, False])
    tokens, kept = truncate_documents(concatenated(np.arange(7), np.array([4, 3]), loss_mask), 3)
    assert (kept.tolist(), tokens.begins.tolist(), tokens.lengths.tolist()) == (
        [1],
        [4],
        [3],
    )  # a first token is no target
    tokens, kept = truncate_documents(concatenated(np.arange(7), np.array([4, 3]), loss_mask), 9)
    assert (kept.tolist(), tokens.lengths.tolist()) == ([0, 1], [4, 3])


def test_a_document_longer_than_a_row_is_refused_or_counted() -> None:
    with pytest.raises(ValueError, match="document 1 has 6 tokens and a row has 4"):
        pack_documents(_tokens([2, 6]), 4)
    rows = pack_documents(_tokens([2, 6]), 4, overlong="drop")
    assert (rows.dropped, rows.fill) == (1, 0.5)

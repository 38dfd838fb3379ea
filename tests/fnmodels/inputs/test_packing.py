"""Packing: every token exactly once, labels and weights aligned within documents, drops and fill counted."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnmodels.inputs.packing import IGNORE, pack, unpack
from fnmodels.inputs.segments import segments_from_positions

WAYS = [("concat", True), ("concat", False), ("first_fit", True), ("first_fit", False)]


def rows(packed):
    return packed.tokens.tolist(), packed.positions.tolist(), packed.segment_ids.tolist(), packed.labels.tolist()


def test_concat_cuts_the_stream():
    packed = pack([[1, 2, 3, 4, 5], [], [6], [7, 8, 9]], 4, pad_id=99)
    assert rows(packed) == (
        [[1, 2, 3, 4], [5, 6, 7, 8], [9, 99, 99, 99]],
        [[0, 1, 2, 3], [4, 0, 0, 1], [2, 0, 0, 0]],
        [[1, 1, 1, 1], [1, 2, 3, 3], [1, 0, 0, 0]],
        [[2, 3, 4, 5], [IGNORE, IGNORE, 8, 9], [IGNORE] * 4],  # a cut document predicts across the cut
    )
    report = packed.report
    assert (report.rows, report.documents, report.documents_empty, report.documents_split) == (3, 4, 1, 2)
    assert (report.tokens, report.tokens_kept, report.tokens_dropped, report.pads, report.labels) == (9, 9, 0, 3, 6)
    assert (report.fill, report.overall_fill) == ((1.0, 1.0, 0.25), 0.75)


def test_concat_keeps_documents_whole_and_in_order():
    packed = pack([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], 4, split=False)
    assert packed.tokens.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 10]]
    assert packed.segment_ids.tolist() == [[1, 1, 1, 0], [1, 1, 2, 0], [1, 1, 1, 1]]


def test_first_fit_places_the_longest_first():
    packed = pack([[1], [2, 2, 2], [3, 3], [4, 4]], 4, method="first_fit", split=False)
    assert packed.tokens.tolist() == [[1, 2, 2, 2], [3, 3, 4, 4]]  # inside a row in their own order
    assert packed.report.overall_fill == 1.0


def test_first_fit_cuts_only_what_is_too_long():
    packed = pack([[6, 7, 8], [1, 2, 3, 4, 5]], 4, method="first_fit")
    assert packed.tokens.tolist() == [[1, 2, 3, 4], [6, 7, 8, 5]]
    assert packed.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 4]]
    assert packed.segment_ids.tolist() == [[1, 1, 1, 1], [1, 1, 1, 2]]
    assert packed.labels.tolist() == [[2, 3, 4, 5], [7, 8, IGNORE, IGNORE]]
    assert packed.report.documents_split == 1


def test_weights_belong_to_the_predicted_token():
    weights = [[0.0, 0.0, 1.0, 0.5, 2.0], [], [3.0], torch.tensor([9.0, 1.0, 0.0])]
    packed = pack([[1, 2, 3, 4, 5], [], [6], [7, 8, 9]], 4, weights=weights)
    assert packed.weights is not None
    assert packed.weights.dtype == torch.float32
    assert packed.weights.tolist() == [[0, 1, 0.5, 2], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert pack([[1]], 4).weights is None


@pytest.mark.parametrize(("method", "split"), WAYS)
@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_nothing_to_pack(documents, method, split):
    packed = pack(documents, 4, method=method, split=split, weights=documents)
    assert packed.tokens.shape == packed.labels.shape == packed.weights.shape == (0, 4)
    assert (packed.report.overall_fill, packed.report.fill) == (0.0, ())
    assert [document.tolist() for document in unpack(packed)] == documents


@pytest.mark.parametrize(("method", "split"), WAYS)
def test_documents_of_exactly_one_row_need_no_padding(method, split):
    documents = [[1, 2, 3], [4, 5, 6]]
    packed = pack(documents, 3, method=method, split=split)
    assert packed.tokens.tolist() == documents
    assert (packed.report.pads, packed.report.documents_split) == (0, 0)


@pytest.mark.parametrize("method", ["concat", "first_fit"])
def test_too_long_is_refused_or_dropped_and_counted(method):
    documents = [[1, 2], [1, 2, 3, 4, 5], [3]]
    with pytest.raises(ValueError, match="document 1 has 5 tokens and a row has 4"):
        pack(documents, 4, method=method, split=False)
    packed = pack(documents, 4, method=method, split=False, overlong="drop")
    report = packed.report
    assert (report.documents_dropped, report.tokens_dropped, report.tokens_kept, report.tokens) == (1, 5, 3, 8)
    assert [document.tolist() for document in unpack(packed)] == [[1, 2], [], [3]]
    assert pack(documents, 4, method=method, overlong="drop").report.documents_dropped == 0  # split cuts instead


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([[1]], 0), "length is 0"),
        (([[1], [[2]]], 4), r"document 1 is \(1, 1\)"),
        (([1, 2], 4), r"document 0 is \(\)"),
        (([[1], [0.5]], 4), "document 1 holds torch.float32"),
        (([[1], [], [3, -100]], 4), "document 2 holds the token id -100"),
    ],
)
def test_bad_documents_are_named(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        pack(*arguments)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "best"}, "method is 'best'"),
        ({"overlong": "cut"}, "overlong is 'cut'"),
        ({"weights": [[1.0, 1.0]]}, "weights are for 1 documents and there are 2"),
        ({"weights": [[1.0, 1.0], [1.0, 1.0]]}, r"weights of document 1 are \(2,\): it has 1 tokens"),
    ],
)
def test_bad_options_are_named(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        pack([[1, 2], [3]], 4, **options)


def test_unpack_takes_any_values_in_the_packed_order():
    packed = pack([[1, 2, 3], [4], [5, 6]], 4, method="first_fit")
    values = torch.stack([packed.tokens * 2.0, packed.tokens * 3.0], dim=-1).requires_grad_()
    parts = unpack(packed, values)
    assert [part[:, 1].tolist() for part in parts] == [[3, 6, 9], [12], [15, 18]]
    torch.cat(parts).sum().backward()
    assert values.grad[..., 0].equal((packed.segment_ids > 0).float())
    with pytest.raises(ValueError, match=r"they begin with the packed \(2, 4\)"):
        unpack(packed, values[:1])


some_documents = st.lists(st.lists(st.integers(0, 20), max_size=9), max_size=12)


@settings(max_examples=200, deadline=None)
@given(some_documents, st.integers(1, 7), st.sampled_from(WAYS))
def test_every_token_once_with_its_label_position_and_weight(documents, length, way):
    method, split = way
    weights = [[float(100 * d + t) for t in range(len(document))] for d, document in enumerate(documents)]
    packed = pack(documents, length, method=method, split=split, overlong="drop", weights=weights, pad_id=77)
    kept = [document if split or len(document) <= length else [] for document in documents]

    def unpacked(values):
        return [part.tolist() for part in unpack(packed, values)]

    assert unpacked(packed.tokens) == kept
    assert unpacked(packed.positions) == [list(range(len(document))) for document in kept]
    assert unpacked(packed.labels) == [[*document[1:], IGNORE] if document else [] for document in kept]
    assert unpacked(packed.weights) == [[*w[1:], 0.0] if d else [] for d, w in zip(kept, weights, strict=True)]

    pad = packed.segment_ids == 0
    assert (packed.tokens[pad] == 77).all()
    assert (packed.positions[pad] == 0).all()
    assert (packed.labels[pad] == IGNORE).all()
    assert (packed.weights[packed.labels == IGNORE] == 0).all()
    assert (pad[:, :-1] <= pad[:, 1:]).all()  # padding is at the end of a row

    report = packed.report
    assert report.tokens == sum(map(len, documents)) == report.tokens_kept + report.tokens_dropped
    assert report.tokens_kept == sum(map(len, kept)) == int((~pad).sum())
    assert report.rows * length == report.tokens_kept + report.pads
    assert report.labels == int((packed.labels != IGNORE).sum())
    assert list(report.fill) == pytest.approx((~pad).double().mean(1).tolist())
    assert report.overall_fill == pytest.approx((~pad).double().mean().item() if report.rows else 0.0)
    if split and method == "concat":
        assert int(pad.sum()) < length
    if not split:
        assert report.documents_split == 0


@settings(max_examples=100, deadline=None)
@given(some_documents, st.integers(1, 7), st.sampled_from(WAYS))
def test_segments_are_the_pieces(documents, length, way):
    packed = pack(documents, length, method=way[0], split=way[1], overlong="drop")
    want = torch.zeros_like(packed.segment_ids)
    for row in range(packed.report.rows):
        pieces = packed.pieces[packed.pieces[:, 2] == row]
        for number, (_, _, _, column, size) in enumerate(pieces.tolist(), start=1):
            want[row, column : column + size] = number
    assert packed.segment_ids.equal(want)
    if way == ("concat", True):  # only a row's first document begins in the middle: positions say the same
        assert segments_from_positions(packed.positions, valid=want != 0).equal(want)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=40))
def test_first_fit_is_first_fit(sizes):
    packed = pack([[1] * size for size in sizes], 10, method="first_fit", split=False)
    free: list[int] = []
    where = {}
    for document in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        row = next((r for r, space in enumerate(free) if space >= sizes[document]), len(free))
        free += [10] if row == len(free) else []
        free[row] -= sizes[document]
        where[document] = row
    assert dict(packed.pieces[:, [0, 2]].tolist()) == where


def test_shuffling_documents_does_not_change_what_is_packed():
    documents = [torch.arange(n) for n in (3, 1, 4, 1, 5, 9, 2, 6)]
    a, b = pack(documents, 5), pack(documents[::-1], 5)
    assert all(x.equal(y) for x, y in zip(unpack(a), unpack(b)[::-1], strict=True))


@pytest.mark.parametrize(("method", "split"), [("concat", True), ("first_fit", False)])
def test_a_hundred_thousand_documents_in_seconds(method, split):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 100, (100_000,), generator=generator)
    documents = torch.randint(0, 50_000, (int(sizes.sum()),), generator=generator).split(sizes.tolist())
    begin = time.process_time()
    packed = pack(documents, 512, method=method, split=split)
    assert time.process_time() - begin < 30  # a second or two alone; a quadratic search takes many minutes
    assert torch.cat(unpack(packed)).equal(torch.cat(documents))
    assert packed.report.overall_fill > (0.9 if method == "concat" else 0.999)

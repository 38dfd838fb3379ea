"""Converters between lengths, end tokens, positions and segment ids (P2, P3): tables, round trips, transforms."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnmodels.inputs.segments import (
    positions_from_segments,
    segments,
    segments_from_eos,
    segments_from_lengths,
    segments_from_positions,
    text_order,
)

CONTRACT = Path(__file__).parents[3] / "docs" / "positions-and-masks.md"
LENGTHS = [  # lengths, S, segment ids
    ([3, 4, 4], 11, [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]),
    ([1, 1], None, [1, 2]),
    ([2], 4, [1, 1, 0, 0]),
    ([], 3, [0, 0, 0]),
    ([0, 2, 0, 1, 0], 4, [2, 2, 4, 0]),
    ([], None, []),
    ([[3], [1, 1, 2], []], None, [[1, 1, 1, 0], [1, 2, 3, 3], [0, 0, 0, 0]]),
]


@pytest.mark.parametrize(("lengths", "length", "want"), LENGTHS)
def test_lengths_table(lengths, length, want):
    got = segments_from_lengths(lengths, length)
    assert got.dtype == torch.int64
    assert got.tolist() == want


def test_lengths_as_a_tensor_equal_the_list():
    lengths = torch.tensor([[3, 0, 2], [1, 1, 1]], dtype=torch.int32)
    assert segments_from_lengths(lengths, 6).tolist() == segments_from_lengths(lengths.tolist(), 6).tolist()
    assert segments_from_lengths(lengths, 4).tolist() == [
        [1, 1, 1, 3],
        [1, 2, 3, 0],
    ]  # values are not read: the row is truncated


@pytest.mark.parametrize(
    ("lengths", "length", "sentence"),
    [
        ([3, 4], 6, "7 tokens together and the row has only 6"),
        ([[3], [3, -1]], 6, "a document has -1 tokens"),
        (torch.tensor([-2]), None, "a document has -2 tokens"),
    ],
)
def test_lengths_refused(lengths, length, sentence):
    with pytest.raises(ValueError, match=sentence):
        segments_from_lengths(lengths, length)


EOS = [  # tokens, eos ids, valid, segment ids
    ([5, 6, 9, 5, 9, 7, 7], 9, None, [1, 1, 1, 2, 2, 3, 3]),
    ([5, 6, 9, 5, 8, 7, 7], (8, 9), None, [1, 1, 1, 2, 2, 3, 3]),  # several ends, text after the last
    ([5, 6, 9, 5, 8, 7, 7], (8,), None, [1, 1, 1, 1, 1, 2, 2]),
    ([9, 9, 5], 9, None, [1, 2, 3]),  # a single end token is a document of one token
    ([5, 5, 5], 9, None, [1, 1, 1]),
    ([5, 9, 0, 0], 9, [1, 1, 0, 0], [1, 1, 0, 0]),
    ([5, 9, 9, 9], 9, [1, 1, 0, 0], [1, 1, 0, 0]),  # padded with the end id
    ([9, 9, 5, 9, 6], 9, [0, 0, 1, 1, 1], [0, 0, 1, 1, 2]),  # left padding with the end id
    ([5, 0, 0, 5, 9, 6], 9, [1, 0, 0, 1, 1, 1], [1, 0, 0, 1, 1, 2]),  # padding inside a document does not split it
    ([0, 0], 9, [0, 0], [0, 0]),
    ([], 9, None, []),
]


@pytest.mark.parametrize(("tokens", "eos_ids", "valid", "want"), EOS)
def test_eos_table(tokens, eos_ids, valid, want):
    tokens = torch.tensor([tokens], dtype=torch.int64)
    valid = None if valid is None else torch.tensor([valid])
    assert segments_from_eos(tokens, eos_ids, valid=valid).tolist() == [want]


def test_eos_ids_are_named():
    with pytest.raises(ValueError, match="eos_ids is empty"):
        segments_from_eos(torch.tensor([[1]]), ())


POSITIONS = [  # positions, valid, segment ids
    ([4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10], None, [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]),
    ([4, 5, 6, 7, 8], None, [1, 1, 1, 1, 1]),  # [4,5,6] and [7,8] cannot be distinguished from one document
    ([0, 1, 2, 0, 0, 0], None, [1, 1, 1, 0, 0, 0]),
    ([0, 1, 2, 1, 1, 1], None, [1, 1, 1, 0, 0, 0]),
    ([0, 1, 2, 2, 2, 2], None, [1, 1, 1, 0, 0, 0]),
    ([0, 1, 2, -1, -1], None, [1, 1, 1, 0, 0]),
    ([-1, -1, 0, 1], None, [0, 0, 1, 1]),
    ([0, 0, 0, 0], None, [0, 0, 0, 0]),
    ([0, 1, 0], None, [1, 1, 2]),  # a single last token is a document
    ([0], None, [1]),
    ([0, 0, 1], None, [0, 1, 1]),  # a token that continues into the next belongs to its document, repeated or not
    ([0, 0, 0, 1, 2], None, [0, 0, 1, 1, 1]),
    ([1, 1, 1, 0, 1, 2], None, [0, 0, 0, 1, 1, 1]),  # left padding as Hugging Face numbers it
    ([0, 1, 0, 0, 0, 1], None, [1, 1, 0, 0, 2, 2]),  # padding between documents
    ([0, 1, 2, 2, 2, 0, 1], None, [1, 1, 1, 0, 0, 2, 2]),
    ([0, 1, 1, 2], None, [1, 1, 2, 2]),  # repeated, but neither of them isolated
    ([3, 5, 0, 1], None, [1, 2, 3, 3]),  # isolated, but not repeated
    ([-1, 0, 0, 1], None, [0, 0, 1, 1]),
    ([0, -1, 1, 2], None, [1, 0, 1, 1]),
    ([0, 1, 2, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]),
    ([0, 1, 2, 3, 4, 5], [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]),
    ([0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 3, 4]),  # valid says that they are documents of one token
    ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]),
    ([0, 1, 1, 1, 2, 3], [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1]),  # the document continues after its padding
    ([0, 1, 7, 7, 0, 1], [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 2, 2]),
    ([3, 3], [0, 0], [0, 0]),
    ([7], None, [1]),
    ([], None, []),
]


@pytest.mark.parametrize(("positions", "valid", "want"), POSITIONS)
def test_positions_table(positions, valid, want):
    positions = torch.tensor([positions], dtype=torch.int64)
    valid = None if valid is None else torch.tensor([valid])
    assert segments_from_positions(positions, valid=valid).tolist() == [want]


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1], [0, 1, -1, -1], [-1, 0, 1], [-1, -1], []])
def test_strict_accepts_what_is_decided(positions):
    positions = torch.tensor([positions], dtype=torch.int64)
    assert segments_from_positions(positions, strict=True).tolist() == segments_from_positions(positions).tolist()


@pytest.mark.parametrize(
    ("positions", "sentence"),
    [
        ([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]], "row 1, index 0: .* other than 0"),
        ([[0, 1, 2, 7, 8]], "row 0, index 3: .* other than 0"),
        ([[4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10]], "row 0, index 0: .* other than 0"),
        ([[0, 1, 0, 0, 0]], "row 0, index 2: the position 0 stands alone, which is padding or a document .* valid="),
        ([[0, 1, 2], [0, 0, 1]], "row 1, index 0: the position 0 stands alone"),
        ([[0, 0, 0, 1, 2]], "row 0, index 0: the position 0 stands alone"),
        ([[0, 1, 0]], "row 0, index 2: the position 0 stands alone"),
        ([[0, 1, 0, 0, 1]], "row 0, index 2: the position 0 stands alone"),
        ([[0, 1, 2, 2]], "row 0, index 3: the position 2 stands alone"),
        ([[-1, 0, -1]], "row 0, index 1: the position 0 stands alone"),
        ([[0]], "row 0, index 0: the position 0 stands alone"),
    ],
)
def test_strict_refuses_what_is_not(positions, sentence):
    with pytest.raises(ValueError, match=sentence):
        segments_from_positions(torch.tensor(positions), strict=True)


def readings(positions: tuple[int, ...]) -> list[list[int]]:
    """All readings of a row in which documents start at 0 and padding has position 0 or less, by brute force."""
    found = []
    for kinds in itertools.product(("pad", "start", "next"), repeat=len(positions)):
        ids, document = [], 0
        for t, (kind, position) in enumerate(zip(kinds, positions, strict=True)):
            goes_on = t > 0 and kinds[t - 1] != "pad" and position == positions[t - 1] + 1
            if not {"pad": position <= 0, "start": position == 0, "next": goes_on}[kind]:
                break
            document += kind == "start"
            ids.append(0 if kind == "pad" else document)
        else:
            found.append(ids)
    return found


def test_strict_accepts_what_can_be_read_in_one_way_and_reads_it_so():
    for length in range(6):
        for positions in itertools.product((-1, 0, 1, 2), repeat=length):
            row, possible = torch.tensor([positions], dtype=torch.int64), readings(positions)
            if len(possible) == 1:
                assert segments_from_positions(row, strict=True).tolist() == possible
            else:
                with pytest.raises(ValueError, match=r"stands alone|begins at a position other than 0"):
                    segments_from_positions(row, strict=True)


def test_strict_with_valid_takes_repeats_as_said():
    positions = torch.tensor([[0, 1, 0, 0]])
    assert segments_from_positions(positions, valid=torch.tensor([[1, 1, 0, 0]]), strict=True).tolist() == [
        [1, 1, 0, 0]
    ]
    assert segments_from_positions(positions, valid=torch.ones(1, 4), strict=True).tolist() == [[1, 1, 2, 3]]


def test_valid_has_one_value_for_each_token():
    for convert in (segments_from_positions, lambda x, valid: segments_from_eos(x, 9, valid=valid)):
        with pytest.raises(ValueError, match=r"valid is \(4,\)"):
            convert(torch.zeros(2, 4, dtype=torch.int64), valid=torch.ones(4))


def test_one_source_needs_no_rule():
    tokens, positions = torch.tensor([[5, 9, 5]]), torch.tensor([[0, 1, 0]])
    assert segments(tokens=tokens, eos_ids=9).tolist() == [[1, 1, 2]]
    assert segments(positions=positions).tolist() == [[1, 1, 2]]


def test_two_sources_need_a_rule():
    both = {"tokens": torch.tensor([[5, 9, 5, 5]]), "eos_ids": 9, "positions": torch.tensor([[3, 0, 1, 2]])}
    with pytest.raises(ValueError, match="both eos_ids and positions are given"):
        segments(**both)
    assert segments(**both, rule="eos").tolist() == [[1, 1, 2, 2]]
    assert segments(**both, rule="positions").tolist() == [[1, 2, 2, 2]]
    with pytest.raises(ValueError, match="row 0, index 1: end tokens give segment 1 and positions segment 2"):
        segments(**both, rule="agree")
    assert segments(**both | {"positions": torch.tensor([[4, 5, 0, 1]])}, rule="agree").tolist() == [[1, 1, 2, 2]]


def test_strict_looks_only_at_the_positions_that_decide():
    both = {"tokens": torch.tensor([[5, 9]]), "eos_ids": 9, "positions": torch.tensor([[4, 5]]), "strict": True}
    assert segments(**both, rule="eos").tolist() == [[1, 1]]
    with pytest.raises(ValueError, match="row 0, index 0"):
        segments(**both, rule="agree")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "given is neither"),
        ({"eos_ids": 9}, "without tokens"),
        ({"tokens": torch.tensor([[1]])}, "given is neither"),
        ({"positions": torch.tensor([[1]]), "rule": "eos"}, "needs eos, given is positions"),
        ({"positions": torch.tensor([[1]]), "rule": "agree"}, "needs eos and positions, given is positions"),
        ({"positions": torch.tensor([[1]]), "rule": "both"}, "rule is 'both'"),
    ],
)
def test_what_is_missing_is_said(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        segments(**arguments)


RESTART = [  # segment ids, start, positions
    ([1, 1, 1, 2, 2, 3], 0, [0, 1, 2, 0, 1, 0]),
    ([1, 1, 1, 2, 2, 3], 4, [4, 5, 6, 0, 1, 0]),
    ([0, 0, 1, 1, 2, 0], 0, [0, 0, 0, 1, 0, 0]),
    ([0, 0, 1, 1, 2, 0], 7, [0, 0, 7, 8, 0, 0]),
    ([1, 1, 0, 0, 1, 2], 0, [0, 1, 0, 0, 2, 0]),  # counting continues after padding
    ([2, 2, 5, 2], 0, [0, 1, 0, 0]),  # any ids; one that reappears restarts at 0
    ([-1, 1, 1, -1, 1, 2, -7], 0, [0, 0, 1, 0, 2, 0, 0]),  # ids of 0 and below are padding
    ([0, 0], 3, [0, 0]),
    ([], 3, []),
]


@pytest.mark.parametrize(("ids", "start", "want"), RESTART)
def test_positions_restart_table(ids, start, want):
    assert positions_from_segments(torch.tensor([ids], dtype=torch.int64), start=start).tolist() == [want]


def test_positions_of_bytes_do_not_wrap_around():
    positions = torch.tensor([[254, 255, 0, 1]])
    for dtype in (torch.uint8, torch.uint16, torch.int32):
        assert segments_from_positions(positions.to(dtype)).tolist() == [[1, 1, 2, 2]]


def test_each_row_has_its_own_start():
    ids = torch.tensor([[1, 1, 2], [1, 2, 2]])
    assert positions_from_segments(ids, start=torch.tensor([4, 0])).tolist() == [[4, 5, 0], [0, 0, 1]]


def test_the_table_in_the_docs():
    rows = re.findall(r"^\| `(\[[-\d,]+\])`.*? \| `(.*?)` \| (.*?) \|$", CONTRACT.read_text(), re.MULTILINE)
    assert len(rows) == 7
    for positions, ids, strict in rows:
        row = torch.tensor([json.loads(positions)])
        assert segments_from_positions(row).tolist() == [json.loads(ids)]
        if strict == "the same":
            assert segments_from_positions(row, strict=True).tolist() == [json.loads(ids)]
        else:
            assert strict.startswith("refused: ")
            with pytest.raises(ValueError, match=r"stands alone|begins at a position other than 0"):
                segments_from_positions(row, strict=True)


def test_order_in_text_table():
    """Two words, an image of 2 x 2, a word; a second document; padding. In any order of the tokens."""
    positions = [[0] * 3, [1] * 3, [2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3], [4] * 3, [7] * 3, [8] * 3, [0] * 3]
    positions, ids = torch.tensor([positions] * 2), torch.tensor([[1] * 7 + [2] * 2 + [0], [3] * 7 + [1] * 2 + [0]])
    want = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 0]] * 2)
    assert text_order(positions, ids).equal(want)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert text_order(positions[:, order], ids[:, order]).equal(want[:, order])
    assert torch.vmap(text_order)(positions, ids).equal(want)
    assert text_order(positions.to("meta"), ids.to("meta")).shape == (2, 10)


rows = st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(0, 3), st.integers(0, 9))
def test_converters_agree(lengths, extra, start):
    length = max(sum(row) for row in lengths) + extra
    ids = segments_from_lengths(lengths, length)
    assert [[row.count(i + 1) for i in range(len(n))] for row, n in zip(ids.tolist(), lengths, strict=True)] == lengths
    valid = ids != 0
    starts = torch.full((len(lengths),), start)
    assert segments_from_positions(positions_from_segments(ids, start=starts), valid=valid).equal(ids)
    assert segments_from_positions(positions_from_segments(ids), valid=valid, strict=True).equal(ids)
    ends = valid & (ids != torch.nn.functional.pad(ids, (0, 1))[:, 1:])
    tokens = torch.full_like(ids, 5).masked_fill(ends, 9)
    assert segments(tokens=tokens, eos_ids=9, positions=positions_from_segments(ids), rule="agree", valid=valid).equal(
        ids
    )


padding = st.one_of(st.integers(-3, -1).map(lambda value: [value]), st.integers(0, 3).map(lambda value: [value] * 2))
gaps = st.builds(lambda pad, n: pad + pad[-1:] * n, padding, st.integers(0, 3)) | st.just([])


@settings(max_examples=200, deadline=None)
@given(gaps, st.lists(st.tuples(st.integers(0, 9), st.integers(2, 5), gaps), max_size=4))
def test_padding_is_found_where_it_stands(left, documents):
    """Padding by negative or repeated positions before, between and after documents of at least two tokens."""
    positions, wanted, end = list(left), [0] * len(left), -1
    for index, (first, length, gap) in enumerate(documents):
        while first in {p + 1 for p in (*positions[-1:], end) if p >= 0}:  # it would continue the token before it
            first += 10
        end = first + length - 1
        gap = [] if gap[:1] == [end + 1] else gap  # it would be one more token of the document
        positions += [*range(first, end + 1), *gap]
        wanted += [index + 1] * length + [0] * len(gap)
    row = torch.tensor([positions], dtype=torch.int64)
    assert segments_from_positions(row).tolist() == [wanted]


CONVERTERS = {  # each a function of one row of ids
    "lengths": lambda x: segments_from_lengths(x, 12),
    "eos": lambda x: segments_from_eos(x, (0, 3), valid=x != 2),
    "positions": segments_from_positions,
    "positions, valid": lambda x: segments_from_positions(x, valid=x != 2),
    "restart": lambda x: positions_from_segments(x, start=3),
}


@pytest.mark.parametrize("name", CONVERTERS)
def test_rows_under_vmap_equal_the_batch_and_nothing_is_written(name):
    convert, x = CONVERTERS[name], torch.randint(0, 4, (5, 12), generator=torch.Generator().manual_seed(0))
    version, want = x._version, convert(x)
    assert torch.vmap(convert)(x).equal(want)
    assert torch.stack([convert(row) for row in x]).equal(want)
    assert x._version == version


@pytest.mark.parametrize("name", CONVERTERS)
def test_one_graph(name):
    convert, x = CONVERTERS[name], torch.randint(0, 4, (2, 12), generator=torch.Generator().manual_seed(0))
    assert torch.compile(convert, fullgraph=True, backend="aot_eager")(x).equal(convert(x))


@pytest.mark.parametrize("name", CONVERTERS)
def test_values_are_not_read(name):
    # meta tensors have no values: reading one fails
    assert CONVERTERS[name](torch.zeros(2, 12, dtype=torch.int64, device="meta")).shape == (2, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_lengths_tokens_and_segments_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    values = torch.ones(1, 2).to(dtype)
    for name, function in (
        ("lengths", lambda: segments_from_lengths(values, 4)),
        ("lengths", lambda: segments_from_lengths(values.tolist(), 4)),
        ("tokens", lambda: segments_from_eos(values, 1)),
        ("segment_ids", lambda: positions_from_segments(values)),
    ):
        with pytest.raises(ValueError, match=f"{name} must be integers, not torch"):
            function()


def test_lengths_of_any_sequences_of_integers_are_taken() -> None:
    row = torch.tensor([1, 2, 2, 0])
    for lengths in ((1, 2), range(1, 3), torch.tensor([1, 2]), torch.tensor([1, 2]).numpy(), [*torch.tensor([1, 2])]):
        assert torch.equal(segments_from_lengths(lengths, 4), row)
    for rows in ([[1, 2], [1]], [range(1, 3), [1]], [torch.tensor([1, 2]), torch.tensor([1])]):
        assert torch.equal(segments_from_lengths(rows, 4), torch.stack([row, torch.tensor([1, 0, 0, 0])]))

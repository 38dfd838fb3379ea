"""Mask rules compared with a loop over pairs of tokens; layouts compared with tables."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs import (
    BidirectionalWindow,
    Causal,
    Chunk,
    Everything,
    Layout,
    Mask,
    Rule,
    SameSpan,
    Window,
    build_mask,
    document_layout,
)
from fnmodels.inputs.mask import causal_masks

# Padding at both ends, a document that begins above position 0, one of one token, and row 2 shuffled.
SEGMENTS = torch.tensor([[0, 1, 1, 1, 1, 2, 3, 3, 3, 0], [1] * 10, [2, 1, 2, 1, 0, 2, 1, 2, 1, 0]])
POSITIONS = torch.tensor([[9, 5, 6, 7, 8, 0, 0, 1, 2, 0], [*range(10)], [3, 1, 0, 0, 7, 2, 3, 1, 2, 0]])
SPANS = torch.tensor([[0, 1, 1, 0, 2, 2, 3, 3, 0, 0], [0, 1, 1, 1, 0, 0, 2, 2, 0, 0], [1, 2, 1, 2, 0, 0, 0, 3, 3, 3]])
# Reference predicates on (query position, key position, whether they share a span).
RULES: dict[str, tuple[Rule, Callable[[int, int, bool], bool]]] = {
    "causal": (Causal(), lambda q, k, s: k <= q),
    "everything": (Everything(), lambda q, k, s: True),
    "window1": (Causal() & Window(1), lambda q, k, s: k == q),
    "window3": (Causal() & Window(3), lambda q, k, s: q - 3 < k <= q),
    "window99": (Causal() & Window(99), lambda q, k, s: k <= q),
    "chunk4": (Causal() & Chunk(4), lambda q, k, s: k <= q and k // 4 == q // 4),
    "both_sides": (BidirectionalWindow(2), lambda q, k, s: abs(q - k) <= 2),
    "images": (Causal() | SameSpan(), lambda q, k, s: k <= q or s),
    "nested": ((Causal() | SameSpan()) & Window(3), lambda q, k, s: (k <= q or s) and q - k < 3),
}


def slow(seen: Callable[[int, int, bool], bool]) -> Tensor:
    out = torch.zeros(3, 1, 10, 10, dtype=torch.bool)
    for b in range(3):
        for q in range(10):
            for k in range(10):
                same = bool(SEGMENTS[b, q] == SEGMENTS[b, k] != 0)
                span = bool(SPANS[b, q] == SPANS[b, k] != 0)
                out[b, 0, q, k] = same and seen(int(POSITIONS[b, q]), int(POSITIONS[b, k]), span)
    return out


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    rule, seen = RULES[name]
    mask = build_mask(rule, POSITIONS, SEGMENTS, spans=SPANS)
    assert torch.equal(mask.dense(), slow(seen))
    mod, index = mask.mask_mod(), torch.arange(10)
    for b in range(3):
        by_index = mod(torch.tensor(b), torch.tensor(0), index[:, None], index[None])
        assert torch.equal(by_index, slow(seen)[b, 0])
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fnmodels.permute(mask, order).dense(), slow(seen)[:, :, order][..., order])
    part = mask.select(slice(2, 7), slice(1, 9), slice(1, 3))
    assert torch.equal(part.dense(), slow(seen)[1:3, :, 2:7, 1:9])


def test_a_mask_is_printed_by_its_shapes() -> None:
    mask = build_mask(Causal(), torch.arange(4)[None], torch.ones(1, 4, dtype=torch.long))
    assert repr(fnmodels.layout({"full": mask})).startswith("Layout(rows=1, length=4, documents=")
    assert repr(mask) == "Mask(q=[1, 4], kv=[1, 4], rule=Causal())"
    assert repr(tree.map(lambda _: 0, mask)) == "Mask(q=0, kv=0, rule=Causal())"  # as the in_dims of vmap


def test_rules_are_values() -> None:
    assert Causal() & Window(3) == Causal() & Window(3) != Causal() & Window(4)
    assert hash(Causal() | SameSpan()) == hash(Causal() | SameSpan())
    for make in (lambda: Window(0), lambda: Chunk(0), lambda: BidirectionalWindow(-1)):
        with pytest.raises(ValueError, match="at least"):
            make()
    with pytest.raises(ValueError, match="needs span ids"):
        build_mask(SameSpan(), POSITIONS, SEGMENTS).dense()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int8, torch.int32])
def test_integers_of_any_type_are_made_int64(dtype: torch.dtype) -> None:
    """In unsigned dtypes the differences of positions in windows would wrap around; in int8, 300 would."""
    for name in ("window3", "both_sides", "chunk4", "images"):
        rule, seen = RULES[name]
        mask = build_mask(rule, POSITIONS.to(dtype), SEGMENTS.to(dtype), spans=SPANS.to(dtype))
        assert all(t.dtype == torch.int64 for t in fnmodels.tree.leaves(mask))
        assert torch.equal(mask.dense(), slow(seen))
    assert document_layout(POSITIONS[1:2].to(dtype), SEGMENTS[1:2].to(dtype)).plain
    wide = build_mask(Causal() & Window(300), POSITIONS.to(dtype), SEGMENTS)
    assert torch.equal(wide.dense(), slow(RULES["causal"][1]))


@pytest.mark.parametrize("name", ["positions", "segment_ids", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_what_is_no_integer_is_refused(name: str, dtype: torch.dtype) -> None:
    given = {"positions": POSITIONS, "segment_ids": SEGMENTS, "spans": SPANS}
    with pytest.raises(ValueError, match=f"{name} must be integers, not {dtype}"):
        build_mask(Causal(), **{**given, name: given[name].to(dtype)})


def test_one_row_serves_all() -> None:
    one = build_mask(Causal(), POSITIONS[1:2], SEGMENTS[1:2])
    assert one.dense().shape == (1, 1, 10, 10)
    rows = build_mask(Causal(), POSITIONS[1:2].expand(3, 10), SEGMENTS[1:2].expand(3, 10))
    assert torch.equal(rows.dense(), one.dense().expand(3, 1, 10, 10))


def test_a_constructor_of_the_caller() -> None:
    def create(mod: object, batch: int, heads: int | None, queries: int, keys: int, *, device: torch.device) -> object:
        return (callable(mod), batch, heads, queries, keys, device.type)

    assert build_mask(Causal(), POSITIONS, SEGMENTS, create=create) == (True, 3, None, 10, 10, "cpu")


def test_masks_of_a_decoder() -> None:
    masks = causal_masks({"full": None, "sliding": 4, "full_nope": None}, POSITIONS, SEGMENTS)
    assert sorted(masks) == ["full", "full_nope", "sliding"] and masks["full"] is masks["full_nope"]
    assert masks["sliding"].rule == Causal() & Window(4) and masks["full"].rule == Causal()


@pytest.mark.parametrize(
    ("segment_ids", "positions", "rows", "plain"),
    [
        ([[1, 1, 1]], [[0, 1, 2]], (((0, 3),),), True),
        ([[1, 1, 1]], [[5, 6, 7]], (((0, 3),),), True),
        ([[1, 1, 2]], [[0, 1, 0]], (((0, 2), (2, 3)),), False),
        ([[1, 1, 1, 2, 2]], [[4, 5, 6, 7, 8]], (((0, 3), (3, 5)),), False),  # positions continue into the next document
        ([[0, 1, 1]], [[0, 0, 1]], (((1, 3),),), False),
        ([[1, 1, 0]], [[0, 1, 2]], (((0, 2),),), False),
        ([[1, 0, 2]], [[0, 1, 0]], (((0, 1), (2, 3)),), False),
        ([[0, 0, 0]], [[0, 0, 0]], ((),), False),
        ([[-1, 1, 1, -1, -2]], [[0, 0, 1, 3, 9]], (((1, 3),),), False),  # -1 is padding too
        ([[1, 1, 1]], [[0, 2, 1]], None, False),  # a permuted document
        ([[1, 2, 1]], [[0, 0, 1]], None, False),  # in two pieces
        ([[1, 1, 1]], [[0, 1, 0]], None, False),  # positions that restart without a new segment
        ([[1, 1, 1], [1, 2, 2]], [[0, 1, 2], [0, 0, 1]], (((0, 3),), ((0, 1), (1, 3))), False),
        ([[]], [[]], ((),), False),
    ],
)
def test_layout(segment_ids: list, positions: list, rows: tuple | None, plain: bool) -> None:
    ids, at = torch.tensor(segment_ids, dtype=torch.long), torch.tensor(positions, dtype=torch.long)
    found = document_layout(at, ids)
    assert found is None or isinstance(found, Layout)
    assert (None if found is None else found.rows) == rows
    assert found is None or (found.plain is plain and found.length == ids.shape[1] and hash(found) == hash(found))
    masks = {"a": build_mask(Causal(), at, ids), "b": build_mask(Causal() & Window(2), at, ids)}
    assert fnmodels.layout(masks) == found


@pytest.mark.parametrize("seed", range(40))
def test_layout_of_rows_that_are_almost_one_document_each(seed: int) -> None:
    """Each row is one document from any position, but for one entry in half of the cases, against a loop."""
    draw = torch.Generator().manual_seed(seed)
    rows, length = (int(torch.randint(low, 5, (), generator=draw)) for low in (0, 1))
    first, segment = (torch.randint(low, 4, (rows, 1), generator=draw) for low in (0, 1))
    positions, segments = first + torch.arange(length), segment.expand(rows, length).clone()
    if rows and seed % 2:
        entry = int(torch.randint(rows, (), generator=draw)), int(torch.randint(length, (), generator=draw))
        (positions if seed % 4 == 1 else segments)[entry] -= int(torch.randint(1, 4, (), generator=draw))
    found = document_layout(positions, segments)
    documents = [documents_of(at, ids) for at, ids in zip(positions.tolist(), segments.tolist(), strict=True)]
    if any(len({segment for *_, segment in row}) < len(row) for row in documents):
        assert found is None
        return
    assert found is not None and found.length == length
    assert found.rows == tuple(tuple((start, stop) for start, stop, _ in row) for row in documents)
    starts = [[start for start, *_ in row] for row in documents]
    assert found.firsts == tuple(tuple(positions[i, s].item() for s in row) for i, row in enumerate(starts))


def documents_of(positions: list[int], segments: list[int]) -> list[tuple[int, int, int]]:
    """(start, stop, segment) of each run of one segment and consecutive positions in a row, without padding."""
    runs: list[tuple[int, int, int]] = []
    for at, segment in enumerate(segments):
        follows = at and segment == segments[at - 1] and (segment <= 0 or positions[at] == positions[at - 1] + 1)
        runs = [*runs[:-1], (runs[-1][0], at + 1, segment)] if follows else [*runs, (at, at + 1, segment)]
    return [run for run in runs if run[2] > 0]


def test_no_layout_of_what_holds_no_documents() -> None:
    assert fnmodels.layout({"full": torch.ones(1, 1, 3, 3, dtype=torch.bool)}) is None
    q, kv = POSITIONS[1:2, 4:], POSITIONS[1:2]
    ones = torch.ones_like
    assert fnmodels.layout({"full": Mask(q, ones(q), kv, ones(kv), None, None, Causal())}) is None

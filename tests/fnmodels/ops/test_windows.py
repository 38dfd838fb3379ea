"""Keys compressed over time against loops over documents: packed, permuted, and with the tokens of a cache."""

import pytest
import torch
from torch import Tensor

from fnmodels.inputs.windows import Windows, build_windows, window_slots
from fnmodels.ops.attention import windows as ops
from fnmodels.ops.attention.windows import OfTokens, WindowKeys
from tests.support.cases import generic, positions_of, segments

RATIO, H = 3, 4
IDS = segments((7, 2, 9, -2), (-1, 3, 12, 4))  # documents shorter than a window, of one window and of several
POSITIONS = positions_of(IDS)
BIAS = {overlap: generic("b", torch.empty(RATIO, H * (1 + overlap))).double() for overlap in (False, True)}


def drawn(ids: Tensor, overlap: bool) -> OfTokens:
    numbers, gates = (generic(name, torch.empty(*ids.shape, H * (1 + overlap))).double() for name in "cz")
    return OfTokens(numbers, gates, POSITIONS, ids)


def by_loops(tokens: OfTokens, overlap: bool) -> dict[tuple[int, int, int], Tensor]:
    """{(row, document, last position): the sum of that window}."""
    found = {}
    at = {
        (b, int(s), int(p)): (b, t)
        for b in range(len(tokens.segments))
        for t, (s, p) in enumerate(zip(tokens.segments[b], tokens.positions[b], strict=True))
        if s > 0
    }
    for row, document, position in at:
        window = [(row, document, position - RATIO + 1 + j) for j in range(RATIO)]
        if position % RATIO != RATIO - 1 or any(token not in at for token in window):
            continue
        bias, pairs = BIAS[overlap], []
        for j, token in enumerate(window):
            c, z = tokens.numbers[at[token]], tokens.gates[at[token]] + bias[j]
            pairs.append((c[-H:], z[-H:]))
            before = (row, document, token[2] - RATIO)
            if overlap and before in at:
                c, z = tokens.numbers[at[before]], tokens.gates[at[before]] + bias[j]
                pairs.append((c[:H], z[:H]))
        c, z = (torch.stack(part) for part in zip(*pairs, strict=True))
        found[row, document, position] = (c * z.softmax(0)).sum(0)
    return found


def by_name(keys: WindowKeys) -> dict[tuple[int, int, int], Tensor]:
    names = zip(*(keys.segments > 0).nonzero(as_tuple=True), strict=True)
    return {(int(b), int(keys.segments[b, c]), int(keys.ends[b, c])): keys.keys[b, c] for b, c in names}


def agree(keys: WindowKeys, expected: dict[tuple[int, int, int], Tensor]) -> bool:
    got = by_name(keys)
    return got.keys() == expected.keys() and all(torch.allclose(got[n], expected[n], atol=1e-12) for n in got)


@pytest.mark.parametrize("overlap", [False, True])
def test_keys_are_those_of_loops_in_any_order(overlap: bool) -> None:
    tokens = drawn(IDS, overlap)
    slots = build_windows(POSITIONS, IDS, RATIO).slots
    expected = by_loops(tokens, overlap)
    assert len(expected) == 2 + 3 + 1 + 4 + 1
    assert agree(ops.weighted_sums(tokens, slots, BIAS[overlap], overlap=overlap), expected)
    order = torch.randperm(IDS.shape[1], generator=torch.Generator().manual_seed(0))
    turned = OfTokens(*(t[:, order] for t in tokens))
    assert agree(ops.weighted_sums(turned, slots[:, order], BIAS[overlap], overlap=overlap), expected)
    assert torch.equal(window_slots(POSITIONS[:, order], IDS[:, order], RATIO), slots[:, order])


def test_a_window_across_documents_is_found() -> None:
    """A planted bug: windows counted along the row, as if it were one document."""
    tokens = drawn(IDS, False)
    across = window_slots(torch.arange(IDS.shape[1]).expand_as(IDS), torch.ones_like(IDS), RATIO)
    assert not agree(ops.weighted_sums(tokens, across, BIAS[False], overlap=False), by_loops(tokens, False))


def test_a_document_that_begins_inside_a_window_has_no_key_of_it() -> None:
    positions = torch.tensor([[4, 5, 6, 7, 8, 0, 1]])
    slots = window_slots(positions, torch.tensor([[1, 1, 1, 1, 1, 2, 2]]), RATIO)
    assert slots.tolist() == [[-1, -1, 0, 0, 0, -1, -1]]
    assert window_slots(positions[:, :2], torch.ones(1, 2, dtype=torch.long), RATIO).tolist() == [[-1, -1]]


def test_a_query_sees_the_windows_that_have_ended() -> None:
    windows = build_windows(POSITIONS, IDS, RATIO)
    keys = ops.weighted_sums(drawn(IDS, False), windows.slots, BIAS[False], overlap=False)
    seen = ops.window_mask(windows, keys).dense()[:, 0]
    for b in range(2):
        for t in range(IDS.shape[1]):
            expected = (int(POSITIONS[b, t]) + 1) // RATIO if IDS[b, t] > 0 else 0
            assert int(seen[b, t].sum()) == expected
            assert not (keys.segments[b][seen[b, t]] != IDS[b, t]).any()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("sizes", [(1,) * 20, (4, 9, 7), (2, 18)])
def test_pieces_of_rows_have_the_keys_of_rows(sizes: tuple[int, ...], inplace: bool) -> None:
    """Each piece gets the last tokens of those before."""
    tokens, count = drawn(IDS, True), 2 * RATIO - 1
    keys = WindowKeys(torch.zeros(2, 7, H).double(), *(torch.zeros(2, 7, dtype=torch.long) for _ in range(2)))
    held = OfTokens(*(torch.zeros_like(t[:, :count]) for t in tokens))
    for piece in zip(*(t.split(sizes, 1) for t in tokens), strict=True):
        known = ops.continued(held, OfTokens(*piece))
        slots = window_slots(known.positions, known.segments, RATIO)
        found = ops.weighted_sums(known, slots, BIAS[True], overlap=True)
        last = ops.last_tokens(known, slots, RATIO)
        fresh = ops.in_slots(
            (torch.arange(known.positions.shape[1]) >= count).expand_as(last), last, len(found.ends[0])
        )
        keys = ops.appended(keys, found, fresh, inplace=inplace)
        held = ops.last_of(known, count)
    assert agree(keys, by_loops(tokens, True))


def test_gradients_of_every_kind() -> None:
    tokens, slots = drawn(IDS, True), window_slots(POSITIONS, IDS, RATIO)

    def run(numbers: Tensor, gates: Tensor, bias: Tensor) -> Tensor:
        return ops.weighted_sums(OfTokens(numbers, gates, POSITIONS, IDS), slots, bias, overlap=True).keys

    given = tuple(t.clone().requires_grad_() for t in (tokens.numbers, tokens.gates, BIAS[True]))
    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)

    def one(numbers: Tensor, gates: Tensor, windows: Windows) -> Tensor:
        row = OfTokens(numbers[None], gates[None], windows.positions[None], windows.segments[None])
        return ops.weighted_sums(row, windows.slots[None], BIAS[True], overlap=True).keys[0]

    rows = torch.func.vmap(one)(tokens.numbers, tokens.gates, Windows(slots, POSITIONS, IDS, RATIO))
    assert torch.allclose(rows, run(tokens.numbers, tokens.gates, BIAS[True]), atol=1e-12)

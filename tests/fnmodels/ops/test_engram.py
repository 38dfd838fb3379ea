"""Engram against a loop over each document: rows of n-grams, what they add to streams, gradients, planted bugs."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels.inputs.segments import preceding_tokens
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.ops.streams import engram
from fnmodels.ops.streams.engram import add_engram, engram_hashes, engram_rows
from fnmodels.ops.streams.ngrams import XorHash
from tests.support.cases import generic

VOCABULARY, PADDING, SIZE, HEADS, N, D, E = 20, 2, 4, 2, 3, 8, 5


def published(vocabulary: int) -> list[list[int]]:
    """The multipliers of the tables of layers 1 and 14, as DeepSeek draws them."""
    bound = (2**63 - 1) // vocabulary // 2
    drawn = [np.random.default_rng(10007 * layer).integers(0, bound, SIZE, dtype=np.int64) for layer in (1, 14)]
    return [(2 * numbers + 1).tolist() for numbers in drawn]


HOW = engram_hashes(published(VOCABULARY), HEADS, rows=50, padding=PADDING)
LENGTHS, EPS = (9, 1, 14), 1e-3
SEGMENTS = fnmodels.segments_from_lengths([list(LENGTHS)])
POSITIONS = fnmodels.positions_from_segments(SEGMENTS)


def ids() -> Tensor:
    """With tokens of padding's id, which end nothing, and with two that are no text."""
    found = torch.randint(VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(3))
    found[0, 5], found[0, 12], found[0, 17], found[0, 18] = PADDING, PADDING, -1, -1
    return found


def rows_by_loop(document: list[int], how: XorHash) -> list[list[int]]:
    """The row of each token for each head, of the tokens since the last one that is no text."""
    found = []
    for t in range(len(document)):
        tokens = document[: t + 1][::-1]
        tokens = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        tokens = [*tokens, *[PADDING] * SIZE]
        mixed, row, start = tokens[0] * how.multipliers[0], [], 0
        for order in range(1, SIZE):
            mixed ^= tokens[order] * how.multipliers[order]
            for size in how.sizes[(order - 1) * HEADS : order * HEADS]:
                row.append(mixed % size + start)
                start += size
        found.append(row)
    return found


def rows_of(segment_ids: Tensor = SEGMENTS, positions: Tensor = POSITIONS, how: XorHash = HOW[1]) -> Tensor:
    return engram_rows(ids(), preceding_tokens(ids(), positions, segment_ids, SIZE - 1), how)


def test_rows_equal_a_loop_over_each_document() -> None:
    for how in HOW:
        want = [row for document in ids()[0].split(LENGTHS) for row in rows_by_loop(document.tolist(), how)]
        assert rows_of(how=how)[0].tolist() == want and len({*map(tuple, want)}) > 18
    mixed = rows_of(SEGMENTS * 0 + 1, torch.arange(24)[None])[0]  # a planted bug: the documents of a row as one
    assert [bool((a != b).any()) for a, b in zip(mixed, rows_of()[0], strict=True)] == [
        t in (9, 10, 11, 12) for t in range(24)
    ]


def test_hashes_are_those_of_the_published_code() -> None:
    """Primes of all tables in a row, none of them twice."""
    assert [list(how.multipliers) for how in HOW] == published(VOCABULARY) and {how.end for how in HOW} == {PADDING}
    primes = [p for p in range(50, 200) if all(p % d for d in range(2, p))]
    assert HOW[0].sizes + HOW[1].sizes == tuple(primes[:12])
    # of DeepSeek V4.1 Flash, whose config.json has the rows of both tables
    flash = engram_hashes(published(99092), heads=8, rows=16_000_000, padding=2)
    assert [sum(how.sizes) for how in flash] == [384006168, 384016682]


def drawn() -> tuple[dict[str, Tensor], Tensor]:
    shapes = {"table": (sum(HOW[1].sizes), E), "key_proj": (N * D, 6 * E), "value_proj": (D, 6 * E)}
    shapes |= {"key_scale": (N, D), "query_scale": (N, D)}
    weights = {n: generic(n, torch.empty(s)).double().requires_grad_() for n, s in shapes.items()}
    return weights, generic("x", torch.empty(1, 24, N, D)).double().requires_grad_()


def added_by_loop(w: dict[str, Tensor], x: Tensor, row: list[int]) -> Tensor:
    """The streams [n, D] of one token."""
    e = torch.cat([w["table"][i] for i in row])
    streams = []
    for j in range(N):
        part = slice(j * D, (j + 1) * D)
        key = w["key_proj"][part] @ e
        key, query = (F.rms_norm(v, (D,), w[s][j], EPS) for v, s in ((key, "key_scale"), (x[j], "query_scale")))
        g = (key * query).sum() / D**0.5
        streams.append(x[j] + torch.sigmoid(g.sign() * g.abs().clamp(min=1e-6).sqrt()) * (w["value_proj"] @ e))
    return torch.stack(streams)


def difference() -> float:
    """The largest between both, of streams and gradients of everything."""
    weights, x = drawn()
    text, rows = ids() >= 0, rows_of()
    ours = engram.add_engram(weights, x, rows, text, eps=EPS)
    of_tokens = [row for document in ids()[0].split(LENGTHS) for row in rows_by_loop(document.tolist(), HOW[1])]
    theirs = torch.stack(
        [added_by_loop(weights, x[0, t], r) if text[0, t] else x[0, t] for t, r in enumerate(of_tokens)]
    )
    leaves = [x, *weights.values()]
    both = [torch.autograd.grad(y.sin().sum(), leaves) for y in (ours, theirs)]
    pairs = zip((ours[0], *both[0]), (theirs, *both[1]), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_what_is_added_equals_a_loop() -> None:
    assert difference() < 1e-10
    with invariant_rows(True):
        assert difference() < 1e-10


def without_sqrt(*given: Any, **how: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "sqrt", lambda x: x)
        return add_engram(*given, **how)


BUGS: dict[str, Any] = {
    "no root in the gate": without_sqrt,
    "a norm of all streams": lambda w, x, *rest, eps: add_engram(w, x, *rest, eps=eps + 1),
    "tokens that are no text have memory": lambda w, x, rows, text, eps: add_engram(w, x, rows, eps=eps),
    "keys of another stream": lambda w, *rest, **how: add_engram(
        w | {"key_proj": w["key_proj"].unflatten(0, (N, D)).roll(1, 0).flatten(0, 1)}, *rest, **how
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_of_engram_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram, "add_engram", BUGS[bug])
    assert difference() > 1e-3

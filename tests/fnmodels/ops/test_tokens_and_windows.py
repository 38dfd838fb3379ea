"""Places of last tokens and of windows against loops over documents: packed, permuted, rules, sinks and memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels.inputs import Causal, Everything, Window
from fnmodels.inputs.mask import Mask, build_mask
from fnmodels.inputs.rules import BidirectionalWindow, Chunk
from fnmodels.inputs.windows import build_windows
from fnmodels.ops import indexer
from fnmodels.ops.attention.choice import Choice
from fnmodels.ops.attention.select import attention
from fnmodels.ops.attention.windows import WindowKeys, in_slots, last_tokens
from fnmodels.ops.indexers import tokens_and_windows as ops
from fnmodels.ops.indexers.tokens_and_windows import TokensAndWindows, windows_of
from tests.support.cases import generic, positions_of, segments
from tests.support.largest import Largest

RATIO, NEAR, COUNT, HEADS, H = 3, 4, 2, 4, 5
IDS = segments((-2, 13, 2, 7), (4, 3, 16, -1))
POSITIONS = positions_of(IDS)
RULE = Causal() & Window(NEAR)


def keys_of_windows(positions: Tensor, ids: Tensor, ratio: int = RATIO) -> tuple[Any, WindowKeys]:
    """(`Windows` of the tokens, the windows that they complete, without keys)."""
    windows = build_windows(positions, ids, ratio)
    last, count = last_tokens(windows, windows.slots, ratio), positions.shape[1] // ratio  # type: ignore[arg-type]
    ends, documents = (in_slots(t.expand_as(last), last, count) for t in (positions, ids))
    return windows, WindowKeys(torch.zeros(*ends.shape, 1), ends, documents)


def names(ids: Tensor = IDS, positions: Tensor = POSITIONS) -> Tensor:
    """Of windows of each token's document, some of which have not ended, and one of no window."""
    drawn = torch.randint(0, 6, (*ids.shape, COUNT), generator=torch.Generator().manual_seed(0)) * RATIO + RATIO - 1
    return torch.cat((drawn, drawn.new_tensor([-1, 4]).expand(*ids.shape, 2)), -1)


def read(choices: Tensor | None, positions: Tensor = POSITIONS, ids: Tensor = IDS, rule: Any = RULE) -> Any:
    windows, keys = keys_of_windows(positions, ids)
    return TokensAndWindows(build_mask(rule, positions, ids), windows_of(keys, windows), choices)


def by_loops(choices: Tensor | None, positions: Tensor = POSITIONS, ids: Tensor = IDS) -> Tensor:
    """bool [B, Q, T + C], from documents and positions alone."""
    _, keys = keys_of_windows(positions, ids)
    tokens, count = ids.shape[1], keys.ends.shape[1]
    seen = torch.zeros(*ids.shape, tokens + count, dtype=torch.bool)
    for b, t in (ids > 0).nonzero().tolist():
        own, at = int(ids[b, t]), int(positions[b, t])
        for u in range(tokens):
            seen[b, t, u] = int(ids[b, u]) == own and 0 <= at - int(positions[b, u]) < NEAR
        for c in range(count):
            ended = int(keys.segments[b, c]) == own and int(keys.ends[b, c]) <= at
            seen[b, t, tokens + c] = ended and (choices is None or int(keys.ends[b, c]) in choices[b, t].tolist())
    return seen


def check(choices: Tensor | None) -> None:
    """In the order of the rows, and in another one of tokens."""
    expected = by_loops(choices)
    assert expected[IDS > 0].any(-1).all() and not expected[IDS <= 0].any()
    for made in (read(choices).places().dense(), read(choices).dense()):
        assert torch.equal(made[:, 0], expected)
    order = torch.randperm(IDS.shape[1], generator=torch.Generator().manual_seed(1))
    turned = (None if choices is None else choices[:, order], POSITIONS[:, order], IDS[:, order])
    assert torch.equal(read(*turned).places().dense()[:, 0], by_loops(*turned))


@pytest.mark.parametrize("most", [1, 1 << 24], ids=["query by query", "at once"])
@pytest.mark.parametrize("choices", [None, names()], ids=["all", "chosen"])
def test_places_are_the_keys_of_loops(choices: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_MOST", most)
    check(choices)


def test_places_have_as_many_as_are_read_and_hidden_ones_last() -> None:
    chosen, every = read(names()), read(None)
    assert (chosen.count, every.count, chosen.keys) == (NEAR + COUNT + 2, NEAR + 8, 24 + 8)
    for made in (chosen.places(), every.places()):
        near, far = made.seen.split((NEAR, made.seen.shape[-1] - NEAR), -1)
        assert not (far[..., 1:] & ~far[..., :-1]).any() and not (near[..., 1:] & ~near[..., :-1]).any()


def test_one_row_of_positions_serves_all_rows() -> None:
    positions, ids = torch.arange(10)[None], torch.ones(1, 10, dtype=torch.long)
    choices = torch.full((3, 10, 1), RATIO - 1)
    assert torch.equal(read(choices, positions, ids).places().dense(), read(choices, positions, ids).dense())
    assert read(None, positions, ids).places().shape == (1, 1, 10, 13)


def test_rows_that_are_shorter_than_a_window_have_tokens_alone() -> None:
    positions, ids = torch.arange(2)[None], torch.ones(1, 2, dtype=torch.long)
    for choices in (None, torch.full((1, 2, COUNT), -1)):
        short = read(choices, positions, ids)
        assert short.count == 2 and torch.equal(short.places().dense(), short.dense())
        assert short.dense()[0, 0].tolist() == [[True, False], [True, True]]


def test_a_row_that_begins_inside_a_document() -> None:
    positions, ids = torch.arange(700, 730)[None], torch.ones(1, 30, dtype=torch.long)
    for choices in (None, torch.full((1, 30, 1), 710)):
        middle = read(choices, positions, ids)
        assert torch.equal(middle.places().dense(), middle.dense())
    assert read(None, positions, ids).dense()[0, 0, -1, 30:].sum() == 9


@pytest.mark.parametrize("rule", [Everything(), BidirectionalWindow(2)], ids=repr)
def test_rules_without_a_reach_have_no_places(rule: Any) -> None:
    assert read(None, rule=rule).count == float("inf")
    assert replace(read(None), tokens=read(None).dense()[..., :24]).count == float("inf")


def test_other_rules_have_a_reach_too() -> None:
    one = read(names(), rule=Causal() & Chunk(5))
    assert one.count == 5 + COUNT + 2 and torch.equal(one.places().dense(), one.dense())
    one = read(names(), rule=Causal())
    assert one.count == 24 + COUNT + 2 and torch.equal(one.places().dense(), one.dense())


def test_memory_is_linear_in_what_is_read() -> None:
    """No tensor is larger than the places of all queries, where a mask is 30 times as large."""
    length = 2000
    positions, ids = torch.arange(length)[None], torch.ones(1, length, dtype=torch.long)
    choices = torch.full((1, length, COUNT), RATIO - 1)
    with Largest() as largest:
        read(choices, positions, ids).places()
    assert largest.numel <= length * (NEAR + COUNT)
    with Largest() as largest:
        read(choices, positions, ids).dense()
    assert largest.numel >= length**2


def of_loops(q: Tensor, keys: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """Attention over keys that are values, with one sink per head."""
    out = torch.zeros_like(q)
    for b, t in (IDS > 0).nonzero().tolist():
        own = keys[b, seen[b, t], 0]
        weights = torch.cat((0.3 * q[b, t] @ own.T, sinks[:, None]), 1).softmax(-1)[:, :-1]
        out[b, t] = weights @ own
    return out


def results(run: Callable[..., Tensor], seen: Any) -> list[Tensor]:
    """The output, and the gradients of queries, keys and sinks."""
    length = IDS.shape[1] + IDS.shape[1] // RATIO
    q, keys, sinks = (
        generic(name, torch.empty(shape)).double().requires_grad_()
        for name, shape in (("q", (2, IDS.shape[1], HEADS, H)), ("k", (2, length, 1, H)), ("s", (HEADS,)))
    )
    out = run(q, keys, sinks, seen)
    return [out, *torch.autograd.grad(out.sin().sum(), (q, keys, sinks))]


def gathered(q: Tensor, keys: Tensor, sinks: Tensor, seen: Choice) -> Tensor:
    return attention(q, keys, keys, seen, kernel="sparse", scale=0.3, sinks=sinks)


def far_off(run: Callable[..., Tensor] = gathered) -> float:
    """The largest difference to loops, of outputs and gradients."""
    choices = names()
    pairs = zip(results(run, read(choices).places()), results(of_loops, by_loops(choices)), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_keys_that_are_values_are_read_once_and_have_both_gradients() -> None:
    """As loops, and as the same keys and values given apart."""
    apart = lambda q, keys, sinks, seen: attention(  # noqa: E731
        q, keys, keys.clone(), seen, kernel="sparse", scale=0.3, sinks=sinks
    )
    assert far_off() < 1e-12 and far_off(apart) < 1e-12


@pytest.mark.parametrize(
    ("tokens", "queries", "ratio", "heads", "width", "faster"),
    [
        (384, 384, 4, 8, 64, False),  # gathering takes 1.2 to 1.8 times as long as a mask
        (384, 384, 4, 64, 128, True),  # 0.5 times
        (1024, 1024, 128, 8, 64, True),  # 0.5 times
        (1024, 1, 128, 8, 64, False),  # 2.3 times
        (1024, 1, 128, 64, 64, False),  # 1.3 times
        (1024, 8, 128, 8, 64, False),  # 1.2 times
        (1024, 1, 128, 64, 512, True),  # 0.3 times
        (16384, 1, 128, 64, 512, True),
    ],
)
def test_places_pay_where_they_were_measured_to(
    tokens: int, queries: int, ratio: int, heads: int, width: int, faster: bool
) -> None:
    positions = torch.arange(tokens)[None]
    windows, keys = keys_of_windows(positions, torch.ones_like(positions), ratio)
    mask = build_mask(Causal() & Window(128), positions, torch.ones_like(positions))
    some = TokensAndWindows(mask.select(slice(tokens - queries, None), slice(None)), windows_of(keys, windows), None)
    assert some.pays(torch.empty(1, queries, heads, width)) == faster


def one_less(tokens: Mask) -> int:
    return NEAR - 1


SIDE = ops._side_by_side


def ends_later(keys: WindowKeys, windows: Any, among: Tensor | None = None) -> Any:
    """A window is seen by the token before its last one."""
    found = windows_of(keys, windows, among)
    return replace(found, mask=replace(found.mask, kv_positions=found.positions - 1))


def across_documents(keys: WindowKeys, windows: Any, among: Tensor | None = None) -> Any:
    """Windows of every document are seen, by position alone."""
    found, same = windows_of(keys, windows, among), torch.ones_like
    mask = replace(found.mask, q_segments=same(IDS), kv_segments=same(keys.segments))
    return replace(found, mask=mask, q_segments=same(IDS), segments=same(keys.segments))


def tokens_for_windows(near: Choice, far: Choice, rows: int) -> Choice:
    """Places of windows are counted from the first token."""
    return SIDE(near, replace(far, index=(far.index - 1).clamp(min=0)), rows)


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (ops, "_near", one_less),
        (globals(), "windows_of", ends_later),
        (globals(), "windows_of", across_documents),
        (ops, "_side_by_side", tokens_for_windows),
    ],
    ids=["a window of tokens off by one", "a window ends later", "windows across documents", "places off by one"],
)
def test_planted_bugs_of_places_are_found(where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(None)
    if isinstance(where, dict):
        right = where[name]
        monkeypatch.setitem(where, name, lambda *given: wrong_of(right, wrong, *given))
    else:
        monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        check(None)


def wrong_of(right: Any, wrong: Any, *given: Any) -> Any:
    """`wrong`, within which the right function has its place again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "windows_of", right)
        return wrong(*given)


def test_a_sink_that_counts_twice_is_found() -> None:
    """In the gathered keys, once in each of both parts."""

    def twice(q: Tensor, keys: Tensor, sinks: Tensor, seen: Choice) -> Tensor:
        return gathered(q, keys, sinks + torch.tensor(2.0).log(), seen)

    assert far_off() < 1e-12 and far_off(twice) > 1e-3

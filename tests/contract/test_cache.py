"""A cache changes no result: what is generated step by step equals one forward pass, for every family."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.cache import init, prepare, step_plan, value
from fnmodels.ops.slots import SLOTTED, SlotUse
from fnmodels.ops.torch_internals import PRIVATE
from tests.support.cases import (
    Batch,
    Case,
    attention_of,
    batch_of,
    cases,
    causal,
    generic_params,
    layer_structures,
    off,
    richest,
    segments,
    short,
)

STRUCTURES = tuple(case for case in layer_structures() if causal(case))
FAMILIES = tuple(short(case) for case in richest() if causal(case))
RAGGED = segments((26,), (9, -17), (-1, 19, -6))
PACKED = segments((5, 9, 3, -1), (1, 2, 12, 3), (-2, 8, -2, 6))
WIDE = torch.float64

every_structure = pytest.mark.parametrize("case", STRUCTURES, ids=str)
every_family = pytest.mark.parametrize("case", FAMILIES, ids=str)


def has_ring(case: Case) -> bool:
    """Whether layers of the case see a few tokens only."""
    return any(slots.ring for slots in fnmodels.init_cache(case.config, 1, 64).slots.values())


def ring_size(case: Case) -> int:
    cache = fnmodels.init_cache(case.config, 1, 64)
    return min(slots.segments.shape[1] for slots in cache.slots.values())


FIRST = {attention_of(case): case for case in reversed(STRUCTURES)}.values()  # with each form of attention
# Windows are of slots: one variant of each form of attention.
RINGS = {attention_of(case): case for case in FAMILIES if has_ring(case)}.values()
every_ring = pytest.mark.parametrize("case", list(RINGS), ids=str)
SLIDING = next(case for case in cases() if case.family == "gemma" and has_ring(case) and causal(case))
Caches = Callable[[Any, int], Any]  # (cache, tokens in it after the step) -> the cache of the step


def stepped(
    params: Any,
    batch: Batch,
    cache: Any,
    chunks: tuple[int, ...],
    *,
    kernel: str = "math",
    run: Any = fnmodels.decode,
    before: Caches = lambda cache, _: cache,
    positions: bool = True,
) -> tuple[Tensor, Any]:
    """(logits [B, S, V], the cache) after the batch's tokens in these chunks; `before` changes the cache of each."""
    logits, start = [], 0
    for length in chunks:
        part = batch.take(slice(None), slice(start, start := start + length))
        cache = before(cache, start)
        known = {"positions": part.positions} if positions else {}
        prepared = fnmodels.prepare_step(batch.config, part.tokens, cache, segment_ids=part.segment_ids, **known)
        found, cache = run(params, *prepared, cache, config=batch.config, kernel=kernel)
        logits.append(found)
    return torch.cat(logits, dim=1), cache


def empty(batch: Batch, *, dtype: torch.dtype = WIDE, rings: bool = True, room: int | None = None) -> Any:
    rows, length = batch.tokens.shape
    return fnmodels.init_cache(batch.config, rows, room or length, dtype=dtype, rings=rings, length=batch.length)


def far(batch: Batch, got: Tensor, wanted: Tensor) -> float:
    """The largest difference at tokens that are no padding, relative as in `off`."""
    return off(got[batch.valid], wanted[batch.valid])


@every_structure
def test_cached_equals_uncached(case: Case) -> None:
    """Ragged rows, in chunks longer and shorter than windows and token by token: rings, all slots, and growing.

    The first with each form of attention in all three, the others in rings and one in turn.
    """
    batch, params = batch_of(case.config, RAGGED), generic_params(case.config, WIDE)
    wanted, turn = batch.forward(params), STRUCTURES.index(case) % 2
    ringed, _ = stepped(params, batch, empty(batch), (14, 1, 3, 8))
    assert far(batch, ringed, wanted) < 1e-12
    if case in FIRST or turn == 0:
        static, _ = stepped(params, batch, empty(batch, rings=False), (20, 1, 1, 4), kernel="auto")
        assert far(batch, static, wanted) < 1e-12
    if case in FIRST or turn == 1:
        growing, _ = stepped(params, batch, empty(batch, room=2), (2, 9, 15), before=fnmodels.resize, positions=False)
        assert far(batch, growing, wanted) < 1e-12


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.lists(st.integers(0, 26), min_size=1, max_size=3),
    st.booleans(),
)
def test_any_chunks_of_any_rows(chunks: list[int], lengths: list[int], rings: bool) -> None:
    total = sum(chunks)
    rows = segments(*[(min(n, total), min(n, total) - total) for n in (total, *lengths)])
    batch, params = batch_of(SLIDING.config, rows), generic_params(SLIDING.config, WIDE)
    got, _ = stepped(params, batch, empty(batch, rings=rings), tuple(chunks), positions=False)
    assert far(batch, got, batch.forward(params)) < 1e-12


@every_family
def test_token_by_token_in_place(case: Case) -> None:
    """fp32, with the kernels that "auto" takes, which need no mask where rows have one length: every other family."""
    ragged = FAMILIES.index(case) % 2 == 0
    segment_ids = segments((16,), (6, -10), (-1, 11, -4)) if ragged else segments((12,), (12,))
    batch, params = batch_of(case.config, segment_ids), generic_params(case.config)
    wanted = batch.forward(params)
    chunks = (segment_ids.shape[1] - 4, *[1] * 4)
    got, _ = stepped(params, batch, empty(batch, dtype=torch.float32), chunks, kernel="auto", run=fnmodels.decode_)
    scale = float(wanted[batch.valid].abs().max())
    assert far(batch, got, wanted) * max(1.0, scale) <= 2e-5 * scale


@every_family
def test_packed_prompts(case: Case) -> None:
    """Several documents in a row, some of which go on in a later chunk."""
    batch, params = batch_of(case.config, PACKED), generic_params(case.config, WIDE)
    wanted = batch.forward(params)
    got, cache = stepped(params, batch, empty(batch, rings=False), (6, 1, 11), positions=False)
    assert far(batch, got, wanted) < 1e-12
    if cache.slots:
        with pytest.raises(ValueError, match="Row 0 of the cache holds several documents"):
            fnmodels.prepare_step(case.config, batch.tokens[:, :1], fnmodels.resize(cache, 20))


@every_ring
def test_around_the_window(case: Case) -> None:
    """The prompt ends at W - 1, W, W + 1 and 2 W tokens, in one chunk and with another begun."""
    size, params = ring_size(case), generic_params(case.config, WIDE)
    for length in (size - 1, size, size + 1, 2 * size):
        batch = batch_of(case.config, segments((length + 3,), (length + 1, -2)))
        wanted = batch.forward(params)
        for chunks in ((length, 1, 1, 1), (1, length, 2), (length + 3,)):
            got, cache = stepped(params, batch, empty(batch, room=64), chunks)
            assert far(batch, got, wanted) < 1e-12, (length, chunks)
            assert min(slots.segments.shape[1] for slots in cache.slots.values()) == size


def with_nan(cache: Any) -> Any:
    """The cache with NaN in all empty slots."""

    def spoiled(kind: str, name: str, tensor: Tensor) -> Tensor:
        if name not in SLOTTED:
            return tensor
        free = ~cache.slots[kind].occupied
        return tensor.masked_fill(free.reshape(*free.shape, *[1] * (tensor.ndim - 2)), torch.nan)

    layers = zip(cache.kinds, cache.layers, strict=True)
    return replace(cache, layers=tuple({n: spoiled(kind, n, t) for n, t in entry.items()} for kind, entry in layers))


@every_family
def test_neighbours_and_empty_slots_change_no_bit(case: Case) -> None:
    params = generic_params(case.config)
    batch = batch_of(case.config, segments((16,), (9, -7), (12, -4)))
    tokens = batch.tokens.clone()
    tokens[1:] = (tokens[1:] + 1) % case.config.vocab_size
    chunks = (9, 1, 6)
    new = functools.partial(empty, batch, dtype=torch.float32, room=24)
    wanted, _ = stepped(params, batch, new(), chunks)
    got, _ = stepped(params, replace(batch, tokens=tokens), new(), chunks)
    assert torch.equal(got[0], wanted[0]) and not torch.equal(got[1], wanted[1])
    run = (fnmodels.decode, fnmodels.decode_)[FAMILIES.index(case) % 2]
    got, _ = stepped(params, batch, new(), chunks, before=lambda cache, _: with_nan(cache), run=run)
    assert torch.equal(got[batch.valid], wanted[batch.valid])


@pytest.mark.parametrize("counted", [True, False])
def test_nan_written_in_place_is_found(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch does not count writes: then no cache is known to be clean."""
    batch, params = batch_of(SLIDING.config, segments((8,), (5, -3))), generic_params(SLIDING.config)
    wanted, _ = stepped(params, batch, empty(batch, dtype=torch.float32), (6, 2), run=fnmodels.decode_)

    def spoiled(cache: Any, _: int) -> Any:
        for entry, other in zip(cache.layers, with_nan(cache).layers, strict=True):
            for name, tensor in entry.items():
                tensor.copy_(other[name])
        return cache

    cache = empty(batch, dtype=torch.float32)
    assert value.is_clean(cache)
    if not counted:
        monkeypatch.setitem(PRIVATE, "Tensor._version", None)
        assert not value.is_clean(cache) and not value.is_clean(empty(batch, dtype=torch.float32))
    got, _ = stepped(params, batch, cache, (6, 2), run=fnmodels.decode_, before=spoiled)
    assert torch.equal(got[batch.valid], wanted[batch.valid])


def test_nan_written_in_inference_mode_is_found() -> None:
    """Torch counts no writes there, so no cache is known to be clean."""
    with torch.inference_mode():
        cache = empty(batch_of(SLIDING.config, segments((8,), (5, -3))), dtype=torch.float32)
        assert not value.is_clean(cache)
        next(iter(cache.layers[0].values())).fill_(torch.nan)
        assert not value.is_clean(value.known_clean(cache))


@every_family
def test_rows_taken_inserted_and_truncated_are_as_rebuilt(case: Case) -> None:
    params = generic_params(case.config, WIDE)
    batch = batch_of(case.config, segments((15,), (15,), (15,)))
    _, cache = stepped(params, batch, empty(batch, room=20), (12,))
    more = batch.take(slice(None), slice(12, 15))

    def follow(cache: Any, part: Batch = more) -> Tensor:
        return stepped(params, part, cache, (part.tokens.shape[1],), positions=False)[0]

    wanted = follow(cache)
    # in another order, and one of them twice
    rows = [2, 0, 0]
    got = follow(fnmodels.take(cache, rows), replace(more, tokens=more.tokens[rows]))
    assert off(got, wanted[rows]) < 1e-12
    # a row made alone, in a smaller cache, put where another was
    alone = batch.take(slice(1, 2), slice(0, 12))
    small = fnmodels.init_cache(case.config, 1, 12, dtype=WIDE, length=batch.length)
    _, small = stepped(params, alone, small, (4, 8))
    joined = fnmodels.insert(fnmodels.take(cache, [0, 2, 2]), 1, small)
    assert off(follow(joined), wanted) < 1e-12
    assert off(follow(fnmodels.cache.insert_(fnmodels.take(cache, [0, 2, 2]), [1], small)), wanted) < 1e-12
    # tokens that were tried and dropped
    if any(name not in SLOTTED for entry in cache.layers for name in entry):
        with pytest.raises(ValueError, match="Recurrent layers cannot go back"):
            fnmodels.truncate(cache, 11)
        return
    wrong = replace(more, tokens=(more.tokens + 1) % case.config.vocab_size)
    _, tried = stepped(params, wrong.take(slice(None), slice(0, 1)), cache, (1,))
    assert off(follow(fnmodels.truncate(tried, 12)), wanted) < 1e-12
    _, static = stepped(params, batch, empty(batch, room=20, rings=False), (12,))
    _, tried = stepped(params, wrong, static, (3,))
    assert off(follow(fnmodels.truncate(tried, torch.tensor([12, 12, 12]))), wanted) < 1e-12


def test_rows_taken_have_the_slots_of_a_head_side_by_side() -> None:
    """As in a new cache: attention reads them as one run."""
    config = next(case.config for case in FAMILIES if case.family == "llama")
    cache = fnmodels.init_cache(config, 2, 8)
    for name, held in fnmodels.take(cache, [1, 0, 1]).layers[0].items():
        assert held.stride()[1:] == cache.layers[0][name].stride()[1:] and held.stride(1) < held.stride(2)


def test_a_ring_cannot_go_back_past_what_it_holds() -> None:
    params, batch = generic_params(SLIDING.config, WIDE), batch_of(SLIDING.config, segments((20,)))
    _, cache = stepped(params, batch, empty(batch), (20,))
    with pytest.raises(ValueError, match="Row 0 cannot go back to 15 tokens"):
        fnmodels.truncate(cache, 15)


@pytest.mark.parametrize("case", [c for c in FAMILIES if c.family in ("llama", "gemma", "deepseek")], ids=str)
def test_functional_steps_leave_the_cache_and_in_place_ones_use_it_up(case: Case) -> None:
    params, batch = generic_params(case.config), batch_of(case.config, segments((12,), (12,)))
    _, cache = stepped(params, batch, empty(batch, dtype=torch.float32, room=16), (12,))
    leaves = tree.leaves(cache)
    versions, copies = [leaf._version for leaf in leaves], [leaf.clone() for leaf in leaves]
    prepared = fnmodels.prepare_step(case.config, batch.tokens[:, :1], cache)
    fnmodels.decode(params, *prepared, cache, config=case.config)
    fnmodels.prefill(params, *prepared, cache, config=case.config)
    for other in (fnmodels.take(cache, [1, 0]), fnmodels.resize(cache, 20), fnmodels.truncate(cache, 11)):
        fnmodels.insert(cache, [1, 0], fnmodels.resize(other, 16))
    assert [leaf._version for leaf in leaves] == versions and all(map(torch.equal, leaves, copies))
    held = {leaf.data_ptr() for leaf in tree.leaves(cache.layers)}
    _, after = fnmodels.decode_(params, *prepared, cache, config=case.config)
    assert {leaf.data_ptr() for leaf in tree.leaves(after.layers)} == held
    with pytest.raises(RuntimeError, match="used up by decode_"):
        fnmodels.prepare_step(case.config, batch.tokens[:, :1], cache)


def test_which_logits() -> None:
    config = SLIDING.config
    params, batch = generic_params(config, WIDE), batch_of(config, segments((8,), (5, -3), (-2, 4, -2)))
    cache = empty(batch)
    prepared = fnmodels.prepare_step(config, batch.tokens, cache, segment_ids=batch.segment_ids)
    run = functools.partial(fnmodels.prefill, params, *prepared, cache, config=config, kernel="math")
    everywhere, rows = run(at="all")[0], torch.arange(3)
    assert off(run()[0], everywhere[rows, [7, 4, 5]]) < 1e-12
    assert off(run(at=torch.tensor([1, 2, 3]))[0], everywhere[rows, [1, 2, 3]]) < 1e-12
    with pytest.raises(ValueError, match="at is 'first'"):
        run(at="first")


def shortened(cache: Any) -> Any:
    recurrent = any(name not in SLOTTED for entry in cache.layers for name in entry)
    return fnmodels.resize(cache, 8) if recurrent else fnmodels.truncate(cache, 7)


@every_family
def test_functions_of_a_cache_share_no_memory_with_it(case: Case) -> None:
    """In-place steps on what they return leave the older cache as it is, and steps on that leave theirs."""
    batch, params = batch_of(case.config, segments((8,), (6, -2))), generic_params(case.config, WIDE)
    _, cache = stepped(params, batch.take(slice(None), slice(0, 7)), empty(batch, room=8), (7,))
    prepared = fnmodels.prepare_step(case.config, batch.tokens[:, 7:], cache)
    made = {
        "take": fnmodels.take(cache, [0, 1]),
        "insert": fnmodels.insert(cache, [0], fnmodels.take(cache, [0])),
        "the same room": fnmodels.resize(cache, 8),
        "more room": fnmodels.resize(cache, 12),
        "truncate": shortened(cache),
        "decode": fnmodels.decode(params, *prepared, cache, config=case.config)[1],
    }
    memory = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(cache) if leaf.numel()}
    for name, other in made.items():
        assert not memory & {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(other) if leaf.numel()}, name


def test_a_cache_that_was_cut_short_in_its_memory_is_used_up() -> None:
    config = next(case.config for case in FAMILIES if case.family == "llama")
    batch = batch_of(config, segments((8,)))
    _, cache = stepped(generic_params(config, WIDE), batch, empty(batch, rings=False), (8,))
    held = [leaf.data_ptr() for leaf in tree.leaves(cache.layers)]
    after = fnmodels.cache.truncate_(cache, 3)
    assert held == [leaf.data_ptr() for leaf in tree.leaves(after.layers)]
    with pytest.raises(RuntimeError, match="used up"):
        fnmodels.truncate(cache, 3)


def test_errors_name_the_row() -> None:
    config = SLIDING.config
    params, batch = generic_params(config, WIDE), batch_of(config, segments((8,), (6, -2)))
    _, cache = stepped(params, batch, empty(batch), (8,))
    ask = functools.partial(fnmodels.prepare_step, config)
    with pytest.raises(ValueError, match="Row 0 of the cache holds 8 of 8 tokens, and 1 more"):
        ask(batch.tokens[:, :1], cache)
    cache = fnmodels.resize(cache, 16)
    with pytest.raises(ValueError, match="Row 1 has a new token whose position is not above"):
        ask(batch.tokens[:, :1], cache, positions=torch.tensor([[8], [5]]))
    with pytest.raises(ValueError, match="Row 1 would hold several documents"):
        ask(batch.tokens[:, :1], cache, segment_ids=torch.tensor([[1], [2]]))
    with pytest.raises(ValueError, match="has 2 rows and the tokens 1"):
        ask(batch.tokens[:1, :1], cache)
    inputs, masks, freqs = ask(batch.tokens[:, :1], cache)
    with pytest.raises(ValueError, match="prepare_step makes the masks, of the same cache"):
        fnmodels.decode(params, inputs, masks, freqs, fnmodels.resize(cache, 17), config=config)
    whole = next(case for case in cases() if case.name == "llama").config
    with pytest.raises(ValueError, match="at least one row and one slot"):
        fnmodels.init_cache(whole, 0, 4)


@pytest.mark.parametrize("case", [c for c in cases() if not causal(c)], ids=str)
def test_a_model_that_sees_later_tokens_has_no_cache(case: Case) -> None:
    with pytest.raises(ValueError, match="tokens see later ones"):
        fnmodels.init_cache(case.config, 1, 8)


# Planted bugs. Each is one of the mistakes that other caches were found to have.


def with_other_keys(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    made = prepare.with_slots
    return lambda mask, slots: change(made(mask, slots), slots)


def resized_window(mask: Any, by: int) -> Any:
    rule = mask.rule
    if hasattr(rule, "right") and hasattr(rule.right, "size"):
        rule = replace(rule, right=replace(rule.right, size=rule.right.size + by))
    return replace(mask, rule=rule)


def by_slot(mask: Any, slots: Any) -> Any:
    places = torch.arange(slots.segments.shape[1]).expand_as(slots.segments)
    return replace(mask, kv_positions=torch.cat((places, mask.q_positions), dim=1))


def by_count(mask: Any, slots: Any) -> Any:
    """One count for the batch says what is occupied."""
    places = torch.arange(slots.segments.shape[1]).expand_as(slots.segments)
    occupied = (places < slots.occupied.sum(1).max()).long()
    return replace(mask, kv_segments=torch.cat((occupied, mask.q_segments), dim=1))


def late(held: Any, segment_ids: Tensor, by: int = 1) -> Tensor:
    return NEXT_POSITIONS(held, segment_ids) + by


NEXT_POSITIONS, PLAN, REACH = prepare._next_positions, step_plan._plan, init.reach_of


def evicted_first(mask: Any, slots: Any, free: bool, **how: Any) -> Any:
    """The new tokens are written, and what is left is attended to."""
    plan = PLAN(mask, slots, free, **how)
    if plan.use.keys != "both":
        return plan
    seen = replace(mask, kv_positions=plan.after.positions, kv_segments=plan.after.segments)
    return plan._replace(mask=seen, use=SlotUse("slots"))


def kept_masks(mask: Any, slots: Any, free: bool, **how: Any) -> Any:
    """The mask of the step is used as it is, as without the shortcuts that read the slots again."""
    plan = PLAN(mask, slots, free, **how)
    return plan if plan.use.keys == "both" else plan._replace(mask=mask, use=SlotUse("both"))


def first_of_chunk(self: Any, positions: Tensor, segments: Tensor) -> Tensor:
    """The first tokens of a chunk stay in a ring instead of the last."""
    room, valid = self.segments.shape[1], segments > 0
    if not self.ring:
        return INDEX_OF(self, positions, segments)
    oldest = positions.where(valid, 1 << 40).amin(dim=1, keepdim=True)
    return (positions % room).where(valid & (positions < oldest + room), room)


def slots_of_the_first_row(index: Tensor, slots: Any) -> int | None:
    first = int(index[0, 0])
    return first if first + index.shape[1] <= slots.segments.shape[1] else None


def masks_by(change: Callable[[Any, Any], Any]) -> Any:
    return prepare, "with_slots", with_other_keys(change)


INDEX_OF = value.Slots.index_of
UNCHECKED, AS_GIVEN = (prepare, "check_values", lambda *_: None), (step_plan, "_plan", kept_masks)
BUGS: dict[str, list[tuple[Any, str, Any]]] = {
    "position + 1": [(prepare, "_next_positions", late)],
    "position - 1": [(prepare, "_next_positions", functools.partial(late, by=-1)), UNCHECKED],
    "window + 1": [masks_by(lambda mask, _: resized_window(mask, 1))],
    "window - 1": [masks_by(lambda mask, _: resized_window(mask, -1))],
    "a ring one too small": [(init, "reach_of", lambda rule: REACH(rule) - 1)],
    "index instead of position": [masks_by(by_slot), AS_GIVEN],
    "mask from a count": [masks_by(by_count), AS_GIVEN],
    "evict before attend": [(step_plan, "_plan", evicted_first)],
    "the first of a chunk stay": [(value.Slots, "index_of", first_of_chunk)],
    "all rows at the first one's slots": [(step_plan, "_first", slots_of_the_first_row)],
}


@pytest.mark.parametrize("bug", [*BUGS, None])
def test_planted_bugs_are_found(bug: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of uneven lengths, in chunks that are longer than the window and shorter."""
    batch, params = batch_of(SLIDING.config, RAGGED), generic_params(SLIDING.config, WIDE)
    wanted = batch.forward(params)
    for owner, name, wrong in BUGS.get(bug or "", []):
        monkeypatch.setattr(owner, name, wrong)
    got, _ = stepped(params, batch, empty(batch, room=30), (10, 1, 3, 12), positions=False)
    assert (far(batch, got, wanted) < 1e-12) == (bug is None)


def test_a_step_without_tokens_is_refused() -> None:
    config = FAMILIES[0].config
    with pytest.raises(ValueError, match=r"tokens is \[2, 0\]; a step has at least one token of each row"):
        fnmodels.prepare_step(config, torch.zeros(2, 0, dtype=torch.long), fnmodels.init_cache(config, 2, 8))

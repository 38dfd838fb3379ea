"""Steps whose rows are known to the host have the bits of steps that read them, and notice whatever changed."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.cache import known_rows, next_steps, prepare
from fnmodels.cache.known_rows import KnownRows, rows_of
from fnmodels.cache.next_steps import NextSteps
from fnmodels.cache.value import facts_of
from fnmodels.inputs.rules import Everything
from fnmodels.models.common.family import field_of
from tests.contract.test_cache import FAMILIES, has_ring
from tests.support.cases import Case, cases, generic_params, segments, tokens_of

EQUAL, RAGGED = (7, 7), (9, 4)
STEPS = 8  # past the windows of tiny models, so that rings wrap
SLIDING = next(c for c in FAMILIES if has_ring(c) and field_of(c.config, "attention_softcap") is None)
LLAMA = next(case for case in cases() if case.family == "llama" and case.config.layer_kinds.count("full") == 2)


def prompted(case: Case, lengths: tuple[int, ...], **cache: Any) -> tuple[Any, Any, Tensor]:
    """(params, a cache with a prompt of each length, the next tokens [B, 1])."""
    params, longest = generic_params(case.config, torch.float32), max(lengths)
    rows = segments(*((n, n - longest) for n in lengths))
    tokens = tokens_of(case.config, len(lengths), longest)
    held = fnmodels.init_cache(case.config, len(lengths), longest + STEPS, dtype=torch.float32, **cache)
    prepared = fnmodels.prepare_step(case.config, tokens, held, segment_ids=rows)
    _, held = fnmodels.decode(params, *prepared, held, config=case.config)
    return params, held, tokens[:, :1]


def decoded(
    case: Case, lengths: tuple[int, ...], run: Any, named: bool, rings: bool = True, **options: Any
) -> tuple[list[Tensor], Any]:
    """Logits of each step and the last cache. named: positions are arguments, so that nothing is known."""
    params, cache, token = prompted(case, lengths, rings=rings)
    logits = []
    for count in range(STEPS):
        ids = torch.ones_like(token)
        known = {"segment_ids": ids, "positions": torch.tensor(lengths)[:, None] + count} if named else {}
        prepared = fnmodels.prepare_step(case.config, token, cache, **known)
        out, cache = run(params, *prepared, cache, config=case.config, **options)
        logits.append(out)
    return logits, cache


def stepped(case: Case, lengths: tuple[int, ...]) -> tuple[list[Tensor], Any]:
    """`decoded` by `eager_step`."""
    params, cache, token = prompted(case, lengths)
    logits, step = [], fnmodels.cache.eager_step(case.config)
    for _ in range(STEPS):
        out, cache = step(params, token, cache)
        logits.append(out)
    return logits, cache


# Ways to run steps: all of them on a few, with and without rings, one in turn on the others.
WAYS = {
    "equal": (EQUAL, fnmodels.decode_),
    "ragged": (RAGGED, fnmodels.decode),
    "equal-eager_step": (EQUAL, None),
    "ragged-eager_step": (RAGGED, None),
}
FIRST = [case for case in FAMILIES if case.family in ("llama", "gemma", "deepseek", "qwen3_next") or case is SLIDING]


def _runs() -> list[Any]:
    """Which case in which way."""
    runs = []
    for index, case in enumerate(FAMILIES):
        for number, (name, (lengths, run)) in enumerate(WAYS.items()):
            if case in FIRST or index % len(WAYS) == number:
                runs.append(pytest.param(case, lengths, run, id=f"{case}-{name}"))
    return runs


@pytest.mark.parametrize(("case", "lengths", "run"), _runs())
def test_known_rows_have_the_bits_of_rows_that_are_read(case: Case, lengths: tuple[int, ...], run: Any) -> None:
    """run: what is called with prepared inputs; None: `eager_step`, which prepares them itself."""
    known, after = decoded(case, lengths, run, named=False) if run else stepped(case, lengths)
    run = run or fnmodels.decode_
    read, wanted = decoded(case, lengths, run, named=True)
    assert all(torch.equal(a, b) for a, b in zip(known, read, strict=True))
    for kind, slots in after.slots.items():
        held = slots.occupied
        assert torch.equal(held, wanted.slots[kind].occupied)
        assert torch.equal(slots.positions[held], wanted.slots[kind].positions[held])
        assert torch.equal(slots.segments, wanted.slots[kind].segments)


@pytest.mark.parametrize("kernel", ["math", "invariant"])
@pytest.mark.parametrize("lengths", [EQUAL, RAGGED], ids=str)
def test_other_kernels_too(lengths: tuple[int, ...], kernel: str) -> None:
    known, _ = decoded(SLIDING, lengths, fnmodels.decode_, named=False, kernel=kernel)
    read, _ = decoded(SLIDING, lengths, fnmodels.decode_, named=True, kernel=kernel)
    assert all(torch.equal(a, b) for a, b in zip(known, read, strict=True))


def test_rows_of_most_structures_are_known() -> None:
    """So the tests above are of known rows: not of models without slots and of positions of several axes."""
    caches = [(case, prompted(case, RAGGED)[1]) for case in FAMILIES]
    unknown = [case for case, cache in caches if cache.slots and rows_of(cache) is None]
    assert all(any(slots.highest is not None for slots in cache.slots.values()) for c, cache in caches if c in unknown)
    assert len(unknown) < len(caches) / 4


def test_an_eager_step_makes_no_masks_for_rows_that_see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    params, cache, token = prompted(LLAMA, EQUAL)
    step, used = fnmodels.cache.eager_step(LLAMA.config), cache
    _, cache = step(params, token, cache)
    with pytest.raises(RuntimeError, match="used up by decode_"):
        step(params, token, used)
    monkeypatch.setattr(prepare, "with_slots", lambda *_: pytest.fail("A mask was made."))
    for _ in range(2):
        _, cache = step(params, token, cache)
    with pytest.raises(pytest.fail.Exception, match="A mask was made"):
        step(params, token, cache, segment_ids=torch.ones_like(token))


def test_an_eager_step_refuses_what_decode_refuses() -> None:
    params, cache, token = prompted(LLAMA, EQUAL)
    step, room = fnmodels.cache.eager_step(LLAMA.config), STEPS
    with pytest.raises(ValueError, match="The cache has 2 rows and the tokens 3"):
        step(params, token[[0, 1, 1]], cache)
    with pytest.raises(ValueError, match="The token ids go from"):
        step(params, token * 0 - 1, cache)
    with pytest.raises(ValueError, match="params has 1 layers"):
        step(params | {"layers": params["layers"][:1]}, token, cache)
    for wrong in ((cache, token), (token[:, 0], cache)):
        with pytest.raises(TypeError, match=r"A step takes params, tokens \[B, S\] and a Cache, in this order"):
            step(params, *wrong)
    for _ in range(room):
        _, cache = step(params, token, cache)
    with pytest.raises(ValueError, match="do not fit"):
        step(params, token, cache)


@pytest.mark.parametrize("case", [LLAMA, SLIDING], ids=str)
def test_a_step_writes_its_slots_in_place_and_copies_none(case: Case) -> None:
    params, cache, token = prompted(case, EQUAL)
    step = fnmodels.cache.eager_step(case.config)
    places = {kind: (slots.positions.data_ptr(), slots.segments.data_ptr()) for kind, slots in cache.slots.items()}
    _, cache = step(params, token, cache)
    assert {kind: (s.positions.data_ptr(), s.segments.data_ptr()) for kind, s in cache.slots.items()} == places
    assert rows_of(cache) == KnownRows(tuple(n + 1 for n in EQUAL), (1, 1))


@pytest.mark.parametrize("wrong", ["ids", "at"])
def test_a_step_that_fails_leaves_the_slots_as_they_were(wrong: str) -> None:
    params, cache, token = prompted(LLAMA, EQUAL)
    before = fnmodels.tree.map(Tensor.clone, cache.slots)
    prepared = fnmodels.prepare_step(LLAMA.config, token * 0 - 1 if wrong == "ids" else token, cache)
    with pytest.raises(ValueError, match="token ids" if wrong == "ids" else "at is"):
        fnmodels.decode_(params, *prepared, cache, config=LLAMA.config, at="nowhere" if wrong == "at" else "all")
    for held, want in zip(fnmodels.tree.leaves(cache.slots), fnmodels.tree.leaves(before), strict=True):
        assert torch.equal(held, want)
    assert rows_of(cache) == KnownRows(EQUAL, (1, 1))


def test_a_step_counts_on_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    params, cache, token = prompted(LLAMA, RAGGED)
    assert rows_of(cache) == KnownRows(RAGGED, (1, 1))
    monkeypatch.setattr(known_rows, "_read", lambda slots: pytest.fail("The values were read."))
    monkeypatch.setattr(prepare, "check_values", lambda *_: pytest.fail("The values were checked."))
    for count in (1, 2):
        prepared = fnmodels.prepare_step(LLAMA.config, token, cache)
        _, cache = fnmodels.decode_(params, *prepared, cache, config=LLAMA.config)
        assert rows_of(cache) == KnownRows(tuple(n + count for n in RAGGED), (1, 1))


def test_steps_are_prepared_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = next_steps.prepare_text
    monkeypatch.setattr(next_steps, "AHEAD", 3)
    monkeypatch.setattr(next_steps, "prepare_text", lambda *a, **k: made.append(a[1].shape) or real(*a, **k))
    known, _ = decoded(SLIDING, RAGGED, fnmodels.decode_, named=False)
    assert made == [(2, 3), (2, 3), (2, 2)]  # for 8 steps, for which there is room
    read, _ = decoded(SLIDING, RAGGED, fnmodels.decode_, named=True)
    assert all(torch.equal(a, b) for a, b in zip(known, read, strict=True))


@pytest.mark.parametrize("what", ["table", "positions", "valid"])
def test_steps_that_were_written_into_are_prepared_anew(what: str) -> None:
    params, cache, token = prompted(LLAMA, RAGGED)
    run = functools.partial(fnmodels.decode, config=LLAMA.config)
    inputs, masks, tables = fnmodels.prepare_step(LLAMA.config, token, cache)
    (tables["full"] if what == "table" else inputs[what]).zero_()
    changed = {kind: table.clone() for kind, table in tables.items()}
    assert torch.equal(run(params, inputs, masks, tables, cache)[0], run(params, inputs, masks, changed, cache)[0])
    again = fnmodels.prepare_step(LLAMA.config, token, cache)
    ones, positions = torch.ones_like(token), torch.tensor(RAGGED)[:, None]
    wanted = fnmodels.prepare_step(LLAMA.config, token, cache, positions=positions, segment_ids=ones)
    for have, want in zip(fnmodels.tree.leaves(again), fnmodels.tree.leaves(wanted), strict=True):
        assert torch.equal(have, want)


def test_steps_of_another_length_or_config_are_prepared_anew() -> None:
    _, cache, token = prompted(LLAMA, EQUAL)
    _, _, tables = fnmodels.prepare_step(LLAMA.config, token, cache)
    other = replace(LLAMA.config, rope=replace(LLAMA.config.rope, theta=77.0))
    assert not torch.equal(fnmodels.prepare_step(other, token, cache)[2]["full"], tables["full"])
    same, lengths = functools.partial(fnmodels.prepare_step, LLAMA.config, token, cache), [1000, 500 * 2]
    made = [same(length=length) and facts_of(cache).steps for length in lengths]
    assert made[0] is made[1]
    assert torch.equal(same(length=torch.tensor([99, 99]))[2]["full"], tables["full"])


def _shifted(cache: Any) -> Any:
    for slots in cache.slots.values():
        slots.positions.add_(5)
    return cache


def _emptied(cache: Any) -> Any:
    for slots in cache.slots.values():
        slots.segments[0, 2:] = 0
    return cache


def _replaced(cache: Any) -> Any:
    longer = {kind: replace(slots, positions=slots.positions + 5) for kind, slots in cache.slots.items()}
    return replace(cache, slots=longer)


CHANGES: list[Callable[[Any], Any]] = [
    _shifted,
    _emptied,
    _replaced,
    lambda cache: fnmodels.truncate(cache, torch.tensor([3, 2])),
    lambda cache: fnmodels.take(cache, torch.tensor([1, 0])),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_cache_is_read_anew(change: Callable[[Any], Any]) -> None:
    params, cache, token = prompted(LLAMA, RAGGED)
    prepared = fnmodels.prepare_step(LLAMA.config, token, cache)
    _, cache = fnmodels.decode(params, *prepared, cache, config=LLAMA.config)
    cache = change(cache)
    (slots,) = cache.slots.values()
    after = slots.positions.where(slots.occupied, -1).amax(1, keepdim=True) + 1
    inputs, masks, tables = fnmodels.prepare_step(LLAMA.config, token, cache)
    assert torch.equal(inputs["positions"], after)
    ones = torch.ones_like(token)
    wanted = fnmodels.prepare_step(LLAMA.config, token, cache, positions=after, segment_ids=ones)
    run = functools.partial(fnmodels.decode, config=LLAMA.config)
    assert torch.equal(run(params, inputs, masks, tables, cache)[0], run(params, *wanted, cache)[0])


@pytest.mark.parametrize("how", ["in place", "replaced", "of another cache"])
def test_changed_masks_are_read_anew(how: str) -> None:
    """The first row's token becomes padding, which is not written."""
    params, cache, token = prompted(LLAMA, EQUAL)
    inputs, masks, tables = fnmodels.prepare_step(LLAMA.config, token, cache)
    ((kind, mask),) = masks.items()
    gone = torch.tensor([[0], [1]])
    if how == "in place":
        mask.q_segments.copy_(gone)
        mask.kv_segments[:, -1:] = gone
    elif how == "replaced":
        masks = {kind: replace(mask, q_segments=gone)}
    else:
        _, other, _ = prompted(LLAMA, (5, 7))
        masks = fnmodels.prepare_step(LLAMA.config, token, other, segment_ids=gone)[1]
        masks = {kind: replace(masks[kind], q_positions=mask.q_positions)}
    _, after = fnmodels.decode(params, inputs, masks, tables, cache, config=LLAMA.config)
    assert after.slots[kind].occupied.sum(1).tolist() == [7, 8]
    assert rows_of(after) == KnownRows((7, 8), (1, 1))


def test_masks_of_an_earlier_cache_are_not_those_of_the_next() -> None:
    params, cache, token = prompted(LLAMA, EQUAL)
    first = fnmodels.prepare_step(LLAMA.config, token, cache)
    _, after = fnmodels.decode(params, *first, cache, config=LLAMA.config)
    assert rows_of(after) == KnownRows((8, 8), (1, 1))
    _, twice = fnmodels.decode(params, *first, after, config=LLAMA.config)  # positions 7 again
    (slots,) = twice.slots.values()
    assert slots.positions[:, 7:9].tolist() == [[7, 7], [7, 7]]
    assert rows_of(twice) is None


def test_a_full_row_is_refused_as_ever() -> None:
    params, cache, token = prompted(LLAMA, RAGGED)
    for _ in range(STEPS):
        prepared = fnmodels.prepare_step(LLAMA.config, token, cache)
        _, cache = fnmodels.decode_(params, *prepared, cache, config=LLAMA.config)
    with pytest.raises(ValueError, match=r"Row 0 of the cache holds 17 of 17 tokens, and 1 more do not fit"):
        fnmodels.prepare_step(LLAMA.config, token, cache)


def test_rows_of_later_documents_are_known() -> None:
    cache = fnmodels.init_cache(LLAMA.config, 2, 9)
    params, tokens = generic_params(LLAMA.config, torch.float32), tokens_of(LLAMA.config, 2, 3)
    ids = torch.tensor([[2], [3]]).expand(2, 3)
    prepared = fnmodels.prepare_step(LLAMA.config, tokens, cache, segment_ids=ids)
    _, cache = fnmodels.decode(params, *prepared, cache, config=LLAMA.config)
    assert rows_of(cache) == KnownRows((3, 3), (2, 3))
    prepared = fnmodels.prepare_step(LLAMA.config, tokens[:, :1], cache)
    _, cache = fnmodels.decode(params, *prepared, cache, config=LLAMA.config)
    assert rows_of(cache) == KnownRows((4, 4), (2, 3))
    assert all(slots.segments[:, 3].tolist() == [2, 3] for slots in cache.slots.values())


@pytest.mark.parametrize("bug", ["slot", "mask", "window", "step"])
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "slot":
        monkeypatch.setattr(KnownRows, "slots", lambda self, room, ring: [min(n, room - 1) for n in self.lengths])
    elif bug == "mask":
        monkeypatch.setattr(KnownRows, "equal", property(lambda self: True))
    elif bug == "step":
        monkeypatch.setattr(NextSteps, "of", lambda self, rows: self.steps[0])
    else:
        monkeypatch.setattr(known_rows, "simplify", lambda rule, q, kv: Everything())
    case = SLIDING
    run = functools.partial(decoded, case, RAGGED if bug == "mask" else EQUAL, fnmodels.decode, rings=bug != "window")
    known, read = run(named=False)[0], run(named=True)[0]
    assert not all(torch.equal(a, b) for a, b in zip(known, read, strict=True))

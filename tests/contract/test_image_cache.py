"""With images anywhere cached equals uncached, for every vision-language family."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fnmodels
from fnmodels import tree
from fnmodels.cache import captured
from fnmodels.models.common.family import parsed
from fnmodels.ops.slots import SLOTTED
from tests.contract import test_compiled_step
from tests.support.cases import off
from tests.support.image_texts import (
    ImageBatch,
    ImageCase,
    image_batch,
    image_cases,
    image_forms,
    image_params,
    types_of,
)
from tests.support.recorded import graphs_on_the_cpu

graphs = test_compiled_step.graphs
CASES = image_cases()
every_case = pytest.mark.parametrize("case", CASES, ids=str)
# A cache gets nothing else of a model than its form has.
every_form = pytest.mark.parametrize("case", image_forms(), ids=str)
several_axes = pytest.mark.parametrize(
    "case", [case for case in CASES if hasattr(case.family, "image_positions")], ids=str
)
bidirectional = pytest.mark.parametrize(
    "case", [case for case in CASES if hasattr(case.family, "image_masks") and case.name != "gemma4_e"], ids=str
)
ANSWER = 4  # tokens after the prompts
# Rows of text with images, and where their prompts are divided: between images and text.
PROMPTS: tuple[Any, ...] = (
    ((2, 3), 3, (1, 4), 4 + ANSWER),  # an image first
    (5, (3, 2), 1, (2, 2), ANSWER),  # and last
    (9 + ANSWER,),
    (2, (2, 2), (3, 2), 2 + ANSWER),  # one after the other
)
ENDS = (17, 16, 9, 14)
CUTS = ((6, 13), (5, 12), (0, 9), (1, 12))
INSIDE = ((3, 11), (7, 14), (2, 3), (5, 6))  # within images


def empty(batch: ImageBatch, **how: Any) -> Any:
    rows, length = batch.tokens.shape
    how = {"dtype": batch.features[0].dtype, "capacity": length, "length": length} | how
    return fnmodels.init_cache(batch.case.config, rows, **how)


def stepped(
    params: Any,
    batch: ImageBatch,
    cache: Any,
    borders: Sequence[Sequence[int]],
    *,
    given: bool = False,
    run: Any = fnmodels.decode,
    kernel: str = "math",
) -> tuple[Tensor, Any]:
    """(logits [B, S, V], the cache) of rows in chunks that end at borders[i][b]; `given`: positions are."""
    config, logits = batch.case.config, torch.zeros(())
    starts: Sequence[int] = [0] * len(batch.tokens)
    for ends in borders:
        part, positions = batch.part(starts, ends)
        known: dict[str, Any] = {"positions": positions} if given else {"grids": part.grids}
        prepared = fnmodels.prepare_step(
            config, part.tokens, cache, segment_ids=part.segment_ids, places=part.places, **known, **part.types()
        )
        prepared, options = part.arguments(params, prepared)
        found, cache = run(params["text"], *prepared, cache, config=config.text, kernel=kernel, **options)
        if logits.ndim == 0:
            logits = found.new_zeros(*batch.tokens.shape, found.shape[-1])
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            logits[b, start:end] = found[b, : end - start]
        starts = ends
    return logits, cache


def then_text(params: Any, batch: ImageBatch, cache: Any, **how: Any) -> tuple[Tensor, Any]:
    """(logits [B, ANSWER, V], the cache) of the tokens after the prompts, one by one, as text at positions of their
    own."""
    config, logits = batch.case.config.text, []
    run, options = how.pop("run", fnmodels.decode), {"kernel": "math", **how}
    for i in range(ANSWER):
        tokens = torch.stack([row[end + i] for row, end in zip(batch.tokens, ENDS, strict=True)])
        prepared = fnmodels.prepare_step(config, tokens[:, None], cache)
        found, cache = run(params["text"], *prepared, cache, config=config, **options)
        logits.append(found)
    return torch.cat(logits, 1), cache


def answers(logits: Tensor) -> Tensor:
    return torch.stack([row[end : end + ANSWER] for row, end in zip(logits, ENDS, strict=True)])


def goes_back(cache: Any) -> bool:
    """Whether all that it holds is slots."""
    return all(name in SLOTTED for entry in cache.layers for name in entry)


def far(batch: ImageBatch, got: Tensor, wanted: Tensor, ends: Sequence[int] = ENDS) -> float:
    valid = (torch.arange(got.shape[1]) < torch.tensor(ends)[:, None]) & (batch.segment_ids > 0)
    return off(got[valid], wanted[valid])


WAYS = tuple(itertools.product(((), CUTS), (True, False)))  # all of them on each form, one in turn on the others


@pytest.mark.parametrize(
    ("case", "borders", "rings"),
    [
        pytest.param(case, borders, rings, id=f"{case}-{'chunks' if borders else 'whole'}-{rings}")
        for number, case in enumerate(CASES)
        for borders, rings in (WAYS if case in image_forms() else WAYS[number % len(WAYS) :][:1])
    ],
)
def test_cached_equals_uncached(case: ImageCase, borders: Any, rings: bool) -> None:
    """Prompts with images at the start, at the end, adjacent and none, at once and in chunks; then text."""
    batch, params = image_batch(case, PROMPTS), image_params(case)
    wanted = batch.forward(params)
    chunks = (*zip(*borders, strict=True), ENDS)
    got, cache = stepped(params, batch, empty(batch, rings=rings), chunks)
    assert far(batch, got, wanted) < 1e-12
    later, _ = then_text(params, batch, cache)
    assert off(later, answers(wanted)) < 1e-12


@every_form
def test_in_place_with_the_usual_kernels(case: ImageCase) -> None:
    """fp32; slots that are not written hold NaN."""
    batch, params = image_batch(case, PROMPTS, dtype=torch.float32), image_params(case, torch.float32)
    wanted, cache = batch.forward(params), empty(batch)
    got, cache = stepped(params, batch, cache, (*zip(*CUTS, strict=True), ENDS), run=fnmodels.decode_, kernel="auto")
    later, _ = then_text(params, batch, cache, run=fnmodels.decode_, kernel="auto")
    scale = float(wanted[batch.segment_ids > 0].abs().max())
    assert far(batch, got, wanted) * max(1.0, scale) <= 2e-5 * scale
    assert off(later, answers(wanted)) * max(1.0, scale) <= 2e-5 * scale


@every_case
def test_given_positions_are_those_of_axes(case: ImageCase) -> None:
    """Chunks that end within images where these are causal; steps with positions [B, 1, 3] after them."""
    batch, params = image_batch(case, PROMPTS), image_params(case)
    wanted, positions = batch.forward(params), batch.positions()
    cuts = CUTS if case in bidirectional.args[1] else INSIDE
    got, cache = stepped(params, batch, empty(batch), (*zip(*cuts, strict=True), ENDS), given=True)
    assert far(batch, got, wanted) < 1e-12
    for i in range(ANSWER):
        tokens, at = (
            torch.stack([row[e + i] for row, e in zip(t, ENDS, strict=True)]) for t in (batch.tokens, positions)
        )
        prepared = fnmodels.prepare_step(case.config, tokens[:, None], cache, positions=at[:, None])
        found, cache = fnmodels.decode(params["text"], *prepared, cache, config=case.config.text, kernel="math")
        assert off(found[:, 0], answers(wanted)[:, i]) < 1e-12


@several_axes
def test_text_goes_on_after_the_highest_axis(case: ImageCase) -> None:
    """Also where the caller numbers it by [B, 1], and where an image is the last of the prompt."""
    batch, params = image_batch(case, (((2, 3), 1),)), image_params(case)
    assert batch.positions()[0, 6].tolist() == [3, 3, 3]
    wanted = batch.forward(params)[:, 6]
    for known in ({}, {"positions": torch.tensor([[3]])}, {"positions": torch.tensor([[[3, 3, 3]]])}):
        _, cache = stepped(params, batch, empty(batch), ((6,),))
        prepared = fnmodels.prepare_step(case.config.text, batch.tokens[:, 6:], cache, **known)
        assert prepared[0]["positions"].tolist() == [[[6, 3, 3, 3]]]
        found, _ = fnmodels.decode(params["text"], *prepared, cache, config=case.config.text, kernel="math")
        assert off(found[:, 0], wanted) < 1e-12
    behind = {"positions": torch.tensor([[6]])}  # the order, which is no position of an axis
    prepared = fnmodels.prepare_step(case.config.text, batch.tokens[:, 6:], cache, **behind)
    found, _ = fnmodels.decode(params["text"], *prepared, cache, config=case.config.text, kernel="math")
    assert off(found[:, 0], wanted) > 1e-4


@several_axes
def test_vectors_replace_the_inputs_of_a_step(case: ImageCase) -> None:
    """Text goes on after an image whose call had bare vectors, and after one with inputs of the caller's own."""
    batch, params = image_batch(case, (((2, 3), 2),)), image_params(case)
    wanted, text = batch.forward(params), case.config.text
    part, _ = batch.part((0,), (6,))
    cache = empty(batch)
    prepared = fnmodels.prepare_step(case.config, part.tokens, cache, places=part.places, grids=part.grids)
    (inputs, *rest), edits = part.arguments(params, prepared)
    own = {name: inputs[name] for name in ("tokens", "valid")}  # experts ask what is padding
    routed = any(kind.routed for kind in parsed(text.layer_kinds))
    vectors = own if routed else inputs["tokens"]
    found, cache = fnmodels.decode(params["text"], vectors, *rest, cache, config=text, kernel="math", **edits)
    assert off(found, wanted[:, :6]) < 1e-12
    for i in (6, 7):
        token = batch.tokens[:, i : i + 1]
        inputs, *rest = fnmodels.prepare_step(text, token, cache)
        assert inputs["positions"].tolist() == [[[i] + [i - 3] * 3]]
        given = {"tokens": token, "valid": inputs["valid"]} if i == 6 or routed else token
        found, cache = fnmodels.decode(params["text"], given, *rest, cache, config=text, kernel="math")
        assert off(found[:, 0], wanted[:, i]) < 1e-12


@several_axes
def test_videos_in_chunks(case: ImageCase) -> None:
    """Frames are one grid; a text goes on after the highest of all positions, which may be a time."""
    batch, params = image_batch(case, ((2, (6, 2), 3),)), image_params(case)
    batch = dataclasses.replace(batch, grids=torch.tensor([[3, 2, 2]]))
    wanted = batch.forward(params)
    got, _ = stepped(params, batch, empty(batch), ((6,), (15,), (17,)), given=True)
    assert far(batch, got, wanted, (17,)) < 1e-12
    late = torch.cat((batch.positions()[:, :14], torch.full((1, 3, 3), 30)), 1)
    late[0, 2:14, 0] = torch.tensor([2, 14, 29]).repeat_interleave(4)  # frames of long intervals
    known = {"segment_ids": batch.segment_ids[:, :14], "places": batch.places[:, :14], "positions": late[:, :14]}
    cache = empty(batch)
    part, _ = batch.part((0,), (14,))
    prepared, options = part.arguments(params, fnmodels.prepare_step(case.config, part.tokens, cache, **known))
    _, cache = fnmodels.decode(params["text"], *prepared, cache, config=case.config.text, **options)
    assert fnmodels.prepare_step(case.config, batch.tokens[:, 14:], cache)[0]["positions"].tolist() == [
        [[14, 30, 30, 30], [15, 31, 31, 31], [16, 32, 32, 32]]
    ]


@every_form
def test_an_image_in_a_later_turn(case: ImageCase) -> None:
    """Prompt, answer token by token, and a second prompt with an image, while other rows are padding or text."""
    batch, params = image_batch(case, (((2, 2), 3, (1, 4), 3), (5, (3, 2), 2), (9,))), image_params(case)
    wanted = batch.forward(params)
    borders = ((5, 3, 0), (6, 4, 0), (7, 5, 1), (13, 11, 8), (14, 12, 8), (14, 13, 9))
    for rings in (True, False):
        got, _ = stepped(params, batch, empty(batch, rings=rings), borders)
        assert far(batch, got, wanted, borders[-1]) < 1e-12


@every_form
def test_padding_on_the_left(case: ImageCase) -> None:
    batch, params = image_batch(case, PROMPTS, left=(0, 2, 5, 3)), image_params(case)
    plain = image_batch(case, PROMPTS)
    wanted, got = plain.forward(params), batch.forward(params)
    for b, pad in enumerate((0, 2, 5, 3)):
        assert off(got[b, pad:][batch.segment_ids[b, pad:] > 0], wanted[b][plain.segment_ids[b] > 0]) < 1e-12
    stop = tuple(end + pad for end, pad in zip(ENDS, (0, 2, 5, 3), strict=True))
    cached, _ = stepped(params, batch, empty(batch), (stop,))
    assert far(batch, cached, got, stop) < 1e-12


@every_form
def test_rows_of_caches(case: ImageCase) -> None:
    """take, insert, truncate and resize of rows with images and of text are those of rows made anew."""
    batch, params = image_batch(case, PROMPTS), image_params(case)
    wanted = answers(batch.forward(params))
    _, cache = stepped(params, batch, empty(batch, rings=False), (ENDS,))

    def check(found: Any) -> None:
        assert off(then_text(params, batch, found)[0], wanted) < 1e-12

    check(fnmodels.take(fnmodels.take(cache, [3, 1, 2, 0]), [3, 1, 2, 0]))
    check(fnmodels.resize(cache, 30))
    text = fnmodels.take(cache, [2])
    fresh = fnmodels.init_cache(case.config, 4, batch.tokens.shape[1], dtype=torch.float64, rings=False)  # no images
    check(fnmodels.cache.insert_(fnmodels.insert(fresh, [2], text), [0, 1, 3], fnmodels.take(cache, [0, 1, 3])))
    filled = fnmodels.insert(cache, [0, 1, 3], fnmodels.take(fresh, [0, 1, 3]))
    check(fnmodels.insert(filled, [3, 0, 1], fnmodels.take(cache, [3, 0, 1])))
    if goes_back(cache):
        check(fnmodels.truncate(then_text(params, batch, cache)[1], ENDS))


@every_form
def test_int8_caches(case: ImageCase) -> None:
    """They read the same numbers however a prompt is divided."""
    batch, params = image_batch(case, PROMPTS), image_params(case)
    with torch.no_grad():
        whole, first = stepped(params, batch, empty(batch, kv_dtype=torch.int8), (ENDS,))
        parts, second = stepped(params, batch, empty(batch, kv_dtype=torch.int8), (*zip(*CUTS, strict=True), ENDS))
        assert far(batch, parts, whole) < 1e-12
        later = [then_text(params, batch, cache)[0] for cache in (first, second)]
    assert off(*later) < 1e-12
    error = (later[0] - (exact := answers(batch.forward(params)))).norm() / exact.norm()
    assert 1e-4 < float(error) < 0.3


@every_form
def test_documents_in_one_row(case: ImageCase) -> None:
    """Three of them, which all go on in a second call."""
    batch, params = image_batch(case, ((3, (2, 2), 2, (1, 3), 2, 4, (2, 2), 1),)), image_params(case)
    segment_ids = torch.tensor([[1] * 9 + [2] * 5 + [3] * 9])
    batch = dataclasses.replace(batch, segment_ids=segment_ids, token_types=types_of(case, segment_ids))
    wanted, positions = batch.forward(params), batch.positions()
    order = torch.tensor([*range(7), *range(9, 12), *range(14, 18), 7, 8, 12, 13, *range(18, 23)])
    cache, got = empty(batch, rings=False), []
    going_on = [1, 2, 3]
    if not goes_back(cache):  # a state is that of the last document
        order, going_on = torch.arange(23), [3]
    for at in (order[:14], order[14:]):
        part = dataclasses.replace(
            batch,
            tokens=batch.tokens[:, at],
            segment_ids=segment_ids[:, at],
            places=batch.places[:, at],
            token_types=None if batch.token_types is None else batch.token_types[:, at],
        )
        known = {"segment_ids": part.segment_ids, "places": part.places, "positions": positions[:, at]}
        known |= part.types()
        prepared, options = part.arguments(params, fnmodels.prepare_step(case.config, part.tokens, cache, **known))
        found, cache = fnmodels.decode(
            params["text"], *prepared, cache, config=case.config.text, kernel="math", **options
        )
        got.append(found)
    assert off(torch.cat(got, 1), wanted[:, order]) < 1e-12
    ids = torch.tensor([going_on])
    newest = positions.amax(-1) if positions.ndim == 3 else positions
    after = torch.stack([newest[segment_ids == i].amax() for i in going_on]) + 1
    found = fnmodels.prepare_step(case.config, ids, fnmodels.resize(cache, 30), segment_ids=ids)[0]["positions"]
    assert torch.equal(found[0].reshape(len(going_on), -1)[:, -1], after)


@bidirectional
def test_images_that_see_themselves_are_computed_in_one_call(case: ImageCase) -> None:
    batch, params = image_batch(case, PROMPTS), image_params(case)
    inside = tuple(zip(*INSIDE, strict=True))
    with pytest.raises(ValueError, match=r"Row 0 goes on inside an image.* divided before the first"):
        stepped(params, batch, empty(batch), (inside[0], ENDS))
    with pytest.raises(ValueError, match="Row 1 goes on inside an image"):
        stepped(params, batch, empty(batch), ((6, 7, 0, 1), ENDS))
    with pytest.raises(ValueError, match="Row 3 goes on inside an image"):  # of images without text between them
        stepped(params, batch, empty(batch), ((6, 5, 0, 6), ENDS))
    _, cache = stepped(params, batch, empty(batch, rings=False), (ENDS,))
    with pytest.raises(ValueError, match="Row 1 cannot go back to 13 tokens, which end inside an image"):
        fnmodels.truncate(cache, [17, 13, 9, 14])
    back = fnmodels.truncate(cache, [6, 12, 9, 2])
    part, _ = batch.part((6, 12, 9, 2), ENDS)
    prepared, _ = part.arguments(
        params,
        fnmodels.prepare_step(case.config, part.tokens, back, segment_ids=part.segment_ids, places=part.places),
    )
    found, _ = fnmodels.decode(params["text"], *prepared, back, config=case.config.text, kernel="math")
    assert off(found[3, :12], batch.forward(params)[3, 2:14]) < 1e-12


@pytest.mark.parametrize("case", [case for case in CASES if hasattr(case.family, "prompt_masks")], ids=str)
def test_prompts_that_see_themselves_are_computed_in_one_call(case: ImageCase) -> None:
    batch, params = image_batch(case, PROMPTS), image_params(case)
    batch = dataclasses.replace(batch, token_types=(torch.arange(21) >= torch.tensor(ENDS)[:, None]).long())
    wanted, cache = batch.forward(params), empty(batch, rings=False)
    got, cache = stepped(params, batch, cache, (ENDS,))
    assert far(batch, got, wanted) < 1e-12
    assert off(then_text(params, batch, cache)[0], answers(wanted)) < 1e-12
    with pytest.raises(ValueError, match="Row 0 goes on inside an image, or a prompt that sees all of itself"):
        stepped(params, batch, empty(batch), ((3, 16, 0, 0), ENDS))
    with pytest.raises(ValueError, match="Row 3 cannot go back to 13 tokens, which end inside an image, or a prompt"):
        fnmodels.truncate(cache, [17, 16, 9, 13])
    with pytest.raises(ValueError, match=r"pass token_types \[B, S\], 0 in the prompt"):
        fnmodels.prepare_step(case.config, batch.tokens, empty(batch), places=batch.places)


@bidirectional
def test_masks_of_images_are_masks_of_a_step(case: ImageCase) -> None:
    """`image_masks` of the new tokens, as for `forward`, without places in `prepare_step`."""
    batch, params = image_batch(case, PROMPTS), image_params(case)
    wanted, text = batch.forward(params), case.config.text
    cache, starts, logits = empty(batch), [0] * 4, torch.zeros(*batch.tokens.shape, text.vocab_size).double()
    for ends in (*zip(*CUTS, strict=True), ENDS):
        part, _ = batch.part(starts, ends)
        prepared = fnmodels.prepare_step(text, part.tokens, cache, segment_ids=part.segment_ids)
        (inputs, _, freqs), _ = part.arguments(params, prepared)
        masks = case.family.image_masks(case.config, inputs["positions"], part.segment_ids, part.places)
        found, cache = fnmodels.decode(params["text"], inputs, masks, freqs, cache, config=text, kernel="math")
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            logits[b, start:end] = found[b, : end - start]
        starts = list(ends)
    assert far(batch, logits, wanted) < 1e-12
    whole = fnmodels.prepare_step(text, batch.tokens, empty(batch), segment_ids=batch.segment_ids)  # causal masks
    prepared, _ = batch.arguments(params, whole)
    causal, _ = fnmodels.decode(params["text"], *prepared, empty(batch), config=text, kernel="math")
    assert far(batch, causal, wanted) > 1e-2
    assert off(then_text(params, batch, cache)[0], answers(wanted)) < 1e-12
    inside = image_batch(case, (((2, 3), 3),))
    _, cache = stepped(params, inside, empty(inside), ((4,),))
    part, _ = inside.part((4,), (9,))
    inputs, _, freqs = fnmodels.prepare_step(text, part.tokens, cache)
    masks = case.family.image_masks(case.config, inputs["positions"], part.segment_ids, part.places)
    with pytest.raises(ValueError, match="Row 0 goes on inside an image"):
        fnmodels.decode(params["text"], inputs, masks, freqs, cache, config=text)


@every_form
def test_invariant_kernels_give_the_bits_of_one_pass(case: ImageCase) -> None:
    batch, params = image_batch(case, PROMPTS, dtype=torch.float32), image_params(case, torch.float32)
    wanted, inside = batch.forward(params, kernel="invariant"), torch.arange(21) < torch.tensor(ENDS)[:, None]
    got, cache = stepped(params, batch, empty(batch), (*zip(*CUTS, strict=True), ENDS), kernel="invariant")
    assert torch.equal(got[inside], wanted[inside])
    assert torch.equal(then_text(params, batch, cache, kernel="invariant")[0], answers(wanted))


@every_form
def test_rows_under_vmap(case: ImageCase) -> None:
    batch, params = image_batch(case, PROMPTS), image_params(case)
    _, cache = stepped(params, batch, empty(batch), (ENDS,))
    tokens = torch.stack([row[end] for row, end in zip(batch.tokens, ENDS, strict=True)])[:, None, None]

    def step(cache: Any, tokens: Tensor) -> Tensor:
        prepared = fnmodels.prepare_step(case.config.text, tokens, cache)
        options = {"config": case.config.text, "kernel": "math", "experts": "dense"}
        return fnmodels.decode(params["text"], *prepared, cache, **options)[0]

    found = torch.func.vmap(step)(fnmodels.rows(cache), tokens)
    assert off(found[:, 0, 0], answers(batch.forward(params))[:, 0]) < 1e-12


@every_case
def test_places_of_other_tokens_are_refused(case: ImageCase) -> None:
    batch = image_batch(case, (((2, 3), 3), (5, (1, 4))))
    places = batch.places
    for wrong in (places[:1], places[..., 0], places[..., 0] >= 0, places.double(), places[:, :5], places[..., :1]):
        for run in (fnmodels.prepare, fnmodels.prepare_step):
            cache = (empty(batch),) if run is fnmodels.prepare_step else ()
            with pytest.raises(ValueError, match=r"places must be int64 \[2, 9, 2\], the \(row, slot\) of each"):
                run(case.config, batch.tokens, *cache, places=wrong, grids=batch.grids)  # type: ignore[operator]


def test_errors_name_what_is_missing() -> None:
    case = several_axes.args[1][0]
    batch = image_batch(case, (((2, 3), 3),))
    cache = empty(batch)
    with pytest.raises(ValueError, match=r"pass grids \[images, 3\]"):
        fnmodels.prepare(case.config, batch.tokens, places=batch.places)
    with pytest.raises(ValueError, match=r"pass grids \[images, 3\]"):
        fnmodels.prepare_step(case.config, batch.tokens, cache, places=batch.places)
    for grids in (batch.grids[0], batch.grids.double(), batch.grids.tolist()):
        with pytest.raises(ValueError, match=r"grids are \(frames, rows, columns\), integers \[images, 3\], not"):
            fnmodels.prepare(case.config, batch.tokens, places=batch.places, grids=grids)
    with pytest.raises(ValueError, match="Config of a model of text alone"):
        fnmodels.prepare(case.config.text, batch.tokens, places=batch.places)
    with pytest.raises(ValueError, match="Config of a model of text alone"):
        fnmodels.prepare_step(case.config.text, batch.tokens, cache, grids=batch.grids)
    prepared = fnmodels.prepare_step(case.config, batch.tokens, cache, places=batch.places, grids=batch.grids)
    for run in (
        lambda: fnmodels.prefill(case.params(), *prepared, cache, config=case.config),
        lambda: fnmodels.forward(case.params(), *prepared, config=case.config),
        lambda: fnmodels.compiled_step(case.config),
        lambda: fnmodels.cache.captured_step(case.config),
    ):
        with pytest.raises(
            TypeError, match=r"a model of several towers; run each with its own config, one of config.t"
        ):
            run()
    for wrong in (torch.zeros(1, 8).long(), torch.zeros(1, 8, 3).long(), torch.zeros(1, 9, 3)):
        with pytest.raises(ValueError, match=r"positions must be"):
            fnmodels.prepare_step(case.config.text, batch.tokens, cache, positions=wrong)
    made = fnmodels.prepare(case.config.text, batch.tokens)
    step = fnmodels.prepare_step(case.config.text, batch.tokens, cache)
    with pytest.raises(ValueError, match=r'a step needs freqs_cis\["highest"\]'):
        fnmodels.decode(image_params(case)["text"], *step[:2], made[2], cache, config=case.config.text)


@pytest.mark.slow
@pytest.mark.parametrize("case", bidirectional.args[1][:1], ids=str)
def test_compiled_steps_after_masks_of_images(case: ImageCase, graphs: CompileCounterWithBackend) -> None:
    check_steps(case, fnmodels.compiled_step(case.config.text))
    assert graphs.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("glm4v", "qwen3_5")], ids=str)
def test_compiled_steps_after_positions_of_images(case: ImageCase, graphs: CompileCounterWithBackend) -> None:
    check_steps(case, fnmodels.compiled_step(case.config.text))
    assert graphs.frame_count == 1


@every_case
def test_captured_steps(case: ImageCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device a recorder is the graph."""
    if not torch.cuda.is_available():
        graphs_on_the_cpu(monkeypatch)
        monkeypatch.setattr(captured, "_check_tokens", lambda _: None)
    check_steps(case, fnmodels.cache.captured_step(case.config.text, kernel="math"))


def check_steps(case: ImageCase, step: Any) -> None:
    """Steps that prepare for themselves go on after prompts with images."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, params = image_batch(case, PROMPTS, dtype=torch.float32), image_params(case, torch.float32)
    wanted = answers(batch.forward(params))
    _, cache = stepped(params, batch, empty(batch), (ENDS,), run=fnmodels.decode_)
    if device == "cuda":
        params, cache = (tree.map(lambda t: t.cuda() if isinstance(t, Tensor) else t, x) for x in (params, cache))
    for i in range(ANSWER):
        tokens = torch.stack([row[end + i] for row, end in zip(batch.tokens, ENDS, strict=True)]).to(device)
        found, cache = step(params["text"], tokens[:, None], cache)
        assert off(found[:, 0].cpu(), wanted[:, i]) < 2e-5

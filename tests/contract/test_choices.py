"""Attention that chooses its keys: a choice is data that can be returned, replayed and moved with its tokens."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import fnmodels
import train
from fnmodels import deepseek, tree
from fnmodels.models.common import chosen_keys
from fnmodels.models.common.carried import own_choices
from fnmodels.models.common.context import Context
from fnmodels.models.common.family import LayerKind
from fnmodels.ops import indexer
from fnmodels.ops.attention import flex
from fnmodels.ops.attention.choice import Choice
from fnmodels.ops.indexer import Indexer
from tests.support.cases import (
    Batch,
    Case,
    batch_of,
    cases,
    choices_of,
    generic_params,
    gradients,
    off,
    segments,
    shared_of,
    summed_loss,
    trainable,
)
from train.parallel.context.api import context_kernel

# those of keys of tokens; of windows: tests/fnmodels/models/test_deepseek_v4.py and test_deepseek_v41.py, of blocks:
# test_minimax_m3.py and test_qwen4_exp.py there
_OTHER = {"indexed_ratio", "index_block_size", "indexer_budget", "candidate_size"}
CHOOSING = [case for case in cases() if own_choices(fnmodels.family_of(case.config).kinds(case.config))]
CHOOSING = [case for case in CHOOSING if hasattr(case.config, "index_topk") and not _OTHER & set(vars(case.config))]
WIDE = [replace(case, name=f"{case.name}_every_key", config=replace(case.config, index_topk=64)) for case in CHOOSING]
SHARED = [case for case in CHOOSING if any("shared" in kind for kind in case.config.layer_kinds)]
every_case = pytest.mark.parametrize("case", CHOOSING, ids=str)
every_width = pytest.mark.parametrize("case", [*CHOOSING, WIDE[0]], ids=str)
V3 = {"model_type": "deepseek_v3", "rope_interleave": True}
MIXED = segments((-3, 5, 11), (19,), (12, 3, -4), (-19,))


def test_there_are_cases() -> None:
    mistral = {"mistral_large4", "mistral_large4_text"}
    known = {"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text"} | mistral
    assert {case.config.model_type for case in CHOOSING} == known and SHARED
    assert all(case.config.index_topk < 10 for case in CHOOSING)


def run(case: Case, batch: Batch, params: Any, choices: Tensor | None = None, **options: Any) -> tuple[Tensor, Any]:
    """(logits, gradients), by the kernel "math" unless the options say otherwise."""
    inputs, masks, freqs_cis = batch.prepared()
    replayed = inputs if choices is None else {**inputs, "choices": choices}
    leaves = trainable(params)
    logits = fnmodels.forward(leaves, replayed, masks, freqs_cis, config=case.config, **{"kernel": "math"} | options)
    return logits.detach(), gradients(summed_loss(logits, batch.labels), leaves)


@every_width
def test_a_choice_names_visible_keys_of_the_own_document(case: Case) -> None:
    """As many as are visible and allowed, each once, by position, whatever stands around the document."""
    batch, params = batch_of(case.config, MIXED), generic_params(case.config, torch.float64)
    choices = choices_of(params, batch.prepared(), case.config, kernel="math")
    kinds = fnmodels.family_of(case.config).kinds(case.config)
    width = min(case.config.index_topk, MIXED.shape[1])
    assert choices.shape == (*MIXED.shape, len(own_choices(kinds)), width) and choices.dtype == torch.int64
    wanted = torch.where(batch.valid, (batch.positions + 1).clamp(max=case.config.index_topk), 0)
    assert torch.equal((choices >= 0).sum(-1), wanted[..., None].expand(choices.shape[:3]))
    assert (choices <= batch.positions[..., None, None]).all()
    ordered = choices.sort(-1).values
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()
    alone = batch_of(case.config, segments((11,)))
    alone = replace(alone, tokens=batch.tokens[:1, 8:])
    same = choices_of(params, alone.prepared(), case.config, kernel="math")
    least = min(width, same.shape[-1])
    assert torch.equal(same.sort(-1, descending=True).values[..., :least], _best(choices[:1, 8:], least))


def _best(choices: Tensor, count: int) -> Tensor:
    return choices.sort(-1, descending=True).values[..., :count]


@every_width
@pytest.mark.parametrize("kernel", ["math", "auto"])
def test_replay_is_bit_equal(case: Case, kernel: str) -> None:
    """Logits and gradients; another choice changes them, and the indexer has no gradient."""
    batch, params = batch_of(case.config, MIXED), generic_params(case.config)
    choices = choices_of(params, batch.prepared(), case.config, kernel=kernel)
    options = {"kernel": kernel} | ({"layout": fnmodels.layout(batch.prepared()[1])} if kernel == "auto" else {})
    free, replayed = run(case, batch, params, **options), run(case, batch, params, choices, **options)
    equal = case in CHOOSING or kernel == "math"  # else free of a dense mask, by another kernel
    assert off(replayed, free) == 0 if equal else off(replayed, free) < 1e-5
    other = choices.where(choices != choices.amax(-1, keepdim=True), -1)  # without the latest key
    assert off(run(case, batch, params, other, **options)[0], free[0]) > 1e-3
    still = {path: gradient for path, gradient in tree.flatten(free[1]).items() if ".indexer." in path}
    assert still and not any(gradient.any() for gradient in still.values())
    narrower = run(case, batch, params, choices[..., : choices.shape[-1] // 2 + 1], **options)
    assert narrower[0].isfinite().all()


@every_case
def test_gathered_keys_equal_a_mask(case: Case) -> None:
    """kernel="sparse" on packed rows, and steps on a cache; what one layer chose is not what another attends to."""
    batch, params = batch_of(case.config, MIXED), generic_params(case.config, torch.float64)
    want, got = (run(case, batch, params, kernel=kernel) for kernel in ("math", "sparse"))
    assert off(got, want) < 1e-10
    prepared = batch.prepared()
    choices = choices_of(params, prepared, case.config, kernel="sparse")
    assert torch.equal(choices, choices_of(params, prepared, case.config, kernel="math"))
    if choices.shape[2] > 1:  # a planted bug
        swapped = run(case, batch, params, choices.flip(2), kernel="sparse")
        assert off(swapped[0], want[0]) > 1e-3
    going_on = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    foreign = replace(  # a planted bug: documents joined
        batch, segment_ids=batch.segment_ids.clamp(max=1), positions=going_on
    )
    assert off(run(case, foreign, params, kernel="sparse")[0], want[0]) > 1e-3
    cache = fnmodels.init_cache(case.config, 1, 19, dtype=torch.float64, length=24)
    alone = batch_of(case.config, segments((19,)))
    whole = fnmodels.forward(params, *alone.prepared(), config=case.config, kernel="math")
    steps = []
    for tokens in alone.tokens.split([9, 1, 1, 8], dim=1):
        step = fnmodels.prepare_step(case.config, tokens, cache)
        logits, cache = fnmodels.decode(params, *step, cache, config=case.config, kernel="sparse")
        steps.append(logits)
    assert off(torch.cat(steps, 1), whole) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "minimax_m3"])
def test_flex_reads_a_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On packed rows and in steps on a cache, without gradients, which it lacks on a CPU, and without a dense mask."""
    case = next(case for case in cases() if case.name == name)
    batch, alone = (batch_of(case.config, rows) for rows in (MIXED, segments((19,))))
    params, cache = generic_params(case.config), fnmodels.init_cache(case.config, 1, 19, length=24)
    with torch.no_grad():
        want, whole = (one.forward(params, kernel="math") for one in (batch, alone))
        # without a compiler, which would take minutes
        monkeypatch.setattr(flex, "_compiled", lambda: dict.fromkeys((None, False), flex_attention))
        monkeypatch.setattr(Choice, "dense", None)
        assert off(batch.forward(params, kernel="flex")[batch.valid], want[batch.valid]) < 2e-5
        steps = []
        for tokens in alone.tokens.split([9, 10], dim=1):
            step = fnmodels.prepare_step(case.config, tokens, cache)
            logits, cache = fnmodels.decode(params, *step, cache, config=case.config, kernel="flex")
            steps.append(logits)
    assert off(torch.cat(steps, 1), whole) < 2e-5


@every_case
def test_the_choice_of_a_sampler_is_replayed_in_training(case: Case) -> None:
    """Choices made step by step on a cache, of ragged rows, name the same keys in one pass over packed rows."""
    batch, params = batch_of(case.config, segments((14,), (9, -5))), generic_params(case.config, torch.float64)
    cache, steps, logits = fnmodels.init_cache(case.config, 2, 16, dtype=torch.float64, length=24), [], []
    for part in (batch.take(slice(None), at) for at in (slice(0, 7), slice(7, 8), slice(8, 14))):
        prepared = fnmodels.prepare_step(case.config, part.tokens, cache, segment_ids=part.segment_ids)
        _Watching.seen.clear()
        found, cache = fnmodels.decode(params, *prepared, cache, config=case.config, kernel="math", context=_Watching)
        logits.append(found)
        steps.append(torch.stack(_Watching.seen, dim=2))
    width = case.config.index_topk
    made = torch.cat([F.pad(step, (0, width - step.shape[-1]), value=-1) for step in steps], dim=1)
    packed = batch_of(case.config, segments((14, 9)))
    order = batch.valid.flatten()
    packed = replace(packed, tokens=batch.tokens.flatten()[order][None])
    choices = made.flatten(0, 1)[order][None]
    own = choices_of(params, packed.prepared(), case.config, kernel="math")
    assert torch.equal(_best(choices, width), _best(own, width))
    got = run(case, packed, params, choices)[0]
    assert off(got[0], torch.cat(logits, dim=1).flatten(0, 1)[order]) < 1e-10


class _Watching(Context):
    """Notes the choice of every layer that makes one."""

    seen: ClassVar[list[Tensor]] = []

    def choose(self, *given: Any, **how: Any) -> Any:
        self.taps = (*self.taps, "choices")
        mask = super().choose(*given, **how)
        self.seen.extend([self.aux["choices"]] if "choices" in self.aux else [])
        return mask


@every_case
def test_choices_travel_with_the_tokens(case: Case) -> None:
    """A choice that no indexer would make, in another order of the sequence and in parts of the batch."""
    batch, params = batch_of(case.config, MIXED), generic_params(case.config, torch.float64)
    inputs, masks, freqs_cis = batch.prepared()
    choices = choices_of(params, (inputs, masks, freqs_cis), case.config, kernel="math")
    choices = (choices + 1) % (batch.positions + 1)[..., None, None]
    prepared = ({**inputs, "choices": choices}, masks, freqs_cis)
    forward = functools.partial(fnmodels.forward, config=case.config, kernel="math")
    want = forward(params, *prepared)
    order = torch.randperm(MIXED.shape[1], generator=torch.Generator().manual_seed(0))
    moved = forward(params, *fnmodels.permute(prepared, order))
    assert off(moved[batch.valid[:, order]], want[:, order][batch.valid[:, order]]) < 1e-10
    parts = torch.cat([forward(params, *part) for part in fnmodels.split(prepared, 2)])
    assert off(parts[batch.valid], want[batch.valid]) < 1e-10
    given = batch.batch()
    options: dict[str, Any] = {"config": case.config, "kernel": "math", "length": 24}
    total, _ = train.next_token_loss(params, {**given, "choices": choices}, **options)
    assert off(total, summed_loss(want, batch.labels)) < 1e-10
    assert off(train.next_token_loss(params, given, **options)[0], total) > 1e-3


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_layers_that_share_a_choice(case: Case) -> None:
    """They use that of the last indexer: other keys there change them, and a part of the layers needs it given."""
    config, params = case.config, generic_params(case.config, torch.float64)
    batch = batch_of(config, MIXED)
    inputs, masks, freqs_cis = batch.prepared()
    kinds = fnmodels.family_of(config).kinds(config)
    own = own_choices(kinds)
    first = next(i for i, kind in enumerate(kinds) if LayerKind.parse(kind).indexed and i not in own)
    layers = functools.partial(fnmodels.run_layers, config=config, kernel="math", valid=inputs["valid"])
    layers = functools.partial(layers, **shared_of(config, params, inputs))
    x = fnmodels.family_of(config).embed(params, inputs, config=config)
    whole = layers(params, x, masks, freqs_cis, 0, len(kinds))
    middle, tapped = layers(params, x, masks, freqs_cis, 0, first, taps=(f"layers.{own[0]}.choices",))
    with pytest.raises(ValueError, match="takes the choice of keys of an earlier one"):
        layers(params, middle, masks, freqs_cis, first, len(kinds))
    choices = choices_of(params, (inputs, masks, freqs_cis), config, kernel="math")
    assert torch.equal(choices[:, :, 0], tapped[f"layers.{own[0]}.choices"])
    rest = layers(params, middle, masks, freqs_cis, first, len(kinds), choices=choices)
    assert torch.equal(rest, whole)
    with pytest.raises(ValueError, match=f"'layers.{first}.choices' is unknown in layer {first}"):
        fnmodels.forward(params, inputs, masks, freqs_cis, config=config, taps=(f"layers.{first}.choices",))


@every_case
def test_what_cannot_choose_is_refused(case: Case) -> None:
    batch, params = batch_of(case.config, MIXED), generic_params(case.config)
    inputs, masks, freqs_cis = batch.prepared()
    choices = choices_of(params, (inputs, masks, freqs_cis), case.config)
    forward = functools.partial(fnmodels.forward, params, config=case.config)
    for wrong in (choices[:, :, 0], choices.int(), choices[:, 1:], choices[:, :, 1:]):
        with pytest.raises(ValueError, match="choices must be int64"):
            forward({**inputs, "choices": wrong}, masks, freqs_cis)
    for kernel in ("blocks", "varlen"):
        with pytest.raises(ValueError, match="reads rules, and here each query sees 8 keys"):
            forward(inputs, masks, freqs_cis, kernel=kernel, layout=fnmodels.layout(masks))
    kernel: Any = context_kernel("gather", None)  # type: ignore[arg-type]
    dense = {kind: mask.dense() for kind, mask in masks.items()}
    with pytest.raises(ValueError, match=r"cuts masks that are data, fnmodels\.inputs\.Mask, and this one is a Tensor"):
        forward(inputs, dense, freqs_cis, kernel=kernel)


def test_as_many_keys_as_there_are_is_dense_latent_attention() -> None:
    """The bits of DeepSeek V3 with the same parameters; the indexer's values do not matter."""
    case, wide = next(pair for pair in zip(CHOOSING, WIDE, strict=True) if pair[0].name == "deepseek_v32")
    batch, params = batch_of(case.config, MIXED), generic_params(case.config, torch.float64)
    dense = deepseek.Config.from_hf({name: case.values[name] for name in case.values if "index" not in name} | V3)
    want = replace(batch, config=dense).forward(params)
    spoiled = {p: torch.nan * t if ".indexer." in p else t for p, t in tree.flatten(params).items()}
    assert torch.equal(replace(batch, config=wide.config).forward(tree.unflatten(spoiled)), want)
    assert off(batch.forward(params)[batch.valid], want[batch.valid]) > 1e-3


def _documents_mixed(patch: pytest.MonkeyPatch) -> None:
    def mixed(mask: Any) -> Any:
        every = replace(mask, q_segments=mask.q_segments.clamp(1, 1), kv_segments=mask.kv_segments.clamp(1, 1))
        return replace(indexer.keys_of(mask), mask=every.dense())

    patch.setattr(chosen_keys, "keys_of", mixed)


def _named_by_index(patch: pytest.MonkeyPatch) -> None:
    def choose(weights: Any, x: Tensor, latent: Tensor, k: Tensor, freqs: Tensor, keys: Any, how: Any) -> Tensor:
        places = torch.arange(k.shape[1]).expand(keys.positions.shape)
        return indexer.choose(weights, x, latent, k, freqs, replace(keys, positions=places), how)

    patch.setattr(chosen_keys, "choose", choose)


def _replay_ignored(patch: pytest.MonkeyPatch) -> None:
    right = Context.choose

    def choose(self: Any, weights: Any, *given: Any, **how: Any) -> Any:
        self.tensors = self.tensors | {"choices": None} if "indexer" in weights else self.tensors
        return right(self, weights, *given, **how)

    patch.setattr(Context, "choose", choose)


def _cached_keys_not_rotated(patch: pytest.MonkeyPatch) -> None:
    still = Indexer(8, lambda x, _: x)
    right = indexer.index_keys

    def rotated(w: Any, x: Any, freqs: Any, how: Any) -> Any:
        return right(w, x, freqs, how if x.shape[1] > 8 else still)

    patch.setattr(chosen_keys, "index_keys", rotated)


def _bits(case: Case) -> None:
    test_replay_is_bit_equal(case, "math")


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Case], None]]] = [
    (_documents_mixed, test_a_choice_names_visible_keys_of_the_own_document),
    (_named_by_index, test_a_choice_names_visible_keys_of_the_own_document),
    (_named_by_index, test_the_choice_of_a_sampler_is_replayed_in_training),
    (_replay_ignored, _bits),
    (_replay_ignored, test_choices_travel_with_the_tokens),
    (_cached_keys_not_rotated, test_the_choice_of_a_sampler_is_replayed_in_training),
]


@pytest.mark.parametrize(("plant", "test"), PLANTED)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], test: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test(CHOOSING[0])
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test(CHOOSING[0])


@pytest.mark.parametrize("case", [WIDE[0]], ids=str)
def test_a_kernel_that_asks_for_the_layout_gets_it(case: Case) -> None:
    """In rows that are shorter than the choice, of which every key is attended to."""
    batch, params = batch_of(case.config, segments((5, 11), (16,))), generic_params(case.config)
    wanted = batch.forward(params)
    got = batch.forward(params, kernel="blocks", layout=fnmodels.layout(batch.prepared()[1]))
    assert off(got, wanted) < 2e-5

"""Plan of one call on a cache: the slots of new tokens, the keys that queries read, and the slots after the call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.apply import CacheStep
from fnmodels.inputs.layout import Layout, document_layout
from fnmodels.inputs.mask import Mask, MaskLike, attention_part, with_attention
from fnmodels.inputs.order import Segments
from fnmodels.inputs.rules import Causal, Everything, reads_spans, simplify
from fnmodels.inputs.segments import NONE
from fnmodels.inputs.values import has_values, host_is_away
from fnmodels.models.common.family import DecoderConfig, LayerKind, field_of, function_of, traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.ops.attention.sdpa import ByIndex
from fnmodels.ops.invariant.attention import TILE
from fnmodels.ops.slots import Entry, SlotUse, write, write_
from fnmodels.options import ForwardOptions
from fnmodels.stack.plan import StackPlan, parts_of, plan_stack
from fnmodels.tree import Tree

from .known_rows import KnownRows, stepping
from .next_steps import NextSteps, ready_tables
from .prepare import KnownStep, check_values, with_slots
from .value import Cache, Facts, Slots, is_clean, is_plain, known_clean, with_facts


class PlannedStep(NamedTuple):
    """The arguments of the layers for one call on a cache (step, masks, tables, options), and the slots after it.

    biased: see `reads_key_positions`. facts: of the cache before the call, where these are the next tokens of its plain
    rows; else None. plans: of those; `after` writes what they leave for the end of the step.
    """

    config: DecoderConfig
    step: CacheStep
    masks: Mapping[str, MaskLike]
    tables: Mapping[str, Any]
    options: ForwardOptions
    slots: dict[str, Slots]
    biased: bool
    facts: Facts | None = None
    plans: Sequence[_Plan] = ()

    def after(self, cache: Cache, entries: Mapping[int, Entry]) -> Cache:
        """The cache after the call, from the layers' new entries."""
        for plan in self.plans:
            for held, new in plan.late:
                write_(held, new, plan.written, first=plan.use.first)
        layers = tuple([entry | entries[i] for i, entry in enumerate(cache.layers)])
        after = Cache(layers, self.slots, cache.kinds, cache.length, cache.memory)
        if self.facts is None:
            return known_clean(after)
        _, _, rows, steps, choices = self.facts
        rows = rows.next() if steps is None else steps.after(rows)
        clean = is_plain(after, before=cache if self.facts.clean else None)
        return with_facts(after, Facts(clean, True, rows, steps, choices))


def plan_step(
    prepared: tuple[Tree, Mapping[str, MaskLike], Mapping[str, Tensor]],
    cache: Cache,
    config: DecoderConfig,
    options: ForwardOptions,
    *,
    free: bool,
    inplace: bool = False,
    clean: bool | None = None,
    filled: int | None = None,
) -> PlannedStep:
    """prepared: of `prepare_step`. free: whether blocks are not compiled. Others: see `step_on`."""
    inputs, masks, tables = prepared
    facts = stepping(cache, masks) if free else None
    if facts is not None and clean is None:
        steps: NextSteps | None = facts.steps
        following = None if steps is None else steps.of(facts.rows)
        return plan_rows(KnownStep(prepared, facts, following), cache, config, options, inplace=inplace)
    _check_dtypes(cache, options)
    clean = is_clean(cache) if clean is None else clean
    masks, tokens = _with_images(masks, cache), _tokens_of(inputs, cache)
    highest, multiple = _highest_of(tables, cache), TILE if options.invariant else 1
    how: dict[str, Any] = {"maskless": _maskless(config, cache, options), "multiple": multiple, "tokens": tokens}
    plans: dict[tuple[int, bool], _Plan] = {}
    of_kind: dict[str, _Plan] = {}
    for kind, slots in cache.slots.items():
        mask = _mask_of_step(kind, masks, slots)
        key = id(mask), slots.ring
        if key not in plans:
            plans[key] = _plan(mask, slots, free, highest=highest, filled=filled, **how)
        of_kind[kind] = plans[key]
    if free and options.kernel == "auto" and options.layout is None:
        layout = _new_layout(list(plans.values()))
        options = options if layout is None else replace(options, layout=layout)
    step = CacheStep(
        dict(enumerate(cache.layers)),
        {kind: plan.written for kind, plan in of_kind.items()},
        {kind: replace(plan.use, inplace=inplace) for kind, plan in of_kind.items()},
        {} if clean else {kind: cache.slots[kind].occupied for kind in of_kind},
    )
    after = {kind: plan.after for kind, plan in of_kind.items()}
    biased = reads_key_positions(config)
    return PlannedStep(config, step, _read(masks, of_kind), tables, options, after, biased)


def _check_dtypes(cache: Cache, options: ForwardOptions) -> None:
    if options.invariant and any(t.dtype == torch.int8 for entry in cache.layers for t in entry.values()):
        raise ValueError(
            'kernel="invariant" gives the bits of training, and an int8 cache rounds keys and values: make the cache '
            "without kv_dtype."
        )


def plan_rows(
    known: KnownStep, cache: Cache, config: DecoderConfig, options: ForwardOptions, *, inplace: bool
) -> PlannedStep:
    """`plan_step` of the next tokens of plain rows, without a look at values. The masks may lack the slots."""
    _check_dtypes(cache, options)
    (inputs, masks, given), facts, of_rows = known
    rows: KnownRows = facts.rows
    choices = _choices(facts.choices, cache, config, options, masks)
    usual = of_rows is not None and of_rows.reads(inputs, given)
    tables = of_rows.ready if of_rows is not None and usual else ready_tables(of_rows, given)
    plans: dict[tuple[int, bool], _Plan] = {}
    of_kind: dict[str, _Plan] = {}
    written, uses, after = {}, {}, {}
    by_index = masks.keys() == cache.slots.keys()
    for kind, slots in cache.slots.items():
        mask: Any = attention_part(masks[kind])
        key = id(mask), slots.ring
        if key not in plans:
            plans[key] = _plan_next(mask, slots, rows, choices, inputs, inplace=inplace)
        plan = of_kind[kind] = plans[key]
        written[kind], uses[kind], after[kind] = plan.written, plan.use, plan.after
        by_index = by_index and plan.mask is _EVERY_KEY
    read = dict.fromkeys(masks, _EVERY_KEY) if by_index and not choices.mixes else _read(masks, of_kind)
    ready = usual and choices.plan and (by_index or all(isinstance(attention_part(m), _READY) for m in read.values()))
    step = CacheStep(
        dict(enumerate(cache.layers)),
        written,
        uses,
        {} if facts.clean else {kind: cache.slots[kind].occupied for kind in of_kind},
        choices.plan,
        (len(rows.lengths), 1) if ready else None,
    )
    facts = facts if choices is facts.choices else facts._replace(choices=choices)
    return PlannedStep(config, step, read, tables, options, after, choices.biased, facts, list(plans.values()))


def _read(masks: Mapping[str, MaskLike], of_kind: Mapping[str, _Plan]) -> dict[str, MaskLike]:
    """The masks as the layers of each kind read them."""
    read: dict[str, MaskLike] = dict(masks)
    for kind in masks:
        found = of_kind.get(LayerKind.parse(kind).source or kind)
        if found is not None:
            read[kind] = with_attention(masks[kind], found.mask)
    return read


_READY = (ByIndex, Segments)  # forms of masks that layers read as they are


@dataclass(frozen=True)
class Choices:
    """Choices that depend on the config, the options and the kinds alone; the caches of later steps keep them.

    parts: `parts_of` of the family, which a plan holds or reads. maskless, multiple: see `_plan`. mixes: whether a
    layer reads more masks than that of attention, see `attention_part`. biased: see `PlannedStep`. plan: of the layers;
    None where options hold functions, edits or a layout.
    """

    config: DecoderConfig
    options: ForwardOptions
    kinds: tuple[str, ...]
    parts: tuple[Any, ...]
    maskless: bool
    multiple: int
    mixes: bool
    biased: bool
    plan: StackPlan | None


def _choices(
    kept: Choices | None, cache: Cache, config: DecoderConfig, options: ForwardOptions, masks: Mapping[str, MaskLike]
) -> Choices:
    """The choices that were kept, if they are of this config and of these options and kinds, or new ones."""
    kinds, family = tuple(cache.slots), family_of(config)
    parts = parts_of(family)
    same = kept is not None and kept.config is config and kept.kinds == kinds and kept.parts == parts
    if kept is not None and same and (kept.options is options or (kept.options == options and not options.edits)):
        return kept
    named = isinstance(options.kernel, str) and isinstance(options.experts, str)
    plain = named and not options.edits and options.context is None and options.layout is None
    plan = plan_stack(config, None, (), options) if plain else None
    multiple, mixes = TILE if options.invariant else 1, any(attention_part(mask) is not mask for mask in masks.values())
    maskless, biased = _maskless(config, cache, options), reads_key_positions(config)
    return Choices(config, options, kinds, parts, maskless, multiple, mixes, biased, plan)


def reads_key_positions(config: DecoderConfig) -> bool:
    """Whether the family's `shared` makes a relative position bias, of the positions of the keys that are read."""
    family = family_of(config)
    return traits_of(family).biased and function_of(family, "shared") is not None


def _maskless(config: DecoderConfig, cache: Cache, options: ForwardOptions) -> bool:
    """Whether attention without any mask may replace a mask that is all True."""
    return options.kernel in ("auto", "sdpa") and not _reads_mask(config, cache)


def _reads_mask(config: DecoderConfig, cache: Cache) -> bool:
    """Whether attention reads the mask of a query that sees every key."""
    softcap = field_of(config, "attention_softcap") is not None
    choosing = any(kind.indexed or kind.compresses for kind in map(LayerKind.parse, cache.slots))
    return softcap or traits_of(family_of(config)).biased or choosing


class _Plan(NamedTuple):
    """One call for the kinds that share a mask: where new tokens go, the slots after it, and what queries read.

    late: (tensor [B, C] of slots, its values of the new tokens [B, 1]), which the call writes in place at its end.
    """

    written: Tensor
    after: Slots
    mask: Any
    use: SlotUse
    late: tuple[tuple[Tensor, Tensor], ...] = ()


def _plan(
    mask: Mask,
    slots: Slots,
    free: bool,
    *,
    highest: Tensor | None,
    tokens: Tensor | None,
    maskless: bool,
    multiple: int,
    filled: int | None,
) -> _Plan:
    """free: shapes may depend on values. highest, tokens: those of `Slots` of the new tokens. maskless: attention
    without any mask may replace a mask that is all True. multiple: so many slots are read at a time. filled: see
    `step_on`.
    """
    batch, count = slots.segments.shape[0], mask.q_segments.shape[1]
    positions, segments = (t.expand(batch, count) for t in (mask.q_positions, mask.q_segments))
    index = slots.index_of(positions, segments)
    readable = not torch.compiler.is_compiling() and has_values(segments) and has_values(slots.segments)
    readable = readable and not host_is_away()
    free = free and readable and segments.is_cpu
    first = _first(index, slots) if free else None
    put = functools.partial(_put, index=index, first=first)
    spans, new = slots.spans, mask.q_spans if slots.spans is not None or reads_spans(mask.rule) else None
    if spans is not None or new is not None:
        held = torch.zeros_like(slots.segments) if spans is None else spans
        spans = put(held, torch.zeros_like(segments) if new is None else new.expand_as(segments))
    after = Slots(put(slots.positions, positions), put(slots.segments, segments), spans, slots.ring)
    if slots.highest is not None and highest is not None:
        after = replace(after, highest=put(slots.highest, highest.expand_as(segments)))
    if slots.tokens is not None and tokens is not None:
        after = replace(after, tokens=put(slots.tokens, tokens))
    if count > 1 and readable and not bool(slots.occupied.any()):
        own = Mask(positions, segments, positions, segments, mask.q_spans, mask.q_spans, mask.rule)
        return _Plan(index, after, own, SlotUse("new", first=first))
    if slots.ring and count > 1:
        return _Plan(index, after, mask, SlotUse("both"))
    seen = replace(mask, kv_positions=after.positions, kv_segments=after.segments)
    seen = replace(seen, q_spans=new, kv_spans=None if new is None else after.spans)
    if not free:
        if filled is None or slots.ring:
            return _Plan(index, after, seen, SlotUse("slots"))
        return _Plan(index, after, seen.select(slice(None), slice(filled)), SlotUse("slots", filled))
    last = torch.arange(1, after.segments.shape[1] + 1).where(after.occupied, 1).amax()
    length = min(-(-int(last) // multiple) * multiple, after.segments.shape[1])
    seen = seen.select(slice(None), slice(length))
    full = first is not None or bool((index < slots.segments.shape[1]).all())
    use = SlotUse("slots", length, full=full, first=first)
    return _Plan(index, after, _EVERY_KEY if maskless and _sees_all(seen) else seen, use)


def _plan_next(mask: Mask, slots: Slots, rows: KnownRows, choices: Choices, inputs: Tree, *, inplace: bool) -> _Plan:
    """`_plan` for the next tokens of plain rows, without a look at values."""
    batch, room = slots.segments.shape
    positions, segments = mask.q_positions, mask.q_segments
    if batch > 1:
        positions, segments = (t if t.shape[0] == batch else t.expand(batch, 1) for t in (positions, segments))
    index = positions % room if slots.ring else positions
    equal = rows.equal
    first = rows.slots(room, slots.ring)[0] if equal else None
    filled = min(max(rows.lengths) + 1, room)
    length = min(-(-filled // choices.multiple) * choices.multiple, room)
    use = SlotUse("slots", length, inplace, True, first)
    maskless = equal and choices.maskless and length == filled
    maskless = maskless and (type(mask.rule) is Causal or rows.all_seen(mask, room))
    if maskless and inplace and slots.tokens is None:  # no layer reads the slots: a call that fails changes none
        return _Plan(index, slots, _EVERY_KEY, use, ((slots.positions, positions), (slots.segments, segments)))
    positions = _put(slots.positions, positions, index=index, first=first)
    segments = _put(slots.segments, segments, index=index, first=first)
    tokens = None if slots.tokens is None else _put(slots.tokens, _ids(inputs), index=index, first=first)
    after = Slots(positions, segments, None, slots.ring, None, tokens)
    if maskless:
        return _Plan(index, after, _EVERY_KEY, use)
    keys = positions[:, :length], segments[:, :length]
    return _Plan(index, after, Mask(mask.q_positions, mask.q_segments, *keys, None, None, mask.rule), use)


_EVERY_KEY = ByIndex(Everything())


def _first(index: Tensor, slots: Slots) -> int | None:
    """`SlotUse.first` of the slots index [B, S], read from values."""
    tokens = index.shape[1]
    if not index.numel() or (first := int(index[0, 0])) + tokens > slots.segments.shape[1]:
        return None
    return first if bool((index == torch.arange(first, first + tokens, device=index.device)).all()) else None


def _put(held: Tensor, new: Tensor, *, index: Tensor, first: int | None) -> Tensor:
    """`write`, contiguous as in `init_cache`: compiled steps have one graph for the first step and later ones."""
    written = write(held, new, index, first=first)
    if torch.compiler.is_compiling():  # a single row is contiguous whatever its stride, which a graph is compiled for
        return written.clone(memory_format=torch.contiguous_format)
    return written.contiguous()


def _sees_all(mask: Mask) -> bool:
    """Whether one query per row sees every key, read from values."""
    if mask.q_segments.shape[1] != 1 or not bool(((mask.kv_segments == mask.q_segments) & (mask.q_segments > 0)).all()):
        return False
    low, high = mask.kv_positions.aminmax(dim=1)
    rows = set(zip(mask.q_positions[:, 0].tolist(), low.tolist(), high.tolist(), strict=True))
    return all(simplify(mask.rule, (q, q), (a, b)) == Everything() for q, a, b in rows)


def _mask_of_step(kind: str, masks: Mapping[str, MaskLike], slots: Slots) -> Mask:
    """The mask of a kind; TypeError and ValueError if it is not of a step on these slots."""
    mask = attention_part(masks[kind])
    if not isinstance(mask, Mask):
        raise TypeError(
            f"masks[{kind!r}] is a {type(mask).__name__}; a step's are fnmodels.inputs.Mask, from prepare_step."
        )
    queries, keys, room = mask.q_segments.shape[1], mask.kv_segments.shape[1], slots.segments.shape[1]
    if keys != room + queries:
        raise ValueError(
            f"masks[{kind!r}] has {queries} queries and {keys} keys, but the cache has {room} slots, so that there are "
            f"{room + queries} keys: prepare_step makes the masks, of the same cache."
        )
    return mask


def _with_images(masks: Mapping[str, MaskLike], cache: Cache) -> Mapping[str, MaskLike]:
    """The masks with those of new tokens alone made masks of the step, where they are of images: `image_masks`."""
    alone: dict[str, Mask] = {}
    for kind, mask in masks.items():
        part = attention_part(mask)
        if kind not in cache.slots or not isinstance(part, Mask) or part.q_spans is None:
            continue
        if part.kv_segments.shape[1] == part.q_segments.shape[1]:
            alone[kind] = part
    if not alone:
        return masks
    check_values(replace(cache, slots={kind: cache.slots[kind] for kind in alone}), alone)
    made = {(id(mask), cache.slots[kind].ring): with_slots(mask, cache.slots[kind]) for kind, mask in alone.items()}
    of_step = {kind: made[id(mask), cache.slots[kind].ring] for kind, mask in alone.items()}
    return {kind: with_attention(mask, of_step[kind]) if kind in of_step else mask for kind, mask in masks.items()}


def _tokens_of(inputs: Tree, cache: Cache) -> Tensor | None:
    """`Slots.tokens` of the new tokens, -1 for vectors; None for a cache without."""
    return None if all(slots.tokens is None for slots in cache.slots.values()) else _ids(inputs)


def _ids(inputs: Tree) -> Tensor:
    """The ids of the new tokens, -1 for vectors."""
    ids: Tensor | None = inputs.get("token_ids")
    return torch.full_like(inputs["positions"], NONE) if ids is None else ids


def _highest_of(freqs_cis: Mapping[str, Tensor], cache: Cache) -> Tensor | None:
    """`Slots.highest` of the new tokens; ValueError where a cache needs it and the tables do not say it."""
    if all(slots.highest is None for slots in cache.slots.values()):
        return None
    if "highest" not in freqs_cis:
        raise ValueError(
            'The positions of this model have several axes, and a step needs freqs_cis["highest"], which prepare_step '
            "makes: change its tables instead of replacing them."
        )
    return freqs_cis["highest"]


def _new_layout(plans: list[_Plan]) -> Layout | None:
    """The layout of the new tokens, if these are all keys and the kinds agree on it; else None."""
    if not plans or any(plan.use.keys != "new" for plan in plans):
        return None
    layouts = [document_layout(plan.mask.q_positions, plan.mask.q_segments) for plan in plans]
    return layouts[0] if all(layout == layouts[0] for layout in layouts) else None

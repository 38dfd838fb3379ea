"""`prepare_step`: inputs, masks and rotary tables of the next tokens of a cache's rows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.inputs.mask import Mask, MaskLike, attention_part, with_attention
from fnmodels.inputs.rules import reads_spans
from fnmodels.inputs.segments import positions_from_segments, preceding_tokens
from fnmodels.inputs.values import has_values, host_is_away
from fnmodels.models.common.family import DecoderConfig, LayerKind
from fnmodels.models.common.registry import text_config
from fnmodels.models.encoder_decoder.cross_attention import cross_mask
from fnmodels.preparation import (
    check_text_alone,
    check_tokens,
    per_token,
    positions_of_images,
    prepare,
    prepare_text,
    with_image_masks,
)

from .known_rows import KnownRows, facts_with_rows, note_step
from .next_steps import NextStep, Prepared, prepare_ahead, prepared, prepared_step, room
from .order import check_order, last_documents
from .value import Cache, Facts, Slots


def prepare_step(
    config: DecoderConfig,
    tokens: Tensor,
    cache: Cache,
    *,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    length: int | Tensor | None = None,
    token_types: Tensor | None = None,
    places: Tensor | None = None,
    grids: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, MaskLike], dict[str, Tensor]]:
    """Prepares a step of generation: (inputs, masks, freqs_cis) of the next tokens of a cache's rows.

    The masks' queries are the new tokens, their keys the cache's slots followed by the new tokens. Where positions have
    several axes, freqs_cis["highest"] is what `Slots.highest` becomes.

    Args:
        config: The model's config.
        tokens: The next tokens, int64 [B, S]: a chunk of the prompt, or [B, 1].
        cache: The tokens before.
        positions: [B, S]; None: each document goes on after its highest position in the cache, on any axis where there
            are several. [B, S, 3] are those of the axes, for tokens in their order.
        segment_ids: [B, S], 0 for padding; None: each row goes on with its document.
        length: What length-dependent rotary scalings read; None: that of the cache.
        token_types: [B, S], of a model whose prompt sees all of itself, as for `prepare`.
        places: [B, S, 2], where the features of images are among the new tokens, as for `prepare`.
        grids: [images, 3], of the images that begin among the new tokens; an image that goes on in a later call,
            without grids there, needs positions.

    Returns:
        (inputs, masks, freqs_cis), for `prefill`, `decode` and `decode_`.

    Raises:
        ValueError: The cache has other rows. Where values can be read without waiting for a device, a row is named that
            has no room, whose positions go backwards, whose document is not known, or that has several documents in a
            cache with rings. So is a row that goes on inside an image or a prompt whose tokens see each other, which
            are computed in one call, and one that goes on with a document behind a later one whose state layers keep.
        TypeError: The arguments are in another order.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"prepare_step takes the config, tokens [B, S] and a Cache, not a {type(cache).__name__}.")
    if tokens.shape[1] == 1 and positions is segment_ids is places is grids is token_types is None:
        known = prepare_rows(config, tokens, cache, length)
        if known is not None:
            inputs, masks, tables = known.prepared
            return inputs, _on_cache(inputs, masks, cache, known.facts.rows), dict(tables)
    batch = next(tensor for entry in cache.layers for tensor in entry.values()).shape[0]
    if tokens.shape[0] != batch:
        raise ValueError(f"The cache has {batch} rows and the tokens {tokens.shape[0]}: fnmodels.take chooses rows.")
    if not tokens.shape[1]:
        raise ValueError(f"tokens is {list(tokens.shape)}; a step has at least one token of each row.")
    held = _fullest(cache)
    last = last_documents(cache, held)
    if segment_ids is None:
        segment_ids = _going_on(held, last, tokens)
    segment_ids, text = segment_ids.expand(tokens.shape[:2]), text_config(config)
    if last is not None and _checkable(last) and _checkable(segment_ids):
        check_order(last, held, segment_ids)
    if text is config:
        check_text_alone(config, places, grids)
    elif positions is None and places is not None:
        positions = _placed(config, held, segment_ids, places, grids)
    if held is not None and held.highest is not None:
        positions = _ordered(held, held.highest, segment_ids, positions)
    elif positions is None:
        positions = _next_positions(held, segment_ids)
    length = cache.length if length is None else length
    inputs, masks, freqs_cis = prepare(text, tokens, positions=positions, segment_ids=segment_ids, length=length)
    if "preceding" in inputs:
        inputs |= _preceding(inputs, segment_ids, held)
    if held is not None and held.highest is not None:
        # beside the tables, which stay where the caller replaces the inputs by vectors
        freqs_cis = {**freqs_cis, "highest": _highest(held, held.highest, segment_ids, inputs["positions"])}
    if text is not config:
        types = token_types if token_types is None else per_token("token_types", token_types, tokens.shape[:2])
        masks = with_image_masks(config, masks, inputs["positions"], segment_ids, places, types)
    return inputs, _on_cache(inputs, masks, cache), freqs_cis


class KnownStep(NamedTuple):
    """The next tokens [B, 1] of plain rows: (inputs, masks, freqs_cis), the facts noted on the cache, and the step that
    was prepared ahead; None: it was not.
    """

    prepared: tuple[Any, Any, Any]
    facts: Facts
    step: NextStep | None


def prepare_rows(config: DecoderConfig, tokens: Tensor, cache: Cache, length: int | Tensor | None) -> KnownStep | None:
    """The next tokens [B, 1] of plain rows; None for other rows, where they do not fit, or for images."""
    facts = facts_with_rows(cache)
    rows: KnownRows | None = facts.rows
    if rows is None or tokens.shape[0] != len(rows.lengths):
        return None
    length, tokens = cache.length if length is None else length, check_tokens(tokens)
    step = prepared_step(facts, config, tokens, length)
    if step is None:
        count, most = max(rows.lengths) + 1, room(cache)
        if (most is not None and count > most) or text_config(config) is not config:
            return None
        facts, step = prepare_ahead(cache, facts, config, tokens, length)
    made: Prepared
    if step is not None:
        made = prepared(step, tokens)
    else:
        made = prepare_text(config, tokens, rows.positions(), rows.segment_ids(), length, count=max(rows.lengths) + 1)
    if "preceding" in made[0]:
        made[0].update(_preceding(made[0], rows.segment_ids(), _fullest(cache)))
    return KnownStep(made, facts, step)


def _preceding(inputs: Mapping[str, Any], segment_ids: Tensor, held: Slots | None) -> dict[str, Tensor]:
    """{"preceding": the tokens before the new ones, cached ones included}; {} for a cache that holds no ids."""
    if held is None or held.tokens is None:
        return {}
    before = held.tokens, held.positions, held.segments
    tokens, count = inputs["token_ids"], inputs["preceding"].shape[-1]
    return {"preceding": preceding_tokens(tokens, inputs["positions"], segment_ids, count, before=before)}


def _on_cache(
    inputs: dict[str, Any], masks: Mapping[str, MaskLike], cache: Cache, known: KnownRows | None = None
) -> dict[str, MaskLike]:
    """The masks of new tokens with the cache's slots as further keys; `inputs` gets what a decoder's need.

    known: the rows whose next tokens these are, where they fit.
    """
    if known is None:
        check_values(cache, masks)
    if cache.memory is not None:
        own, memory = _mask_of(next(iter(cache.slots)), masks), cache.memory
        inputs["memory_mask"] = cross_mask(own.q_positions, own.q_segments, memory.positions, memory.segments)
    made: dict[tuple[int, bool], Mask] = {}
    for kind, slots in cache.slots.items():
        mask = _mask_of(kind, masks)
        if (id(mask), slots.ring) not in made:
            made[id(mask), slots.ring] = with_slots(mask, slots)
    if known is not None:
        note_step(made.values(), known)

    def of_step(kind: str, mask: MaskLike) -> MaskLike:
        source = LayerKind.parse(kind).source or kind
        if source not in cache.slots:
            return mask
        return with_attention(mask, made[id(attention_part(masks[source])), cache.slots[source].ring])

    return {kind: of_step(kind, mask) for kind, mask in masks.items()}


def with_slots(mask: Mask, slots: Slots) -> Mask:
    """The mask of new tokens with the slots as further keys, before the new ones. Spans count on from the slots'."""
    spans = mask.kv_spans
    if spans is not None:
        held = torch.zeros_like(slots.segments) if slots.spans is None else slots.spans.where(slots.occupied, 0)
        spans = torch.where(spans > 0, spans + held.amax(dim=1, keepdim=True), 0)
        mask = replace(mask, q_spans=spans)
        spans = torch.cat((held, spans), dim=1)
    positions = torch.cat((slots.positions, mask.kv_positions), dim=1)
    segments = torch.cat((slots.segments, mask.kv_segments), dim=1)
    return Mask(mask.q_positions, mask.q_segments, positions, segments, mask.q_spans, spans, mask.rule)


def _mask_of(kind: str, masks: Mapping[str, MaskLike]) -> Mask:
    mask = attention_part(masks[kind])
    if not isinstance(mask, Mask):
        raise TypeError(f"The family's mask of kind {kind!r} is a {type(mask).__name__}; a cache needs a Mask.")
    return mask


def _fullest(cache: Cache) -> Slots | None:
    """The slots that hold the most of each row: the last token's are in all kinds."""
    widths = [slots.segments.shape[1] for slots in cache.slots.values()]
    return list(cache.slots.values())[widths.index(max(widths))] if widths else None


def _going_on(held: Slots | None, last: Tensor | None, tokens: Tensor) -> Tensor:
    """Segment ids [B, S]: the document of each row, 1 for an empty row; ValueError for a row with several.

    last: of `last_documents`; a cache without slots knows no other document.
    """
    if held is None:
        one = torch.ones((1, 1), dtype=torch.long, device=tokens.device)
        return (one if last is None else last[:, None].clamp(min=1)).expand(tokens.shape[:2])
    highest = held.segments.amax(dim=1, keepdim=True)
    if _checkable(held.segments):
        several = (held.occupied & (held.segments != highest)).any(dim=1)
        if several.any():
            raise ValueError(
                f"Row {int(several.nonzero()[0])} of the cache holds several documents: pass the segment_ids of the "
                "new tokens."
            )
    return highest.clamp(min=1).expand(tokens.shape[:2])


def _next_positions(held: Slots | None, segment_ids: Tensor) -> Tensor:
    """Positions [B, S] that continue each document after its highest position in the slots."""
    rank = _rank(segment_ids)
    if held is None:
        return rank
    return (rank + _newest(held, held.positions, segment_ids) + 1).where(segment_ids > 0, 0)


def _rank(segment_ids: Tensor) -> Tensor:
    """[B, S]: how many tokens of its document are before each token in this call."""
    return torch.zeros_like(segment_ids) if segment_ids.shape[1] == 1 else positions_from_segments(segment_ids)


def _newest(held: Slots, values: Tensor, segment_ids: Tensor) -> Tensor:
    """[B, S], or [B, 1] for all: the highest of the slots' values [B, C] of each token's document; -1 without any."""
    one = segment_ids.shape[1] == 1
    documents = segment_ids  # [B, S], or [B, 1] where each row is known to have one
    if not one and has_values(segment_ids):
        highest = segment_ids.amax(dim=1, keepdim=True)
        documents = highest if bool(((segment_ids == highest) | (segment_ids <= 0)).all()) else segment_ids
    same = held.segments[:, None] == documents[..., None]
    return values[:, None].where(same & held.occupied[:, None], -1).amax(dim=-1)


def _placed(
    config: DecoderConfig, held: Slots | None, segment_ids: Tensor, places: Tensor, grids: Tensor | None
) -> Tensor | None:
    """Positions [B, S, 3] of text with whole images after what the slots hold; None for a model with one axis."""
    found = positions_of_images(config, segment_ids, places, grids)
    if found is None or held is None or held.highest is None:
        return None
    return found[..., 1:] + (_newest(held, held.highest, segment_ids) + 1)[..., None]


def _ordered(held: Slots, highest: Tensor, segment_ids: Tensor, positions: Tensor | None) -> Tensor:
    """Positions [B, S, 4]: the order of each token in its document, then the axes: those given, or by default going on
    after the `highest` [B, C]. Positions [B, S] are those of all axes."""
    if positions is not None and positions.ndim == 3 and positions.shape[-1] != 3:  # as they are, or refused
        return positions
    order, rank = _newest(held, held.positions, segment_ids) + 1, _rank(segment_ids)
    after = _newest(held, highest, segment_ids) + 1
    if positions is None:
        order, axes = order + rank, (after + rank)[..., None]
    elif positions.ndim == 3:
        order, axes = order + rank, per_token("positions", positions, segment_ids.shape + (3,))
    else:  # the distance between both is that of the document's last token: none in a text without images
        own = per_token("positions", positions, segment_ids.shape)
        order, axes = own + order - after, own[..., None]
    found = torch.cat((order[..., None], axes.expand(*segment_ids.shape, 3)), dim=-1)
    return found.where(segment_ids[..., None] > 0, 0)


def _highest(held: Slots, highest: Tensor, segment_ids: Tensor, positions: Tensor) -> Tensor:
    """`Slots.highest` of the new tokens, [B, S]; positions [B, S, 4]."""
    own = positions[..., 1:].amax(dim=-1)
    if own.shape[1] > 1:  # documents one after the other: no lower one is above any of a later one
        document = (_rank(segment_ids) == 0).logical_and(segment_ids > 0).cumsum(dim=1) << 40
        own = (own.where(segment_ids > 0, 0) + document).cummax(dim=1).values - document
    return torch.maximum(own, _newest(held, highest, segment_ids))


def _checkable(tensor: Tensor) -> bool:
    """Whether values are read for a check: not in graphs, under vmap, or where it would wait for a device."""
    return not torch.compiler.is_compiling() and not host_is_away() and has_values(tensor) and tensor.is_cpu


def check_values(cache: Cache, masks: Mapping[str, MaskLike]) -> None:
    """ValueError for masks of new tokens alone that do not fit the cache, see `prepare_step`."""
    seen: set[tuple[int, bool]] = set()
    for kind, slots in cache.slots.items():
        mask = _mask_of(kind, masks)
        if (id(mask), slots.ring) in seen or not _checkable(slots.segments) or not _checkable(mask.q_segments):
            continue
        seen.add((id(mask), slots.ring))
        _check_rows(slots, mask.q_positions, mask.q_segments)
        _check_images(slots, mask)


def _check_rows(slots: Slots, positions: Tensor, segments: Tensor) -> None:
    """ValueError that names the first row whose new tokens do not fit the slots."""
    valid, held = segments > 0, slots.occupied.sum(dim=1)
    room = slots.segments.shape[1]
    if not slots.ring and bool((over := held + valid.sum(dim=1) > room).any()):
        row = int(over.nonzero()[0])
        raise ValueError(
            f"Row {row} of the cache holds {int(held[row])} of {room} tokens, and {int(valid[row].sum())} more do not "
            "fit: fnmodels.resize makes room."
        )
    joint = torch.cat((slots.segments.clamp(min=0), segments.where(valid, 0)), dim=1)
    where = torch.cat((slots.positions, positions), dim=1)
    if slots.ring and bool((several := ((joint > 0) & (joint != joint.amax(1, keepdim=True))).any(1)).any()):
        raise ValueError(
            f"Row {int(several.nonzero()[0])} would hold several documents, and in a ring each position has one slot: "
            "make the cache with rings=False, or give each document a row of its own."
        )
    # A token comes after all of its document, in the slots and before it in the call.
    tokens = segments.shape[1]
    if tokens == 1:
        back = ((joint[:, :-1] == segments) & (where[:, :-1] >= positions)).any(dim=1) & valid[:, 0]
    else:
        newest = _next_positions(slots, segments)
        first = positions_from_segments(segments) == 0
        before, follows = positions[:, :-1], segments[:, 1:] == segments[:, :-1]
        back = (valid & first & (positions < newest)).any(dim=1)
        back |= (follows & valid[:, 1:] & (positions[:, 1:] <= before)).any(dim=1)
    if bool(back.any()):
        raise ValueError(
            f"Row {int(back.nonzero()[0])} has a new token whose position is not above those of its document in the "
            "cache: positions go forwards; fnmodels.truncate drops tokens from the end."
        )


def _check_images(slots: Slots, mask: Mask) -> None:
    """ValueError that names the first row whose new tokens go on inside an image or prompt that sees all of itself."""
    if slots.spans is None or mask.q_spans is None or not reads_spans(mask.rule):
        return
    first = (_rank(mask.q_segments) == 0) & (mask.q_segments > 0) & (mask.q_spans > 0)
    newest = _newest(slots, 2 * slots.positions + (slots.spans > 0), mask.q_segments)  # odd: within an image
    inside = (first & (newest > 0) & (newest % 2 == 1)).any(dim=1)
    if bool(inside.any()):
        raise ValueError(
            f"Row {int(inside.nonzero()[0])} goes on inside an image, or a prompt that sees all of itself: all "
            "of an image, of images without text between them, or of such a prompt, are computed in one call. Other "
            "prompts may be divided before the first token of an image and after the last one."
        )

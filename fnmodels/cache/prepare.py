"""`prepare_step`: inputs, masks and rotary tables of the next tokens of a cache's rows."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fnmodels.apply import prepare
from fnmodels.inputs.mask import Mask, MaskLike, attention_part, with_attention
from fnmodels.inputs.segments import positions_from_segments
from fnmodels.inputs.values import has_values, host_is_away
from fnmodels.models.common.registry import DecoderConfig, source_kind
from fnmodels.models.encoder_decoder.cross_attention import cross_mask

from .value import Cache, Slots


def prepare_step(
    config: DecoderConfig,
    tokens: Tensor,
    cache: Cache,
    *,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    length: int | Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, MaskLike], dict[str, Tensor]]:
    """(inputs, masks, freqs_cis) of the next tokens [B, S] of the cache's rows; arguments as for `fnmodels.prepare`.

    segment_ids: by default each row goes on with its document. positions: by default each document goes on after its
    highest position in the cache. length: by default that of the cache.
    The masks' queries are the new tokens, their keys the cache's slots followed by the new tokens.

    Where values can be read without waiting for a device, ValueError names the row that has no room, whose positions go
    backwards, whose document is not known, or that has several documents in a cache with rings.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"prepare_step takes the config, tokens [B, S] and a Cache, not a {type(cache).__name__}.")
    batch = next(tensor for entry in cache.layers for tensor in entry.values()).shape[0]
    if tokens.shape[0] != batch:
        raise ValueError(f"The cache has {batch} rows and the tokens {tokens.shape[0]}: fnmodels.take chooses rows.")
    held = _fullest(cache)
    if segment_ids is None:
        segment_ids = _going_on(held, tokens)
    if positions is None:
        positions = _next_positions(held, segment_ids.expand(tokens.shape[:2]))
    length = cache.length if length is None else length
    inputs, masks, freqs_cis = prepare(config, tokens, positions=positions, segment_ids=segment_ids, length=length)
    _check_values(cache, masks)
    if cache.memory is not None:
        own, held = _mask_of(next(iter(cache.slots)), masks), cache.memory
        inputs["memory_mask"] = cross_mask(own.q_positions, own.q_segments, held.positions, held.segments)
    made: dict[tuple[int, bool], MaskLike] = {}
    for kind, slots in cache.slots.items():
        mask = _mask_of(kind, masks)
        if (id(mask), slots.ring) not in made:
            made[id(mask), slots.ring] = _with_slots(mask, slots)

    def of_step(kind: str, mask: MaskLike) -> MaskLike:
        source = source_kind(kind) or kind
        if source not in cache.slots:
            return mask
        return with_attention(mask, made[id(attention_part(masks[source])), cache.slots[source].ring])

    return inputs, {kind: of_step(kind, mask) for kind, mask in masks.items()}, freqs_cis


def _with_slots(mask: Mask, slots: Slots) -> Mask:
    """The mask of new tokens with the slots as further keys, before the new ones."""
    spans = None
    if slots.spans is not None and mask.kv_spans is not None:
        spans = torch.cat((slots.spans, mask.kv_spans), dim=1)
    return replace(
        mask,
        kv_positions=torch.cat((slots.positions, mask.kv_positions), dim=1),
        kv_segments=torch.cat((slots.segments, mask.kv_segments), dim=1),
        kv_spans=spans,
    )


def _mask_of(kind: str, masks: Mapping[str, MaskLike]) -> Mask:
    mask = attention_part(masks[kind])
    if not isinstance(mask, Mask):
        raise TypeError(f"The family's mask of kind {kind!r} is a {type(mask).__name__}; a cache needs a Mask.")
    return mask


def _fullest(cache: Cache) -> Slots | None:
    """The slots that hold the most of each row: the last token's are in all kinds."""
    widths = [slots.segments.shape[1] for slots in cache.slots.values()]
    return list(cache.slots.values())[widths.index(max(widths))] if widths else None


def _going_on(held: Slots | None, tokens: Tensor) -> Tensor:
    """Segment ids [B, S]: the document of each row, 1 for an empty row; ValueError for a row with several."""
    if held is None:
        return torch.ones((1, 1), dtype=torch.long, device=tokens.device).expand(tokens.shape[:2])
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
    one = segment_ids.shape[1] == 1
    rank = torch.zeros_like(segment_ids) if one else positions_from_segments(segment_ids)
    if held is None:
        return rank
    documents = segment_ids  # [B, S], or [B, 1] where each row is known to have one
    if not one and has_values(segment_ids):
        highest = segment_ids.amax(dim=1, keepdim=True)
        documents = highest if bool(((segment_ids == highest) | (segment_ids <= 0)).all()) else segment_ids
    same = held.segments[:, None] == documents[..., None]
    newest = held.positions[:, None].where(same & held.occupied[:, None], -1).amax(dim=-1)
    return (rank + newest + 1).where(segment_ids > 0, 0)


def _checkable(tensor: Tensor) -> bool:
    """Whether values are read for a check: not in graphs, under vmap, or where it would wait for a device."""
    return not torch.compiler.is_compiling() and not host_is_away() and has_values(tensor) and tensor.is_cpu


def _check_values(cache: Cache, masks: Mapping[str, MaskLike]) -> None:
    seen: set[tuple[int, bool]] = set()
    for kind, slots in cache.slots.items():
        mask = _mask_of(kind, masks)
        if (id(mask), slots.ring) in seen or not _checkable(slots.segments) or not _checkable(mask.q_segments):
            continue
        seen.add((id(mask), slots.ring))
        _check_rows(slots, mask.q_positions, mask.q_segments)


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

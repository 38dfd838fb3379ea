"""Host-side record of a cache's rows between steps of one token, so that no step reads it from tensors again.

A row is plain if its slots hold the positions 0 to n - 1 of one document. The first step of one token finds out whether
all rows are; later ones only count on. A fact belongs to the cache, or the masks, that it was found of, and to the
versions of their tensors: a cache that was changed in any way is looked at anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.inputs.rules import Everything, simplify
from fnmodels.inputs.values import has_values, host_is_away, host_reads
from fnmodels.ops.torch_internals import versions

from .value import Cache, Facts, Slots, facts_of, with_facts


@dataclass(frozen=True)
class KnownRows:
    """Plain rows: the number of tokens that each holds, which is the position of its next one, and its document."""

    lengths: tuple[int, ...]
    documents: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """Whether all rows hold as many tokens."""
        return self.lengths.count(self.lengths[0]) == len(self.lengths)

    def next(self) -> KnownRows:
        """The rows with one token more each."""
        return KnownRows(tuple(length + 1 for length in self.lengths), self.documents)

    def positions(self) -> Tensor:
        """int64 [B, 1], of the next tokens."""
        return torch.tensor(self.lengths)[:, None]

    def segment_ids(self) -> Tensor:
        """int64 [B, 1], of the next tokens."""
        return torch.tensor(self.documents)[:, None]

    def slots(self, room: int, ring: bool) -> list[int]:
        """The slot of each row's next token, among `room` ones."""
        return [length % room for length in self.lengths] if ring else list(self.lengths)

    def all_seen(self, mask: Mask, room: int) -> bool:
        """Whether each next token sees all that its row then holds, so that rows of one length need no mask."""
        ends = {(length, max(0, length + 1 - room)) for length in self.lengths}
        return self.equal and all(simplify(mask.rule, (n, n), (low, n)) == Everything() for n, low in ends)


def rows_of(cache: Cache) -> KnownRows | None:
    """The rows of a cache on the CPU, if all are plain; None also where values cannot be read."""
    rows: KnownRows | None = facts_with_rows(cache).rows
    return rows


def facts_with_rows(cache: Cache) -> Facts:
    """The facts noted on a cache, with its rows where they can be read."""
    if not host_reads():
        return Facts()
    facts = facts_of(cache)
    if not facts.looked:
        tensors = [tensor for slots in cache.slots.values() for tensor in (slots.positions, slots.segments)]
        if not tensors or not all(has_values(tensor) and tensor.is_cpu for tensor in tensors):
            return facts
        facts = facts._replace(looked=True, rows=_read(cache.slots.values()))
        with_facts(cache, facts)
    return facts


def note_step(masks: Iterable[Mask], rows: KnownRows) -> None:
    """Notes on masks that they are of the next tokens of these rows."""
    for mask in masks:
        object.__setattr__(mask, "_rows", (versions(_tensors(mask)), rows))


def stepping(cache: Cache, masks: Mapping[str, MaskLike]) -> Facts | None:
    """The facts noted on the cache if its rows are plain and the masks of all its kinds are of their next tokens."""
    facts = facts_of(cache)
    rows: KnownRows | None = facts.rows
    if rows is None or host_is_away():
        return None
    seen: Mask | None = None
    for kind in cache.slots:
        mask: Any = attention_part(masks[kind])
        if mask is seen:
            continue
        noted = vars(mask).get("_rows") if isinstance(mask, Mask) else None
        if noted is None or noted[1] is not rows or noted[0] != versions(_tensors(mask)):
            return None
        seen = mask
    return facts


def _tensors(mask: Mask) -> tuple[Tensor, ...]:
    return mask.q_positions, mask.q_segments, mask.kv_positions, mask.kv_segments


def _read(every: Iterable[Slots]) -> KnownRows | None:
    """The rows of plain slots, read from values; None if a row of them is not plain."""
    found: set[KnownRows] = set()
    for slots in {id(slots.segments): slots for slots in every}.values():
        held, room = slots.occupied, slots.segments.shape[1]
        if slots.spans is not None or slots.highest is not None or not bool(held.any(1).all()):
            return None
        count = torch.arange(room)
        lengths = slots.positions.where(held, -1).amax(1, keepdim=True) + 1
        documents = slots.segments.amax(1, keepdim=True)
        right = (slots.positions % room == count) & (slots.positions >= lengths - room) & (slots.segments == documents)
        if not bool(((held == (count < lengths)) & (right | ~held)).all()):
            return None
        found.add(KnownRows(tuple(lengths[:, 0].tolist()), tuple(documents[:, 0].tolist())))
    return found.pop() if len(found) == 1 else None

"""kernel="blocks": block-sparse attention on the CPU in eager mode, which computes only the non-empty blocks of a mask.

The batch's layout gives the documents, and the rule bounds which positions can be seen. From both, a plan is made on
the host once per batch: the sequence is split into pieces, and each piece of queries attends to a contiguous run of
pieces of keys, without a mask, causally, or with a small dense mask shared by pieces of equal geometry. A full document
under `Causal` is one piece; a window splits it into blocks. Padding is never read, and gives 0.

Memory is linear in the sequence, except for rules that depend on more than positions (`SameSpan`, your own): for them
it is quadratic in the longest document.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Causal, Everything, Rule, simplify
from fnmodels.ops.cpu.tiled import causal_tiles, tiles_are_faster

from .math import math_attention
from .relative_bias import Bias
from .sdpa import sdpa_attention

Span = tuple[int, int]  # offset and count
TOGETHER = 4096  # tokens of equal documents in one call, whose scores may be in memory together


@dataclass(frozen=True)
class Step:
    """The attention of one piece of queries: to the pieces [start, stop) of keys, causal or with a mask."""

    start: int
    stop: int
    causal: bool = False
    mask: int | None = None  # index in the plan's masks
    count: int = 1  # equal parts of the piece, each of which attends to itself alone


@tree.pytree
@dataclass(frozen=True)
class Plan:
    """The computation for one batch and rule. `steps` has one entry per piece, None for pieces without visible keys."""

    masks: tuple[Tensor, ...]  # bool [B or 1, 1, q, k]
    steps: tuple[Step | None, ...] = tree.static()
    sizes: tuple[int, ...] = tree.static()
    shape: tuple[int, int] = tree.static()  # (B, S) of the batch
    merged: bool = tree.static()  # the rows differ, and are concatenated into one row


def plan_blocks(mask: Mask, layout: Layout) -> Plan:
    """The plan of `mask` on a batch with this layout (of `mask` itself: `fnmodels.layout`)."""
    merged = len(set(zip(layout.rows, layout.firsts, strict=True))) > 1
    builder = _Builder(mask)
    for row in range(len(layout.rows) if merged else len(layout.rows[:1])):
        end = 0
        for (start, stop), first in zip(layout.rows[row], layout.firsts[row], strict=True):
            builder.skip(start - end)
            for begin, length in _independent(mask.rule, first, stop - start):
                builder.add(row if merged else None, start + begin, first + begin, length)
            end = stop
        builder.skip(layout.length - end)
    if not builder.steps:  # an empty batch is one empty piece
        builder.sizes, builder.steps = [layout.length], [None]
    shape, sizes, steps = (len(layout.rows), layout.length), tuple(builder.sizes), tuple(builder.steps)
    if merged or shape[0] == 1:  # equal rows would be copied
        sizes, steps = _equals_together(sizes, steps)
    return Plan(tuple(builder.masks), steps, sizes, shape, merged)


def _equals_together(
    sizes: tuple[int, ...], steps: tuple[Step | None, ...]
) -> tuple[tuple[int, ...], tuple[Step | None, ...]]:
    """Adjacent pieces of equal length whose keys no other piece reads become one piece, which is a batch in one call.

    Sorted texts and images of one size have many: with ten documents of 16 tokens attention takes 0.4 of the time,
    with ten of 100 tokens 0.9 of it, and two threads share the documents.
    """
    readers = Counter(key for step in steps if step is not None for key in range(step.start, step.stop))

    def geometry(index: int) -> tuple[Any, ...]:
        size, step = sizes[index], steps[index]
        own = step is not None and (step.start, step.stop) == (index, index + 1) and readers[index] == 1
        return (size, step.causal, step.mask) if own and step is not None else (index,)

    groups: list[tuple[int, ...]] = []
    for _, found in itertools.groupby(range(len(sizes)), key=geometry):
        members = tuple(found)
        most = max(1, TOGETHER // max(1, sizes[members[0]]))
        groups += [members[i : i + most] for i in range(0, len(members), most)]
    places = {index: place for place, members in enumerate(groups) for index in members}

    def together(members: tuple[int, ...]) -> Step | None:
        step, count = steps[members[0]], len(members)
        return step and replace(step, start=places[step.start], stop=places[step.stop - 1] + 1, count=count)

    return tuple(sum(sizes[i] for i in members) for members in groups), tuple(together(members) for members in groups)


def blocks_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Bias | None = None,
) -> Tensor:
    """Shapes as in `ops.attention.select`. ValueError if B or S is not that of the plan."""
    batch, length = plan.shape
    if q.shape[:2] != k.shape[:2] or q.shape[1] != length or (q.shape[0] != batch and (plan.merged or batch != 1)):
        raise ValueError(
            f"The layout describes {batch} rows of {length} tokens, the queries are {list(q.shape[:2])} and the keys "
            f'{list(k.shape[:2])}: make it of this batch, or leave it out (kernel="sdpa" needs none).'
        )
    # One split and one concatenation per tensor: the gradient of a slice would be a tensor of the full length.
    qs, ks, vs = (t.reshape(1, -1, *t.shape[2:]) if plan.merged else t for t in (q, k, v))
    rows, (qs, ks, vs) = len(qs), (t.split(plan.sizes, dim=1) for t in (qs, ks, vs))
    places = None if bias is None else [_pieces(ts, plan, batch) for ts in (bias.queries, bias.keys)]
    by_token = sinks is not None and sinks.ndim == 3
    of_queries = _pieces((sinks,), plan, batch) if sinks is not None and by_token else None
    out = []
    for index, (piece, step) in enumerate(zip(qs, plan.steps, strict=True)):
        if step is None:
            out.append(piece.new_zeros(*piece.shape[:-1], v.shape[-1]))
            continue
        keys, values = (_join(pieces[step.start : step.stop]) for pieces in (ks, vs))
        piece, keys, values = (_parts(t, step.count) for t in (piece, keys, values))
        allowed = None if step.mask is None else plan.masks[step.mask]
        if bias is not None and places is not None:
            seen = tuple(map(_join, zip(*places[1][step.start : step.stop], strict=True)))
            read = [
                tuple(_parts(_of_rows(t, rows, step.count), step.count) for t in ts) for ts in (places[0][index], seen)
            ]
            added = bias.of(*read).dense()
            sunk = sinks if of_queries is None else _parts(of_queries[index][0], step.count)
            how: dict[str, Any] = {"causal": step.causal, "scale": scale, "sinks": sunk, "bias": added}
            out.append(sdpa_attention(piece, keys, values, allowed, **how))
        elif step.causal and softcap is None and sinks is None and tiles_are_faster(piece):
            out.append(causal_tiles(piece, keys, values, scale=scale))
        elif softcap is None:
            out.append(sdpa_attention(piece, keys, values, allowed, causal=step.causal, scale=scale, sinks=sinks))
        else:
            if allowed is None:
                allowed = torch.ones(1, 1, piece.shape[1], keys.shape[1], dtype=torch.bool, device=q.device)
                allowed = allowed.tril() if step.causal else allowed
            out.append(math_attention(piece, keys, values, allowed, scale=scale, softcap=softcap, sinks=sinks))
    sized = [t.reshape(rows, size, *t.shape[2:]) for t, size in zip(out, plan.sizes, strict=True)]
    joined = _join(sized).reshape(*q.shape[:-1], v.shape[-1])
    if any(plan.steps):
        return joined
    # Only padding: empty sums keep the graph connected, with gradient 0 whatever the padding holds.
    return joined + sum(t[:0].sum() for t in (q, k, v, sinks) if t is not None)


def _pieces(tensors: tuple[Tensor, ...], plan: Plan, rows: int) -> list[tuple[Tensor, ...]]:
    """The tensors [B or 1, S, ...] that a bias reads, cut into the plan's pieces; positions are those of the first row,
    unless the plan joins all rows into one."""
    joined = []
    for t in tensors:
        if plan.merged:
            t = t.expand(rows, *t.shape[1:]).reshape(1, -1, *t.shape[2:])
        joined.append((t[:1] if t.ndim == 2 else t).split(plan.sizes, dim=1))
    return list(zip(*joined, strict=True))


def _of_rows(t: Tensor, rows: int, count: int) -> Tensor:
    """Positions for all rows where a step has several parts of each."""
    return t.expand(rows, *t.shape[1:]) if count > 1 else t


def _parts(t: Tensor, count: int) -> Tensor:
    """[B, count S, ...] -> [B count, S, ...]."""
    return t if count == 1 else t.unflatten(1, (count, -1)).flatten(0, 1)


def _join(pieces: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _independent(rule: Rule, first: int, length: int) -> list[tuple[int, int]]:
    """(begin, length) of the parts of a document that do not see each other, such as the chunks of `Chunk`.

    first: the position of its first token. Boundaries can only be at multiples of the rule's period.
    """
    period, last = rule.period(), first + length - 1
    begins = [0]
    if period > 1:
        for begin in range(period - first % period, length, period):
            at = first + begin
            if rule.visible((first, at - 1))[1] < at and rule.visible((at, last))[0] >= at:
                begins.append(begin)
    return [(begin, end - begin) for begin, end in itertools.pairwise([*begins, length])]


def block_size(reach: int, length: int) -> int:
    """The number of queries per block, for `length` queries that see `reach` keys each.

    Measured: between 64 and half of `reach` it matters little; larger blocks compute more masked scores, smaller ones
    need more calls. The backward holds copies of the keys, fewer with larger blocks: five here.
    """
    size = min(max(64, reach // 4), 1024)
    return length if size + reach >= length and length <= 1024 else size


class _Builder:
    """Collects the pieces and steps of a plan, from left to right in one row (or in all rows, concatenated)."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.sizes: list[int] = []
        self.steps: list[Step | None] = []
        self.masks: list[Tensor] = []
        self.known: dict[tuple[Rule, int, int, int, int], int] = {}

    def skip(self, length: int) -> None:
        """Add `length` tokens of padding."""
        if length:
            self.sizes.append(length)
            self.steps.append(None)

    def add(self, row: int | None, start: int, first: int, length: int) -> None:
        """Add `length` tokens that see only each other, from index `start` of the row and position `first` on."""
        last, pieces_before = first + length - 1, len(self.sizes)
        rule = simplify(self.mask.rule, (first, last), (first, last))
        middle = first + length // 2
        low, high = rule.visible((middle, middle))
        reach = int(min(high, last) - max(low, first)) + 1
        size = length if rule in (Everything(), Causal()) else block_size(reach, length)
        sizes = [min(size, length - begin) for begin in range(0, length, size)]
        for i, count in enumerate(sizes):
            begin = first + i * size
            low, high = rule.visible((begin, begin + count - 1))
            lo, hi = int(max(low, first) - first) // size, int(min(high, last) - first) // size + 1
            if lo >= hi:
                self.steps.append(None)
                continue
            q, kv = (i * size, count), (lo * size, min(hi * size, length) - lo * size)
            causal, mask = self.masking(rule, row, start, first, q, kv)
            self.steps.append(Step(pieces_before + lo, pieces_before + hi, causal, mask))
        self.sizes += sizes

    def masking(
        self, rule: Rule, row: int | None, start: int, first: int, q: Span, kv: Span
    ) -> tuple[bool, int | None]:
        """(causal, mask index) of the step in which the tokens `q` attend to the tokens `kv`."""
        rule = simplify(rule, *((first + begin, first + begin + count - 1) for begin, count in (q, kv)))
        if rule == Everything() or (rule == Causal() and q == kv):
            return rule == Causal(), None
        period = rule.period()
        if not period:  # the rule depends on more than positions: a mask for this block only
            queries, keys = (slice(start + begin, start + begin + count) for begin, count in (q, kv))
            rows = slice(None) if row is None else slice(row, row + 1)
            self.masks.append(self.mask.select(queries, keys, rows).dense())
            return False, len(self.masks) - 1
        key = (rule, (first + kv[0]) % period, q[0] - kv[0], q[1], kv[1])
        if key not in self.known:
            self.known[key] = len(self.masks)
            self.masks.append(_by_position(*key, device=self.mask.q_positions.device))
        return False, self.known[key]


def _by_position(rule: Rule, first: int, ahead: int, queries: int, keys: int, *, device: torch.device) -> Tensor:
    """The dense mask of queries that begin `ahead` positions after the keys, which begin at position `first`."""
    q_positions = torch.arange(first + ahead, first + ahead + queries, device=device)[None]
    kv_positions = torch.arange(first, first + keys, device=device)[None]
    q_ones, kv_ones = torch.ones_like(q_positions), torch.ones_like(kv_positions)
    return Mask(q_positions, q_ones, kv_positions, kv_ones, None, None, rule).dense()

"""Attention masks as data.

A `Mask` holds positions and segment ids of queries and keys (tensors) and a rule (static). The rule is a predicate on
what a token is, never on where it stands in the row, so permuting, sharding or slicing a sequence is the same slicing
of these tensors. Memory is linear in the sequence until a kernel asks for more (`Mask.dense`).

    rule = Causal() & Window(128)         # sliding window: 128 keys, the query's own among them
    rule = Causal() | SameSpan()          # text with bidirectional images; a prefix LM is one span at the start

Two tokens of different segments, and padding (segment 0), never see each other under any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree


class Tokens(NamedTuple):
    """What a rule may look at, shaped to broadcast: queries [..., Q, 1], keys [..., 1, K]."""

    positions: Tensor
    segments: Tensor
    spans: Tensor | None


@dataclass(frozen=True)
class Rule:
    """A static predicate on (query, key). Compose with `&` and `|`."""

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must say which keys a query may see.")

    def __and__(self, other: Rule) -> Rule:
        return And(self, other)

    def __or__(self, other: Rule) -> Rule:
        return Or(self, other)


@dataclass(frozen=True)
class And(Rule):
    """Both rules allow it."""

    left: Rule
    right: Rule

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return self.left(q, kv) & self.right(q, kv)


@dataclass(frozen=True)
class Or(Rule):
    """One of the rules allows it."""

    left: Rule
    right: Rule

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return self.left(q, kv) | self.right(q, kv)


@dataclass(frozen=True)
class Everything(Rule):
    """Every key of the segment: an encoder."""

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return q.segments == kv.segments


@dataclass(frozen=True)
class Causal(Rule):
    """No key later than the query."""

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return kv.positions <= q.positions


def _positive(rule: Rule, size: int) -> None:
    if size < 1:
        raise ValueError(f"{rule!r}: the size must be at least 1.")


@dataclass(frozen=True)
class Window(Rule):
    """No key `size` or more positions before the query: with `Causal`, `size` keys including the query's own."""

    size: int

    def __post_init__(self) -> None:
        _positive(self, self.size)

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return q.positions - kv.positions < self.size


@dataclass(frozen=True)
class BidirectionalWindow(Rule):
    """Keys at most `size` positions away on either side: 2 size + 1 keys."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"{self!r}: the size must be at least 0.")

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return (q.positions - kv.positions).abs() <= self.size


@dataclass(frozen=True)
class Chunk(Rule):
    """Only keys of the same fixed block of `size` positions, counted within the document (Llama 4)."""

    size: int

    def __post_init__(self) -> None:
        _positive(self, self.size)

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return q.positions // self.size == kv.positions // self.size


@dataclass(frozen=True)
class SameSpan(Rule):
    """Both tokens lie in one bidirectional span (ids from 1; 0 is no span): an image, or the prefix of a prefix LM."""

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        if q.spans is None or kv.spans is None:
            raise ValueError("The rule SameSpan needs span ids: pass `spans` [B, S] where the mask is built.")
        return (q.spans == kv.spans) & (q.spans > 0)


@tree.pytree
@dataclass(frozen=True)
class Mask:
    """Which keys each query sees. Tensors are [B or 1, Q] and [B or 1, K]; segment 0 is padding."""

    q_positions: Tensor
    q_segments: Tensor
    kv_positions: Tensor
    kv_segments: Tensor
    q_spans: Tensor | None
    kv_spans: Tensor | None
    rule: Rule = tree.static()

    def allowed(self, q: Tokens, kv: Tokens) -> Tensor:
        """The whole predicate: the rule, one segment, no padding."""
        return (q.segments == kv.segments) & (kv.segments > 0) & self.rule(q, kv)

    def dense(self) -> Tensor:
        """bool [B, 1, Q, K], True where the query may look."""
        q = Tokens(self.q_positions[..., None], self.q_segments[..., None], _last(self.q_spans, -1))
        kv = Tokens(self.kv_positions[..., None, :], self.kv_segments[..., None, :], _last(self.kv_spans, -2))
        return self.allowed(q, kv)[..., None, :, :]

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """FlexAttention's form of the predicate, over (batch, head, query index, key index)."""

        def mod(b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
            def take(tensor: Tensor, index: Tensor) -> Tensor:
                return tensor[b if tensor.shape[0] > 1 else 0, index]

            def spans(tensor: Tensor | None, index: Tensor) -> Tensor | None:
                return None if tensor is None else take(tensor, index)

            q = Tokens(take(self.q_positions, q_index), take(self.q_segments, q_index), spans(self.q_spans, q_index))
            kv = Tokens(
                take(self.kv_positions, kv_index), take(self.kv_segments, kv_index), spans(self.kv_spans, kv_index)
            )
            return self.allowed(q, kv)

        return mod


def _last(tensor: Tensor | None, dim: int) -> Tensor | None:
    return None if tensor is None else tensor.unsqueeze(dim)


MaskLike = Mask | Tensor | Any  # Any: FlexAttention's BlockMask, which this file need not import
Create = Callable[..., Any]


def build_mask(
    rule: Rule, positions: Tensor, segment_ids: Tensor, *, spans: Tensor | None = None, create: Create | None = None
) -> MaskLike:
    """The self-attention mask of a row under `rule`.

    positions, segment_ids, spans: [B, S]. create: a caller's constructor with the signature of FlexAttention's
    `create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=...)`; then its result is returned.
    """
    mask = Mask(positions, segment_ids, positions, segment_ids, spans, spans, rule)
    if create is None:
        return mask
    batch, length = positions.shape[:2]
    return create(mask.mask_mod(), batch, None, length, length, device=positions.device)


def causal_masks(
    kinds: Iterable[str], window: int | None, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of a decoder: kinds that begin with "sliding" see `window` keys, the others all before them.

    Kinds with one rule share one mask.
    """
    rules = {kind: Causal() & Window(window or 0) if kind.startswith("sliding") else Causal() for kind in kinds}
    masks = {rule: build_mask(rule, positions, segment_ids, create=create) for rule in dict.fromkeys(rules.values())}
    return {kind: masks[rule] for kind, rule in sorted(rules.items())}


@dataclass(frozen=True)
class Layout:
    """Facts about one batch, read from its values on the host: for each row the [start, stop) of its documents.

    A document here is a run of one segment whose positions count up by one. Only kernels use this, and only as a way to
    do less: it never changes what is computed.
    """

    rows: tuple[tuple[tuple[int, int], ...], ...]
    length: int

    @property
    def plain(self) -> bool:
        """Every row is one whole document in order, so that causal by position is causal by index."""
        return all(row == ((0, self.length),) for row in self.rows)


def document_layout(positions: Tensor, segment_ids: Tensor) -> Layout | None:
    """The layout of [B, S] positions and segment ids; None where a document is not one run in order (permuted)."""
    positions, segment_ids = positions.cpu(), segment_ids.cpu()
    positions, segment_ids = torch.broadcast_tensors(positions, segment_ids)
    length = segment_ids.shape[1]
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    if length:
        changed = segment_ids[:, 1:] != segment_ids[:, :-1]
        starts[:, 1:] = changed | ((positions[:, 1:] != positions[:, :-1] + 1) & (segment_ids[:, 1:] > 0))
    rows = []
    for row_starts, row_segments in zip(starts, segment_ids, strict=True):
        begin = row_starts.nonzero().flatten().tolist()
        runs = zip(begin, [*begin[1:], length], row_segments[begin].tolist(), strict=True)
        documents = [(start, stop, segment) for start, stop, segment in runs if segment > 0]
        if len({segment for _, _, segment in documents}) < len(documents):
            return None
        rows.append(tuple((start, stop) for start, stop, _ in documents))
    return Layout(tuple(rows), length)


def layout(masks: Mapping[str, MaskLike]) -> Layout | None:
    """The layout of one batch's masks, made once on the host; None where they do not describe rows of whole documents.

    Pass the result to `forward` as `layout=`. It belongs to this batch in this order: make it anew after `permute` or
    `split`.
    """
    data = list({id(mask): mask for mask in masks.values() if isinstance(mask, Mask)}.values())
    if not data or any(m.q_positions is not m.kv_positions or m.q_segments is not m.kv_segments for m in data):
        return None
    first = data[0]
    if any(m.q_positions is not first.q_positions or m.q_segments is not first.q_segments for m in data[1:]):
        return None
    return document_layout(first.q_positions, first.q_segments)

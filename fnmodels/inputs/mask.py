"""Attention masks as data.

A `Mask` holds positions and segment ids of queries and keys (tensors) and a rule (static). The rule is a predicate on
what a token is, never on where it stands in the row, so permuting, sharding or slicing a sequence is the same slicing
of these tensors. Memory is linear in the sequence until a kernel asks for more (`Mask.dense`).

Two tokens of different segments, and padding (segments of 0 or less), never see each other under any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels import tree

from .rules import Causal, Rule, Tokens, Window
from .segments import integers


@tree.pytree
@dataclass(frozen=True)
class Mask:
    """Which keys each query sees. Tensors are [B or 1, Q] and [B or 1, K]; segments not above 0 are padding."""

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

    def part(self, q: slice, kv: slice, rows: slice = slice(None)) -> Mask:
        """The mask of some queries and keys, and of some rows where they differ."""

        def cut(tensor: Tensor, which: slice) -> Tensor:
            return tensor[rows if tensor.shape[0] > 1 else slice(None), which]

        return Mask(
            cut(self.q_positions, q),
            cut(self.q_segments, q),
            cut(self.kv_positions, kv),
            cut(self.kv_segments, kv),
            None if self.q_spans is None else cut(self.q_spans, q),
            None if self.kv_spans is None else cut(self.kv_spans, kv),
            self.rule,
        )

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

    positions, segment_ids, spans: [B, S] integers of any type; the mask has them as int64. create: a caller's
    constructor with the signature of FlexAttention's `create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=...)`;
    then its result is returned. Raises ValueError for positions of several axes, and for what is no integer.
    """
    if positions.ndim != 2:
        raise ValueError(
            f"positions must be [B, S], not {list(positions.shape)}: this model's masks count one axis. A family whose "
            "tables have several makes its masks of `fnmodels.text_order(positions, segment_ids)`."
        )
    positions, segment_ids = integers("positions", positions), integers("segment_ids", segment_ids)
    spans = None if spans is None else integers("spans", spans)
    mask = Mask(positions, segment_ids, positions, segment_ids, spans, spans, rule)
    if create is None:
        return mask
    batch, length = positions.shape[:2]
    return create(mask.mask_mod(), batch, None, length, length, device=positions.device)


def causal_masks(
    kinds: Iterable[str], window: int | None, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of a decoder: kinds that begin with "sliding" see `window` keys, the others all before them."""
    rules = {kind: Causal() & Window(window or 0) if kind.startswith("sliding") else Causal() for kind in kinds}
    return masks_of(rules, positions, segment_ids, create=create)


def masks_of(
    rules: Mapping[str, Rule], positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; kinds with one rule share one mask."""
    masks = {rule: build_mask(rule, positions, segment_ids, create=create) for rule in dict.fromkeys(rules.values())}
    return {kind: masks[rules[kind]] for kind in sorted(rules)}  # of names alone: dynamo cannot sort pairs

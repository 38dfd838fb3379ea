"""Attention masks as data: `Mask`, a pytree of positions and segment ids with a static rule.

The rule is a predicate on the positions and segments of a query and a key, never on their indices in the row, so that
permuting, sharding or slicing the sequence is the same operation on these tensors. Memory is linear in the sequence
until a kernel needs a dense mask (`Mask.dense`).

Two tokens of different segments, and padding (segments of 0 or less), never see each other under any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fnmodels import tree

from .rules import Causal, Rule, Tokens, Window
from .segments import integers


@tree.pytree
@dataclass(frozen=True)
class Mask:
    """The keys that each query sees, as a rule and the tensors that it reads. Segments not above 0 are padding.

    Args:
        q_positions: int64 [B or 1, Q], of the queries.
        q_segments: int64 [B or 1, Q].
        kv_positions: int64 [B or 1, K], of the keys.
        kv_segments: int64 [B or 1, K].
        q_spans: int64 [B or 1, Q], which bidirectional span a query lies in, from 1; None: there are none.
        kv_spans: int64 [B or 1, K], the same of the keys.
        rule: The predicate on (query, key) beside segments and padding.
    """

    q_positions: Tensor
    q_segments: Tensor
    kv_positions: Tensor
    kv_segments: Tensor
    q_spans: Tensor | None
    kv_spans: Tensor | None
    rule: Rule = tree.static()

    def __repr__(self) -> str:
        """The shapes and the rule, not the tensors: Mask(q=[2, 8], kv=[2, 8], rule=Causal())."""
        q, kv = (list(x.shape) if isinstance(x, Tensor) else x for x in (self.q_positions, self.kv_positions))
        return f"Mask(q={q}, kv={kv}, rule={self.rule})"

    def __getstate__(self) -> dict[str, Any]:
        """The fields, for copies and files, without the notes that calls leave on a mask."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def allowed(self, q: Tokens, kv: Tokens) -> Tensor:
        """The full predicate: same segment, no padding, and the rule allows it.

        Args:
            q: Positions, segments and spans of queries.
            kv: Those of keys, of a shape that broadcasts.

        Returns:
            bool of the broadcast shape.
        """
        return (q.segments == kv.segments) & (kv.segments > 0) & self.rule(q, kv)

    def dense(self) -> Tensor:
        """The mask as a tensor of bools.

        Returns:
            bool [B, 1, Q, K], True where the query may attend to the key.
        """
        q = Tokens(self.q_positions.unsqueeze(-1), self.q_segments.unsqueeze(-1), _unsqueeze(self.q_spans, -1))
        kv = Tokens(self.kv_positions.unsqueeze(-2), self.kv_segments.unsqueeze(-2), _unsqueeze(self.kv_spans, -2))
        return self.allowed(q, kv).unsqueeze(-3)

    def select(self, q: slice | Tensor, kv: slice | Tensor, rows: slice = slice(None)) -> Mask:
        """The mask of some queries, keys and batch rows (tensors [1, S] serve every row).

        Args:
            q: The queries, a slice, or indices [n] that also reorder the tokens.
            kv: The keys, likewise.
            rows: The batch rows.

        Returns:
            The smaller mask.
        """

        def sliced(tensor: Tensor, indices: slice | Tensor) -> Tensor:
            return tensor[rows if tensor.shape[0] > 1 else slice(None), indices]

        return Mask(
            sliced(self.q_positions, q),
            sliced(self.q_segments, q),
            sliced(self.kv_positions, kv),
            sliced(self.kv_segments, kv),
            None if self.q_spans is None else sliced(self.q_spans, q),
            None if self.kv_spans is None else sliced(self.kv_spans, kv),
            self.rule,
        )

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The predicate for FlexAttention.

        Returns:
            mask_mod(batch, head, query index, key index) -> bool.
        """

        def mod(b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
            def at(tensor: Tensor, index: Tensor) -> Tensor:
                return tensor[b if tensor.shape[0] > 1 else 0, index]

            def spans(tensor: Tensor | None, index: Tensor) -> Tensor | None:
                return None if tensor is None else at(tensor, index)

            q = Tokens(at(self.q_positions, q_index), at(self.q_segments, q_index), spans(self.q_spans, q_index))
            kv = Tokens(at(self.kv_positions, kv_index), at(self.kv_segments, kv_index), spans(self.kv_spans, kv_index))
            return self.allowed(q, kv)

        return mod


def _unsqueeze(tensor: Tensor | None, dim: int) -> Tensor | None:
    return None if tensor is None else tensor.unsqueeze(dim)


MaskLike = Mask | Tensor | Any  # Any: FlexAttention's BlockMask, whose module is slow to import
Create = Callable[..., Any]


def build_mask(
    rule: Rule, positions: Tensor, segment_ids: Tensor, *, spans: Tensor | None = None, create: Create | None = None
) -> MaskLike:
    """The self-attention mask of a batch under a rule.

    Args:
        rule: The predicate on (query, key), such as `Causal() & Window(512)`.
        positions: [B, S] of any integer dtype, converted to int64.
        segment_ids: [B, S], documents from 1, padding 0 or less.
        spans: [B, S], bidirectional spans from 1, 0 for none, which `SameSpan` reads; None: there are none.
        create: A constructor with the signature of FlexAttention's `create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN,
            device=...)`, whose result is returned; None: a `Mask`.

    Returns:
        The mask.

    Raises:
        ValueError: Positions have several axes, or a tensor is not of integers.
    """
    check_one_axis(positions)
    positions, segment_ids = integers("positions", positions), integers("segment_ids", segment_ids)
    spans = None if spans is None else integers("spans", spans)
    mask = Mask(positions, segment_ids, positions, segment_ids, spans, spans, rule)
    if create is None:
        return mask
    batch, length = positions.shape[:2]
    return create(mask.mask_mod(), batch, None, length, length, device=positions.device)


def attention_part(mask: MaskLike) -> MaskLike:
    """The mask that attention reads: `mask`, or its part "attention".

    A layer that has attention and a recurrent mixer has {"attention": mask, "order": Segments} for a mask.
    """
    if isinstance(mask, (Mask, Tensor)):  # first, for whether something is a Mapping takes long to say
        return mask
    return mask["attention"] if isinstance(mask, dict | Mapping) else mask


def with_attention(mask: MaskLike, part: MaskLike) -> MaskLike:
    """The same with `part` as the mask that attention reads."""
    if isinstance(mask, (Mask, Tensor)):
        return part
    return {**mask, "attention": part} if isinstance(mask, dict | Mapping) else part


def check_one_axis(positions: Tensor) -> None:
    """ValueError for positions of several axes."""
    if positions.ndim != 2:
        raise ValueError(
            f"positions must be [B, S], not {list(positions.shape)}: this model's masks count one axis. A family whose "
            "tables have several makes its masks of `fnmodels.inputs.text_order(positions, segment_ids)`."
        )


def causal_masks(
    windows: Mapping[str, int | None], positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of a decoder: causal, with a sliding window of so many keys, or without one for None."""
    rules = {kind: Causal() & Window(window) if window else Causal() for kind, window in windows.items()}
    return masks_of(rules, positions, segment_ids, create=create)


def masks_of(
    rules: Mapping[str, Rule],
    positions: Tensor,
    segment_ids: Tensor,
    *,
    spans: Tensor | None = None,
    create: Create | None = None,
) -> dict[str, MaskLike]:
    """{kind: mask}; kinds with equal rules share one mask."""
    made = {rule: build_mask(rule, positions, segment_ids, spans=spans, create=create) for rule in rules.values()}
    return {kind: made[rules[kind]] for kind in sorted(rules)}  # by name: dynamo cannot sort pairs

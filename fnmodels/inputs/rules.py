"""Mask rules: static predicates on (query, key), with the bounds from which kernels skip empty and full blocks.

rule = Causal() & Window(128)         # sliding window: 128 keys, including the query's own
rule = Causal() | SameSpan()          # text with bidirectional images; a prefix LM is one span at the start
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor


class Tokens(NamedTuple):
    """The arguments of a rule, shaped to broadcast: queries [..., Q, 1], keys [..., 1, K]."""

    positions: Tensor
    segments: Tensor
    spans: Tensor | None


Range = tuple[int, int]  # first and last position, both included
_LONGEST_PERIOD = 1 << 20  # of a rule whose reach is computed position by position


@dataclass(frozen=True)
class Rule:
    """A static predicate on (query, key). Compose with `&` and `|`.

    `visible`, `covers` and `period` let kernels skip work. Their defaults are correct for every rule, so a rule of your
    own may leave them out.
    """

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must say which keys a query may see.")

    def visible(self, q: Range) -> tuple[float, float]:
        """Bounds of the positions that queries may see.

        Args:
            q: The first and the last position of the queries.

        Returns:
            A pair low, high: no query at these positions sees a key at a position below low or above high.
        """
        return -math.inf, math.inf

    def covers(self, q: Range, kv: Range) -> bool:
        """Whether all queries of a range surely see all keys of another (in the same segment).

        Args:
            q: The first and the last position of the queries.
            kv: The first and the last position of the keys.

        Returns:
            True only if every query sees every key; False is always right.
        """
        return False

    def period(self) -> int:
        """A shift of all positions that never changes the result.

        Returns:
            The shift; 0: none is known, or other inputs matter.
        """
        return 0

    def __and__(self, other: Rule) -> Rule:
        return And(self, other)

    def __or__(self, other: Rule) -> Rule:
        return Or(self, other)


@dataclass(frozen=True)
class And(Rule):
    """Pairs that both rules allow."""

    left: Rule
    right: Rule

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return self.left(q, kv) & self.right(q, kv)

    def visible(self, q: Range) -> tuple[float, float]:
        (low, high), (other_low, other_high) = self.left.visible(q), self.right.visible(q)
        return max(low, other_low), min(high, other_high)

    def covers(self, q: Range, kv: Range) -> bool:
        return self.left.covers(q, kv) and self.right.covers(q, kv)

    def period(self) -> int:
        return math.lcm(self.left.period(), self.right.period())


@dataclass(frozen=True)
class Or(Rule):
    """Pairs that at least one rule allows."""

    left: Rule
    right: Rule

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return self.left(q, kv) | self.right(q, kv)

    def visible(self, q: Range) -> tuple[float, float]:
        (low, high), (other_low, other_high) = self.left.visible(q), self.right.visible(q)
        return min(low, other_low), max(high, other_high)

    def covers(self, q: Range, kv: Range) -> bool:
        return self.left.covers(q, kv) or self.right.covers(q, kv)

    def period(self) -> int:
        return math.lcm(self.left.period(), self.right.period())


class _ShiftInvariant(Rule):
    """A rule that no shift of all positions changes."""

    def period(self) -> int:
        return 1


@dataclass(frozen=True)
class Everything(_ShiftInvariant):
    """Every key of the same segment: an encoder's attention."""

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return q.segments == kv.segments

    def covers(self, q: Range, kv: Range) -> bool:
        return True


@dataclass(frozen=True)
class Causal(_ShiftInvariant):
    """No key later than the query."""

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return kv.positions <= q.positions

    def visible(self, q: Range) -> tuple[float, float]:
        return -math.inf, q[1]

    def covers(self, q: Range, kv: Range) -> bool:
        return kv[1] <= q[0]


@dataclass(frozen=True)
class _Sized(Rule):
    """A rule with a number of positions; ValueError below LEAST."""

    LEAST: ClassVar[int] = 1
    size: int

    def __post_init__(self) -> None:
        if self.size < self.LEAST:
            raise ValueError(f"{self!r}: the size must be at least {self.LEAST}.")


@dataclass(frozen=True)
class Window(_Sized, _ShiftInvariant):
    """No key `size` or more positions before the query: with `Causal`, `size` keys including the query's own.

    Args:
        size: Positions, at least 1.
    """

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return q.positions - kv.positions < self.size

    def visible(self, q: Range) -> tuple[float, float]:
        return q[0] - self.size + 1, math.inf

    def covers(self, q: Range, kv: Range) -> bool:
        return q[1] - kv[0] < self.size


@dataclass(frozen=True)
class BidirectionalWindow(_Sized, _ShiftInvariant):
    """Keys at most `size` positions away on either side: 2 size + 1 keys.

    Args:
        size: Positions, at least 0.
    """

    LEAST = 0

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return (q.positions - kv.positions).abs() <= self.size

    def visible(self, q: Range) -> tuple[float, float]:
        return q[0] - self.size, q[1] + self.size

    def covers(self, q: Range, kv: Range) -> bool:
        return max(q[1] - kv[0], kv[1] - q[0]) <= self.size


@dataclass(frozen=True)
class Chunk(_Sized):
    """Only keys of the same fixed block of `size` positions, counted within the document (Llama 4).

    Args:
        size: Positions, at least 1.
    """

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        return q.positions // self.size == kv.positions // self.size

    def visible(self, q: Range) -> tuple[float, float]:
        return q[0] // self.size * self.size, (q[1] // self.size + 1) * self.size - 1

    def covers(self, q: Range, kv: Range) -> bool:
        return min(q[0], kv[0]) // self.size == max(q[1], kv[1]) // self.size

    def period(self) -> int:
        return self.size


@dataclass(frozen=True)
class SameSpan(Rule):
    """Both tokens lie in one bidirectional span (ids from 1; 0 is no span): an image, or the prefix of a prefix LM."""

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        if q.spans is None or kv.spans is None:
            raise ValueError("The rule SameSpan needs span ids: pass `spans` [B, S] where the mask is built.")
        return (q.spans == kv.spans) & (q.spans > 0)


def reads_spans(rule: Rule) -> bool:
    """Whether the rule is `SameSpan` or has it as a part."""
    return isinstance(rule, SameSpan) or any(
        reads_spans(part) for part in vars(rule).values() if isinstance(part, Rule)
    )


def simplify(rule: Rule, q: Range, kv: Range) -> Rule:
    """An equivalent rule for queries at `q` and keys at `kv`, without the terms that are always true there."""
    if rule.covers(q, kv):
        return Everything()
    if isinstance(rule, And):
        left, right = simplify(rule.left, q, kv), simplify(rule.right, q, kv)
        return right if left == Everything() else left if right == Everything() else And(left, right)
    return rule


def reach_of(rule: Rule) -> float:
    """The longest span of positions, its own included, that a query sees back; infinity where it is not known."""
    period = rule.period()
    if not 0 < period <= _LONGEST_PERIOD:
        return math.inf
    return max(q - rule.visible((q, q))[0] + 1 for q in range(period))

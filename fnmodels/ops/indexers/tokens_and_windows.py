"""The keys that queries read of two rows at once, their last tokens and windows of tokens (`ops.attention.windows`).

The keys of T tokens come first and those of C windows after them, T + C keys of one row. A rule bounds how far back a
query sees tokens; of windows it reads the ones of a choice, or all of its document that have ended by then. As places,
both are linear in what is read.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fnmodels.inputs.convert import shape_of, to_dense
from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.rules import reach_of
from fnmodels.inputs.windows import Windows

from ..attention.choice import READ_ONCE, Choice, gathering_pays
from ..attention.windows import WindowKeys, window_mask
from ..indexer import Keys, chosen, chosen_places, keys_of, pieces, visible

# Measured on CPUs, in products of two elements: what a place costs beside them, a key beside its mask, and the least
# number of all that takes longer than finding places does.
EACH, KEY, START = 512, 4096, 1 << 24


def windows_of(keys: WindowKeys, windows: Windows, among: Tensor | None = None) -> Keys:
    """The windows that the tokens of `windows` may choose, those of their document that have ended; in `among` alone.

    They are named by the position of their last token. among: bool [B, Q, C].
    """
    return Keys(window_mask(windows, keys), windows.segments, keys.segments, keys.ends, among)


@dataclass(frozen=True)
class TokensAndWindows:
    """What queries read.

    tokens: the mask of the keys of tokens, in any form. windows: the windows that a query may read (`windows_of`).
    choices: int64 [B, Q, k], the names of those that it does; None: all of them.
    """

    tokens: MaskLike
    windows: Keys
    choices: Tensor | None

    @property
    def keys(self) -> int:
        """T + C."""
        return shape_of(self.tokens)[-1] + self.windows.positions.shape[1]

    @property
    def count(self) -> float:
        """How many places a query has; infinity where the mask of tokens has no places that are linear in its reach."""
        if not isinstance(self.tokens, Mask) or self.tokens.kv_spans is not None:
            return math.inf
        if self.tokens.rule.visible((0, 0))[1] > 0:  # later tokens too
            return math.inf
        windows = self.windows.positions.shape[1]
        return _near(self.tokens) + (windows if self.choices is None or not windows else self.choices.shape[-1])

    def pays(self, q: Tensor) -> bool:
        """Whether the places take q [B, Q, N, H] at most as long as a mask on CPUs, by the shapes alone.

        Few heads that are narrow, and few queries of few keys, are faster under a mask. Other devices follow the same
        figures, which are not measured there.
        """
        rows, queries, heads, width = q.shape
        if self.count == math.inf or rows * self.keys * (queries * heads * width + KEY) < START:
            return False
        cost = READ_ONCE * (1 + EACH / (heads * width))
        return gathering_pays(self.keys, int(self.count), heads, 1, cost=cost)

    def dense(self) -> Tensor:
        """bool [B, 1, Q, T + C]."""
        near = to_dense(self.tokens)
        some = self.choices is not None and self.windows.positions.shape[1]
        far = chosen(self.windows, self.choices) if some and self.choices is not None else self.windows.dense()
        rows = max(near.shape[0], far.shape[0])
        return torch.cat([part.expand(rows, -1, -1, -1) for part in (near, far)], -1)

    def places(self) -> Choice:
        """The same as the places of these keys, of which a query has `count`; made few queries at a time."""
        tokens, windows, ended = self.tokens, self.windows, self.windows.mask
        assert isinstance(tokens, Mask) and isinstance(ended, Mask), "count is infinite"
        choosing = 1 if self.choices is None else len(self.choices)
        rows, parts = max(shape_of(tokens)[0], shape_of(ended)[0], choosing), []
        for queries in pieces(tokens.q_positions.shape[1], rows * int(self.count)):
            near = _near_places(tokens.select(queries, slice(None)), rows)
            if not windows.positions.shape[1]:  # no row is as long as a window
                parts.append(near)
                continue
            among = None if windows.among is None else windows.among[:, queries]
            some = replace(windows, mask=ended.select(queries, slice(None)), among=among)
            some = replace(some, q_segments=windows.q_segments[:, queries])
            far = _all_places(some, rows) if self.choices is None else chosen_places(some, self.choices[:, queries])
            parts.append(_side_by_side(near, far, rows))
        index, seen = (torch.cat(each, 1) for each in zip(*((part.index, part.seen) for part in parts), strict=True))
        return Choice(index, seen, self.keys)


def _side_by_side(near: Choice, far: Choice, rows: int) -> Choice:
    """Of two rows of keys one after the other."""
    pairs = ((near.index, near.keys + far.index), (near.seen, far.seen))
    index, seen = (torch.cat([t.expand(rows, -1, -1) for t in pair], -1) for pair in pairs)
    return Choice(index, seen, near.keys + far.keys)


def _near(tokens: Mask) -> int:
    """How many tokens a query sees at most."""
    return int(min(reach_of(tokens.rule), tokens.kv_positions.shape[1]))


def _near_places(tokens: Mask, rows: int) -> Choice:
    """The tokens that queries see, at the last positions up to their own."""
    back = torch.arange(_near(tokens), device=tokens.q_positions.device)
    names = tokens.q_positions.expand(rows, -1).unsqueeze(-1) - back
    return chosen_places(keys_of(tokens), names)


def _all_places(keys: Keys, rows: int) -> Choice:
    """All that queries may choose: C places from the first key of their document on, where those it has come first."""
    count = keys.positions.shape[1]
    ordered, order = keys.segments.expand(rows, -1).sort(dim=-1, stable=True)
    at = torch.searchsorted(ordered, keys.q_segments.expand(rows, -1).contiguous()).clamp(max=count - 1)
    index = order.gather(1, at).unsqueeze(-1) + torch.arange(count, device=order.device)
    inside, index = index < count, index.clamp(max=count - 1)
    return Choice(index, inside & visible(keys, index), count)

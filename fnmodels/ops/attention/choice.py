"""`Choice`: the keys that each query attends to, by index: the form of a mask that kernel="sparse" reads."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree

WORTH = 3  # times as many keys as are chosen, from which on gathering them is faster than a mask: measured on CPUs
READ_ONCE = 2 / 3  # the cost of keys that are their own values, which are gathered once, beside that of keys and values
SHARED = 8  # query heads that share a head of keys, below which gathered keys are read too seldom to pay


@tree.pytree
@dataclass(frozen=True)
class Choice:
    """The chosen keys of queries; memory is linear in their number.

    index: int64 [B or 1, Q, k], the place of each chosen key in its row of keys; any place where `seen` is False.
    seen: bool [B or 1, Q, k], False for an entry that names no visible key, or one that an earlier entry names.
    keys: how many keys K a row has.
    groups: G, the heads of keys that have a choice each, all of a row after each other, [B G, Q, k]; 1: all have one.
    """

    index: Tensor
    seen: Tensor
    keys: int = tree.static()
    groups: int = tree.static(default=1)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B or 1, G, Q, K), as of a dense mask."""
        return self.index.shape[0] // self.groups, self.groups, self.index.shape[1], self.keys

    def dense(self) -> Tensor:
        """bool [B or 1, G, Q, K], True for the chosen keys."""
        mask = torch.zeros((*self.index.shape[:2], self.keys + 1), dtype=torch.bool, device=self.index.device)
        index = self.index.where(self.seen, self.keys)
        return mask.scatter(-1, index, torch.ones_like(self.seen))[..., : self.keys].unflatten(0, (-1, self.groups))

    def pays(self, heads: int, groups: int, *, cost: float = 1.0) -> bool:
        """`gathering_pays` for these keys."""
        return gathering_pays(self.keys, self.index.shape[-1], heads, groups, cost=cost)


def gathering_pays(keys: int, count: int, heads: int, groups: int, *, cost: float = 1.0) -> bool:
    """Whether gathering `count` chosen of `keys` keys is faster than a dense mask.

    For `heads` of queries and `groups` of keys. cost: what a gathered key takes to multiply, in units of one under the
    dense mask.
    """
    return heads >= SHARED * groups and keys >= WORTH * cost * count


def named_once(index: Tensor, seen: Tensor, keys: int) -> Choice:
    """The `Choice` of index [B, Q, k] where seen [B, Q, k], sorted by place; of equal entries the first counts."""
    ordered = index.where(seen, keys).sort(dim=-1).values
    seen = ordered < keys
    if ordered.shape[-1] > 1:
        repeated = ordered[..., 1:] == ordered[..., :-1]
        seen = seen & ~torch.nn.functional.pad(repeated, (1, 0))
    return Choice(ordered.clamp(max=keys - 1), seen, keys)


def every_key(allowed: Tensor) -> Choice:
    """The `Choice` of all keys that a dense mask allows. ValueError for a mask that differs between heads."""
    if allowed.shape[1] != 1:
        raise ValueError(
            f'kernel="sparse" reads one choice for all heads, and this mask has {allowed.shape[1]}: "sdpa" and '
            'kernel="math" take masks per head.'
        )
    rows, _, queries, keys = allowed.shape
    index = torch.arange(keys, device=allowed.device).expand(rows, queries, keys)
    return Choice(index, allowed[:, 0], keys)


def reader_of_choices(kernel: Any) -> str | None:
    """The name of the kernel that reads a `Choice`, "auto", "sparse" or "flex"; None: a dense mask is made of it.

    A function that reads choices, by a kernel of this name, has it as its attribute `reader_of_choices`.
    """
    reader: str | None = getattr(kernel, "reader_of_choices", None)
    return kernel if kernel in ("auto", "sparse", "flex") else reader


def reads_choices(kernel: Any) -> bool:
    """Whether a kernel takes a `Choice`; others take a dense mask of it. In a compiled graph only "flex" does."""
    reader = reader_of_choices(kernel)
    return reader == "flex" or (reader is not None and not torch.compiler.is_compiling())

"""The two ends of the model where the vocabulary is divided: embedding, logits, and what a cross entropy needs of them.

A `Vocab` stands where the table stands in F.embedding and F.linear. Logits come out whole there, which is right for
sampling and for losses of one's own and gathers [B, S, V]; `train.head_loss` instead leaves them in parts, and of each
token three numbers are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.values import readable
from fnmodels.tree import Tree, pytree, static
from train.dist import collectives
from train.dist.region import Region

HEAD_BIAS = "lm_head_bias"  # the entry of params with a head's bias [V], which is sharded as the head's rows are


@pytree
@dataclass(frozen=True, eq=False)
class Vocab:
    """weight [V / size, D]: this process' rows of an embedding, a head, or of the one table that is both."""

    weight: Any
    region: Region = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole table."""
        return (self.weight.shape[0] * self.region.size, *self.weight.shape[1:])

    @property
    def part(self) -> Part:
        rows = self.weight.shape[0]
        return Part(self.region.rank * rows, rows, self.region)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.embedding(ids, self) and F.linear(x, self, bias); torch raises for other functions, naming this class.

        bias: None, or this process' part [V / size].
        """
        if func is F.embedding and isinstance(args[1], cls):
            return args[1].look_up(args[0])
        if func is F.linear and isinstance(args[1], cls):
            return args[1].logits(args[0], *args[2:])
        return NotImplemented

    def look_up(self, ids: Tensor) -> Tensor:
        """[B, S, D], the stream with all its columns. IndexError for an id that the whole table does not have."""
        if _outside(ids, self.shape[0]):
            raise IndexError("index out of range")
        local, own = self.part.local(ids)
        rows = F.embedding(local, self.weight)
        return collectives.leave(rows.where(own[..., None], 0), self.region.group)

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[B, S, V] of the stream x, the same in all processes; bias [V / size]."""
        part = F.linear(self.region.enter(x), self.weight, bias)
        return collectives.join(part, -1, self.region.group)


@dataclass(frozen=True)
class Part:
    """The logits [..., rows] of the vocabulary's rows from `first` on."""

    first: int
    rows: int
    region: Region

    @property
    def vocabulary(self) -> int:
        return self.rows * self.region.size

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(their rows here, 0 where they are others'; whether they are here)."""
        own = (ids >= self.first) & (ids < self.first + self.rows)
        return torch.where(own, ids - self.first, 0), own

    def totals(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of logits z [..., rows] and ids [...]: log(sum(exp)) over the vocabulary, the id's logit, and the mean.

        ValueError for an id that is in nobody's part, which would otherwise count as a logit of 0.
        """
        if _outside(target, self.vocabulary):
            raise ValueError(
                f"The labels go from {int(target.min())} to {int(target.max())}, but the model knows those from 0 to "
                f"{self.vocabulary - 1}."
            )
        local, own = self.local(target)
        at = z.gather(-1, local[..., None])[..., 0].where(own, 0)
        mine = torch.stack((z.logsumexp(-1), at, z.sum(-1)))
        each = collectives.join(mine[None], 0, self.region.group)  # [size, 3, ...]
        of_all, at, total = each.unbind(1)
        return of_all.logsumexp(0), at.sum(0), total.sum(0) / self.vocabulary


def _outside(ids: Tensor, size: int) -> bool:
    """Whether some of them are, where values can be read without waiting for a device."""
    if ids.device.type != "cpu" or not ids.numel() or not readable(ids):
        return False
    return int(ids.min()) < 0 or int(ids.max()) >= size


def opened(params: Mapping[str, Tree], name: str, x: Tensor) -> tuple[dict[str, Tree], Tensor]:
    """(params, x) for `family.unembed` inside, where it gives this process' logits. params[name]: the head, a `Vocab`.

    The params are those outside of layers that `unembed` can read.
    """
    head = params[name]
    region: Region = head.region
    rest = {key: value for key, value in params.items() if isinstance(value, Tensor)}
    if not region.sequence:  # under it they were made so before: all of the stream's gradients are partial there
        rest = {key: value if key == HEAD_BIAS else region.shared(value) for key, value in rest.items()}
    return {**rest, name: head.weight}, region.enter(x)

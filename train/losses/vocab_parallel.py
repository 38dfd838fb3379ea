"""Embedding, LM head and cross entropy over a vocabulary that tensor parallelism shards by rows.

A `Vocab` replaces the weight in F.embedding and F.linear. There the logits are gathered to [B, S, V], as sampling and
custom losses need them; `train.losses.head_loss` keeps them sharded and gathers three scalars per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import readable
from fnmodels.ops.invariant.rows import invariant_linear, rows_are_invariant
from fnmodels.tree import Tree, pytree, static
from train.comm import collectives
from train.comm.region import Region

HEAD_BIAS = "lm_head_bias"  # the entry of params with a head's bias [V], which is sharded as the head's rows are


@pytree
@dataclass(frozen=True, eq=False)
class Vocab:
    """weight [V / size, D]: this rank's rows of the embedding, the head, or their one tied table."""

    weight: Any
    region: Region = static()
    invariant: ClassVar[bool] = True  # its product is that of kernel="invariant" where that is chosen

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, [V, D]."""
        return (self.weight.shape[0] * self.region.size, *self.weight.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows, which heads of a dtype of their own ask for."""
        dtype: torch.dtype = self.weight.dtype
        return dtype

    @property
    def part(self) -> Part:
        rows = self.weight.shape[0]
        return Part(self.region.rank * rows, rows, self.region)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.embedding(ids, self) and F.linear(x, self, bias); other functions raise torch's error.

        bias: None, or this rank's shard [V / size].
        """
        if func is F.embedding and isinstance(args[1], cls):
            return args[1].look_up(args[0])
        if func is F.linear and isinstance(args[1], cls):
            return args[1].logits(args[0], *args[2:])
        return NotImplemented

    def look_up(self, ids: Tensor) -> Tensor:
        """Embeddings [B, S, D] of ids [B, S], for all positions. IndexError for an id outside the global vocabulary."""
        if are_outside(ids, self.shape[0]):
            raise IndexError("index out of range")
        local, own = self.part.local(ids)
        rows = F.embedding(local, self.weight)
        return collectives.leave(rows.where(own[..., None], 0), self.region.group)

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Global logits [B, S, V] of x [B, S, D], the same on every rank; bias [V / size]."""
        x = self.region.enter(x)
        part = (invariant_linear if rows_are_invariant() else F.linear)(x, self.weight, bias)
        return collectives.join(part, -1, self.region.group)


@dataclass(frozen=True)
class Part:
    """A vocabulary shard: logits [..., rows] of the ids from `first` on."""

    first: int
    rows: int
    region: Region

    @property
    def vocabulary(self) -> int:
        return self.rows * self.region.size

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(row of each id in this shard, 0 for ids of other shards; mask of the ids in this shard), each [...]."""
        own = (ids >= self.first) & (ids < self.first + self.rows)
        return torch.where(own, ids - self.first, 0), own

    def totals(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per token, over the global vocabulary: log(sum(exp(z))), the logit of the target id, and the mean logit.

        z: this shard's logits [..., rows]; target: global ids [...], the shape of each result. The logit of
        an id outside the vocabulary is NaN, where the loss could not check the labels (`check_targets`).
        """
        local, own = self.local(target)
        at = z.gather(-1, local[..., None])[..., 0].where(own, 0)
        mine = torch.stack((z.logsumexp(-1), at, z.sum(-1)))
        each = collectives.join(mine[None], 0, self.region.group)  # [size, 3, ...]
        of_all, at, total = each.unbind(1)
        known = (target >= 0) & (target < self.vocabulary)
        return of_all.logsumexp(0), at.sum(0).where(known, torch.nan), total.sum(0) / self.vocabulary


def are_outside(ids: Tensor, size: int) -> bool:
    """Whether any id is outside 0..size-1; False where reading values would wait for a device."""
    if ids.device.type != "cpu" or not ids.numel() or not readable(ids):
        return False
    return int(ids.min()) < 0 or int(ids.max()) >= size


def opened(params: Mapping[str, Tree], name: str, x: Tensor) -> tuple[Mapping[str, Tree], Tensor, Part | None]:
    """(params, x, shard) for which `family.unembed` returns this rank's shard of the logits.

    If params[name], the head, is a `Vocab`, the returned params are the top-level tensors and an encoder's "head".
    If it is none, all is unchanged and the shard None.
    """
    head = params.get(name)
    if not isinstance(head, Vocab):
        return params, x, None
    region = head.region
    rest = {key: value for key, value in params.items() if isinstance(value, Tensor) or key == "head"}
    if not region.sequence:  # with sequence parallelism all gradients of x are partial, and this was done before
        rest = {key: value if key == HEAD_BIAS else tree.map(region.shared, value) for key, value in rest.items()}
    return {**rest, name: head.weight}, region.enter(x), head.part

"""A rank's part of a generation cache under tensor parallelism: heads of keys, values and states, channels of tails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels.models.common.spec import Leaf
from fnmodels.ops.slots import Entry
from params.axes import HEADS, KERNEL, LINEAR_HEADS
from train.comm.region import Region

from .leaf_roles import Use, path_in_layer

_KEYS = ("k", "v", "k_scale", "v_scale")  # tensors with heads in dimension 2


@dataclass(frozen=True)
class CacheShards:
    """The part of each layer's entry that this rank holds.

    channels: {layer: indices of the convolutions' channels}, for layers that have any. heads, states: whether heads of
    attention, and of recurrent states, are sharded.
    """

    region: Region
    channels: Mapping[int, Tensor]
    heads: bool
    states: bool

    def own(self, layer: int, entry: Entry) -> Entry:
        """This rank's part of the entry; latents, which all heads share, are replicated."""
        return {name: self._own(layer, name, tensor) for name, tensor in entry.items()}

    def _own(self, layer: int, name: str, x: Tensor) -> Tensor:
        if name in _KEYS and self.heads:  # [B, C, G, H], scales [B, C, G]
            return self._heads(x, 2)
        if name == "state" and self.states:  # [B, heads, ...]
            return self._heads(x, 1)
        if name == "conv" and layer in self.channels:  # [B, K - 1, channels]
            return x[..., self.channels[layer].to(x.device)]
        return x

    def _heads(self, x: Tensor, dim: int) -> Tensor:
        count, size = x.shape[dim], self.region.size
        return x.narrow(dim, self.region.rank * count // size, max(count // size, 1)).clone()


def cache_shards(
    spec: Mapping[str, Leaf],
    dims: Mapping[str, int | None],
    uses: Mapping[str, Mapping[str, Use]],
    kinds: Sequence[str],
    stored: Sequence[int],
    sharded: frozenset[str],
    region: Region,
) -> CacheShards:
    """The `CacheShards` of a plan. A tail has the channels of a layer's convolutions in the order of its parameters.

    stored: which layer's parameters each layer of the cache reads, see `family.stored_layers`.
    """
    channels: dict[int, list[Tensor]] = {}
    widths: dict[int, int] = {}
    for path, leaf in spec.items():
        if not path.startswith("layers.") or KERNEL not in leaf.axes:
            continue
        layer, inner = int(path.split(".")[1]), path_in_layer(path)
        index = torch.arange(leaf.shape[0])
        rows = uses[kinds[stored.index(layer)]][inner or ""].rows
        own = index.chunk(region.size)[region.rank] if dims[path] == 0 else index if rows is None else index[rows]
        channels.setdefault(layer, []).append(own + widths.get(layer, 0))
        widths[layer] = widths.get(layer, 0) + leaf.shape[0]
    indices = {i: torch.cat(channels[layer]) for i, layer in enumerate(stored) if layer in channels}
    return CacheShards(region, indices, HEADS in sharded, LINEAR_HEADS in sharded)

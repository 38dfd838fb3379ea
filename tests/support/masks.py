"""The masks of dropout that a run used, by name, layer and token of the batch, to be compared bit for bit with others.

They are read off what was dropped, which is 0 in the result where it was none before.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.inputs.noise import fold
from fnmodels.models.common import context, encoder
from fnmodels.ops.dropout import Noise

UNKNOWN = -1  # else 0 dropped, 1 kept
Place = tuple[str, int]  # (name, layer), of which the embedding has -1
Grids = dict[Place, Tensor]  # int8 [tokens, features], or of weights [heads, tokens, tokens]


def keyed(keys: Tensor, valid: Tensor) -> Tensor:
    """Keys [B, S] in which padding, whose keys have no meaning, has others than all tokens."""
    others = torch.arange(keys.numel()).view_as(keys) + 2**33
    return torch.where(valid, keys, others)


@dataclass
class Masks:
    """The masks of a run with these keys, of tokens that are numbered as in the full batch.

    keys: int64 [B, S], all different. layers: their number in the model. counts: how often each place was recorded.
    """

    keys: Tensor
    valid: Tensor
    layers: int
    grids: Grids = field(default_factory=dict)
    counts: dict[Place, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys, self.valid = self.keys.flatten(), self.valid.flatten()
        assert len(set(self.keys.tolist())) == len(self.keys)
        self.numbers: dict[int, tuple[int, int]] = {}  # {key with the layer folded in: (layer, token)}
        for layer in range(-1, self.layers):
            folded = self.keys if layer < 0 else fold(self.keys, layer)
            for token in self.valid.nonzero().flatten().tolist():
                self.numbers[int(folded[token])] = layer, token

    def _tokens(self, keys: Tensor) -> tuple[int, Tensor]:
        """(the layer, the number of each token, -1 of padding) of keys [B, S]."""
        found = [self.numbers.get(key, (None, -1)) for key in _plain(keys).flatten().tolist()]
        layers = {layer for layer, _ in found if layer is not None}
        assert len(layers) <= 1, layers
        return layers.pop() if layers else UNKNOWN, torch.tensor([token for _, token in found]).view(keys.shape)

    def _note(self, place: Place, bits: Tensor, at: tuple[Tensor, ...], size: tuple[int, ...]) -> None:
        """Notes bits at these indices, unless all are of padding; AssertionError where they were others before."""
        if not bits.numel():
            return
        self.counts[place] = self.counts.get(place, 0) + 1
        grid = self.grids[place] = _grown(self.grids.get(place, torch.empty([0] * len(size), dtype=torch.int8)), size)
        known = grid[at]
        assert bool(((known == bits) | (known == UNKNOWN) | (bits == UNKNOWN)).all()), f"two masks of {place}"
        grid[at] = torch.where(bits == UNKNOWN, known, bits)

    def features(self, x: Tensor, result: Tensor, keys: Tensor, name: str, shard: int) -> None:
        layer, tokens = self._tokens(keys)
        there, width = tokens >= 0, x.shape[-1]
        bits = _bits(x, result)[there]
        rows = tokens[there][:, None].expand(bits.shape)
        columns = torch.arange(shard * width, (shard + 1) * width).expand(bits.shape)
        self._note((name, layer), bits, (rows, columns), (len(self.keys), (shard + 1) * width))

    def weights(self, weights: Tensor, result: Tensor, noise: Noise, name: str) -> None:
        layer, queries = self._tokens(noise.queries)
        _, keys = self._tokens(noise.keys)
        heads, first = weights.shape[1], noise.head_shard * weights.shape[1]
        there = ((queries >= 0)[:, None, :, None] & (keys >= 0)[:, None, None]).expand(weights.shape)
        at = torch.arange(first, first + heads)[:, None, None], queries[:, None, :, None], keys[:, None, None]
        indices = tuple(index.expand(weights.shape)[there] for index in at)
        size = first + heads, len(self.keys), len(self.keys)
        self._note((name, layer), _bits(weights, result)[there], indices, size)


def _bits(x: Tensor, result: Tensor) -> Tensor:
    x, result = _plain(x), _plain(result)
    return torch.where(x == 0, UNKNOWN, (result != 0).long()).to(torch.int8)


def _plain(tensor: Tensor) -> Tensor:
    return torch.func.debug_unwrap(tensor.detach())


@contextlib.contextmanager
def recording(keys: Tensor, valid: Tensor, layers: int) -> Iterator[Masks]:
    """Within it masks are recorded of models whose batches have these keys, in any order and shards."""
    masks, real, of_weights = Masks(keys, valid, layers), context.dropped, context.dropped_weights

    def dropped(x: Tensor, keys: Tensor, rate: float, name: str, *, shard: int = 0) -> Tensor:
        result = real(x, keys, rate, name, shard=shard)
        masks.features(x, result, keys, name, shard)
        return result

    def dropped_weights(weights: Tensor, noise: Noise, rate: float, name: str) -> Tensor:
        result = of_weights(weights, noise, rate, name)
        masks.weights(weights, result, noise, name)
        return result

    with pytest.MonkeyPatch.context() as patch:
        for module in (context, encoder, fnmodels.noise):
            patch.setattr(module, "dropped", dropped)
        patch.setattr(context, "dropped_weights", dropped_weights)
        yield masks


def check_same(one: Mapping[Place, Tensor], other: Mapping[Place, Tensor]) -> None:
    """Both have the same masks of the same places, tokens, features, heads and pairs, bit for bit."""
    assert one and one.keys() == other.keys(), one.keys() ^ other.keys()
    for place, grid in one.items():
        assert torch.equal(grid, other[place]), place


def joined(parts: list[Grids]) -> Grids:
    """The masks of several ranks; AssertionError where they differ about a bit."""
    whole: Grids = {}
    for part in parts:
        for place, grid in part.items():
            known = _grown(whole.get(place, grid), grid.shape)
            grid = _grown(grid, known.shape)
            clash = (known != grid) & (known != UNKNOWN) & (grid != UNKNOWN)
            assert not bool(clash.any()), f"ranks differ in {place}"
            whole[place] = torch.maximum(known, grid)
    return whole


def _grown(grid: Tensor, size: tuple[int, ...]) -> Tensor:
    """The grid of at least this size: of shards of features or heads the last one has the largest."""
    size = tuple(map(max, zip(size, grid.shape, strict=True)))
    grown = torch.full(size, UNKNOWN, dtype=grid.dtype)
    grown[tuple(map(slice, grid.shape))] = grid
    return grown


def written(grids: Grids) -> dict[str, list[object]]:
    """As JSON."""
    packed = {place: bytes((grid + 1).flatten().tolist()).hex() for place, grid in grids.items()}
    return {f"{name}/{layer}": [list(grids[name, layer].shape), text] for (name, layer), text in packed.items()}


def read(grids: dict[str, list[object]]) -> Grids:
    found: Grids = {}
    for place, (shape, text) in grids.items():
        name, _, layer = place.rpartition("/")
        values = torch.tensor(list(bytes.fromhex(str(text))), dtype=torch.int8) - 1
        found[name, int(layer)] = values.view(shape)  # type: ignore[call-overload]
    return found

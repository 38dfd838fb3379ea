"""Dropout (arXiv 1207.0580) by explicit keys: a mask is a hash of (key of the token, layer, name, index).

No generator is read, so a mask is the same packed and separate, in any microbatch, in recomputation, under vmap and
compilation and on any mesh. `fnmodels.inputs.noise` makes the keys of tokens; the loop over layers folds in the layer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import ConfigError
from fnmodels.inputs.noise import GOLDEN, WORD, fold, mixed
from fnmodels.ops.torch_internals import traced_as_constant


@dataclass(frozen=True)
class Dropout:
    """The rates of a model's dropout, which acts where a batch has keys of noise.

    weights: of the weights of attention, after the softmax. attention, mlp: of what these add to the residual stream.
    embedding: of what layer 0 reads; in DeBERTa also of the embeddings of distances, in each layer anew. neurons: of
    what the last projection of an MLP reads. final: of what the final norm returns. A cross attention has the rates of
    attention.
    """

    weights: float = 0.0
    attention: float = 0.0
    mlp: float = 0.0
    embedding: float = 0.0
    neurons: float = 0.0
    final: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            rate = getattr(self, field.name)
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
                raise ConfigError(f"The dropout rate of {field.name} is {rate!r}; it must be a number from 0, below 1.")

    @property
    def acts(self) -> bool:
        """Whether a rate is above 0."""
        return any(getattr(self, field.name) for field in fields(self))


@tree.pytree
@dataclass(frozen=True)
class Noise:
    """The keys that one layer reads, each int64 [B, S] with the layer folded in, and its index, int64 [].

    tokens: of the residual stream's positions. neurons: of those inside an MLP. queries, keys: of attention's. They are
    the same, but where ranks share positions or a cross attention reads another sequence. head_shard, mlp_shard: which
    of the equal shards of heads and of the neurons of its MLP the layer has.
    """

    tokens: Tensor
    neurons: Tensor
    queries: Tensor
    keys: Tensor
    layer: Tensor
    head_shard: int = tree.static(default=0)
    mlp_shard: int = tree.static(default=0)

    def read_by(self, name: str) -> tuple[Tensor, int]:
        """(the keys [B, S], the shard of features) of a tensor of this name, such as "mlp" or "mlp.neurons"."""
        return (self.neurons, self.mlp_shard) if name == "mlp.neurons" else (self.tokens, 0)


def named(keys: Tensor, name: str) -> Tensor:
    """Other keys for each name."""
    return fold(keys, _number(name))


@traced_as_constant
def _number(name: str) -> int:
    return zlib.crc32(name.encode())


def dropped(x: Tensor, keys: Tensor, rate: float, name: str, *, shard: int = 0) -> Tensor:
    """x [B, S, D] with each element 0 with probability `rate`, else divided by 1 - rate; keys int64 [B, S].

    Dimensions before D may be broadcast. shard: which of equal shards of features x has.
    """
    first = GOLDEN + shard * x.shape[-1]
    features = mixed(torch.arange(x.shape[-1], device=x.device) + first & WORD)
    return _thinned(x, mixed(named(keys, name)[..., None] ^ features), rate)


def dropped_weights(weights: Tensor, noise: Noise, rate: float, name: str) -> Tensor:
    """Weights [B, N, Q, K] likewise: a hash of the keys of the query and of the key's token, and of the head."""
    heads = torch.arange(weights.shape[1], device=weights.device) + noise.head_shard * weights.shape[1]
    queries = fold(named(noise.queries, name)[:, None], heads[:, None])
    return _thinned(weights, mixed(queries[..., None] ^ mixed(noise.keys ^ GOLDEN)[:, None, None]), rate)


def dropped_table(table: Tensor, keys: Tensor, rate: float, name: str) -> Tensor:
    """The table [R, D], dropped anew for each of the keys [B, U]: [B, U, R, D]."""
    rows = torch.arange(table.shape[0], device=table.device)
    return dropped(table, fold(keys[..., None], rows), rate, name)


def _thinned(x: Tensor, hashes: Tensor, rate: float) -> Tensor:
    return torch.where(
        hashes >= round(rate * (WORD + 1)), x / (1 - rate), torch.zeros((), dtype=x.dtype, device=x.device)
    )

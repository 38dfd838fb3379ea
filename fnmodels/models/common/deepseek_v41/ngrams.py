"""Layers of DeepSeek V4.1 that add hashed n-grams to residual streams (`fnmodels.ops.streams.engram`).

The compressed id of each token is "token_map" among the layer's parameters; published files have none, since it is made
of the tokenizer (`params.token_map`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common.context import Context
from fnmodels.models.common.family import parsed
from fnmodels.models.common.layers.ngrams import WORD, has_table
from fnmodels.models.common.spec import Constant, InTurn, Leaf, embedding, weight
from fnmodels.models.common.storage import Stored, fuse
from fnmodels.ops.streams.engram import add_engram, compressed, engram_hashes, engram_rows
from fnmodels.ops.streams.ngrams import XorHash
from fnmodels.tree import Tree

from .drawn import integers

_SEED = 10007  # times the index of a layer


def hashes_of(config: Any) -> tuple[XorHash, ...]:
    """The hash of each table of a config; `end` is unused, for it is the compressed id of a token."""
    layers = [index for index, kind in enumerate(parsed(config.layer_kinds)) if has_table(kind.name)]
    multipliers = [_multipliers(index, config.ngram_size, config.ngram_ids) for index in layers]
    return tuple(engram_hashes(multipliers, config.ngram_heads, config.ngram_rows, 0))


def _multipliers(layer: int, size: int, ids: int) -> Sequence[int]:
    """Of a token and of those before it: odd numbers whose products with compressed ids fit into int64."""
    return [2 * number + 1 for number in integers(_SEED * layer, (2**63 - 1) // ids // 2, size)]


def leaves(config: Any, number: int) -> Tree:
    """The parameters of the layer with this table."""
    D, n, std, how = config.hidden_size, config.residual_streams, config.initializer_range, config.ngram_hashes[number]
    width = len(how.sizes) * config.ngram_head_dim
    kept: dict[str, Any] = {"trainable": False, "decay": False, "keep_dtype": True}
    scale = Leaf((n, D), torch.float32, ("one", "embed"), Constant(1.0), decay=False)
    return {
        "table": embedding(sum(how.sizes), config.ngram_head_dim, std, axis="ngram", size_axis="ngram_latent"),
        "key_proj": weight((n * D, width), ("streams", "ngram_latent"), std),
        "value_proj": weight((D, width), ("embed", "ngram_latent"), std),
        "key_scale": scale,
        "query_scale": scale,
        # numbers of compressed ids, floating so that the tree has gradients
        "token_map": Leaf((config.vocab_size, 1), torch.float32, ("router", "one"), InTurn(config.ngram_ids), **kept),
    }


def names(config: Any, ours: str, theirs: str) -> dict[str, Stored]:
    """{path of a parameter: its name on disk} of these at `ours`; files have one tensor of keys and values."""
    D = config.hidden_size
    rows = {f"{ours}.key_proj": config.residual_streams * D, f"{ours}.value_proj": D}
    plain = {"table": "embed.weight", "key_scale": "k_weight", "query_scale": "q_weight", "token_map": "token_map"}
    found: dict[str, Stored] = {f"{ours}.{name}": f"{theirs}.{there}" for name, there in plain.items()}
    return found | fuse(f"{theirs}.wkv.weight", rows)


def add(weights: Tree, x: Tensor, config: Any, kind: str, ctx: Context) -> Tensor:
    """Streams x [B, S, n, D] with the n-grams of a layer of this kind, whose table is numbered."""
    word = next(word for word in kind.split("_") if word.startswith(WORD))
    how: XorHash = config.ngram_hashes[int(word.removeprefix(WORD))]
    ids, near = ctx.shared("ids"), ctx.shared("preceding")
    padding = torch.full((1,), config.ngram_padding, dtype=torch.int64, device=ids.device)
    ids, near, padding = (compressed(t, weights["token_map"], config.ngram_ids) for t in (ids, near, padding))
    return add_engram(weights, x, engram_rows(ids, near, how, padding), eps=config.rms_norm_eps)

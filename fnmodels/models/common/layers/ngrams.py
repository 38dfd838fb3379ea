"""Layers that add embeddings of hashed n-grams to residual streams (`fnmodels.ops.streams.ngrams`).

A Config is a `NgramConfig`, and its kinds of such layers have the word "ngrams". `numbered` adds the number of the
table to them, by which a block finds its hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import Segments
from fnmodels.ops.streams.ngrams import XorHash, add_ngrams_to_streams, xor_hashes, xor_rows
from fnmodels.tree import Tree

from ..config_json import ConfigJson, Fields, shown
from ..context import Context
from ..decoder import BaseConfig, check_sizes, ngram_inputs
from ..spec import Constant, Leaf, embedding, norm, weight
from ..storage import Stack, Stored

WORD = "ngrams"
_NAMES = {
    "ngram_size": "ngram_size",
    "heads_per_ngram": "ngram_heads",
    "ngram_vocab_size_base": "ngram_rows",
    "make_ngram_vocab_size_divisible_by": "ngram_multiple",
    "ple_embed_dim": "ngram_width",
    "ple_conv_kernel_size": "ngram_taps",
    "seed": "ngram_seed",
    "split_ngram_parts": "ngram_parts",
}
FIELDS = tuple(_NAMES)
_DEFAULTS = {"ngram_size": 3, "ngram_heads": 8, "ngram_rows": 20_000_000, "ngram_multiple": 128, "ngram_taps": 4}
_DEFAULTS |= {"ngram_seed": 1234, "ngram_parts": 512}
_HIGHEST = {"ngram_size": 16, "ngram_heads": 64, "ngram_seed": 1 << 62, "ngram_parts": 1 << 16}
_ON_DISK = {"key_proj": "key_proj", "value_proj": "value_proj", "conv": "conv1d"}
_ON_DISK |= {f"{name}_norm": f"norm_{name}" for name in ("key", "query", "conv")}


@dataclass(frozen=True, kw_only=True)
class NgramConfig(BaseConfig):
    """Sizes and switches of a decoder whose layers may have tables, without effect where none has."""

    rms_norm_eps: float = 1e-6
    residual_streams: int = 4
    ngram_size: int = 0  # tokens of the longest n-gram; 0: no layer has a table
    ngram_heads: int = 8  # of each order of n-grams
    ngram_rows: int = 20_000_000  # the least number of rows of a head
    ngram_multiple: int = 128  # of which a table's rows are a multiple
    ngram_width: int = 2048  # of the rows of all heads, side by side
    ngram_taps: int = 4  # of the convolution
    ngram_seed: int = 1234
    ngram_end: int = 0  # the token id that ends a text
    ngram_parts: int = field(default=512, compare=False)  # of a table in files
    ngram_hashes: tuple[XorHash, ...] = field(init=False, compare=False, repr=False)  # of each table

    def __post_init__(self) -> None:
        super().__post_init__()
        tables = sum(map(has_table, self.layer_kinds))
        if bool(tables) != bool(self.ngram_size):
            raise ConfigError(
                f"ngram_size is {self.ngram_size}, and {tables} of layer_kinds have tables of n-grams; it is 0 where "
                "none has, and at least 2 elsewhere."
            )
        found: tuple[XorHash, ...] = ()
        if tables:
            check_sizes(self, *(name for name in _NAMES.values() if name != "ngram_seed"))
            heads = (self.ngram_size - 1) * self.ngram_heads
            if not heads or self.ngram_width % heads:
                raise ConfigError(
                    f"ngram_size {self.ngram_size} and ngram_heads {self.ngram_heads} make {heads} heads, whose number "
                    f"must be above 0 and divide ngram_width {self.ngram_width}."
                )
            how = (self.ngram_rows, self.vocab_size, self.ngram_seed, self.ngram_end)
            found = tuple(islice(xor_hashes(self.ngram_size, self.ngram_heads, *how), tables))
        object.__setattr__(self, "ngram_hashes", found)


def has_table(kind: str) -> bool:
    """Whether layers of this kind have a table."""
    return f"_{WORD}" in kind


def numbered(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds of layers, with the number of the table of those that have one."""
    tables = count()
    return tuple(f"{kind}{next(tables)}" if has_table(kind) else kind for kind in kinds)


def fields_from_hf(fields: Fields, layers: int, width: int) -> tuple[frozenset[int], dict[str, Any]]:
    """(the indices of the layers with tables, the fields of n-grams); width: the default of ple_embed_dim."""
    listed = fields.take("ple_layer_ids", None)
    if not listed:
        return frozenset(), {}
    known = isinstance(listed, list) and all(type(number) is int and 1 <= number <= layers for number in listed)
    if not known:
        raise ConfigError(f"{fields.where}: 'ple_layer_ids' is {shown(listed)}; layers are numbers from 1 to {layers}.")
    values: dict[str, Any] = {}
    for theirs, ours in _NAMES.items():
        default = width if ours == "ngram_width" else _DEFAULTS[ours]
        if fields.values.get(theirs, 0) is None and ours == "ngram_width":
            fields.take(theirs, None)
            values[ours] = default
            continue
        low = 0 if ours == "ngram_seed" else 1
        values[ours] = fields.integer(theirs, default, low=low, high=_HIGHEST.get(ours, 1 << 31))
    end = fields.values.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int) or isinstance(end, bool) or end < 0:
        raise ConfigError(f"{fields.where}: 'eos_token_id' is {shown(end)}; n-grams end at a token id.")
    return frozenset(number - 1 for number in listed), values | {"ngram_end": end}


def fields_to_hf(config: NgramConfig) -> ConfigJson:
    """The fields of n-grams in a config.json; {} where no layer has a table."""
    if not config.ngram_size:
        return {}
    layers = [i + 1 for i, kind in enumerate(config.layer_kinds) if has_table(kind)]
    return {"ple_layer_ids": layers} | {theirs: getattr(config, ours) for theirs, ours in _NAMES.items()}


def table_rows(config: NgramConfig, number: int) -> int:
    """The rows of a table: those of all heads, and unused ones up to a multiple of ngram_multiple."""
    rows = sum(config.ngram_hashes[number].sizes)
    return rows + -rows % config.ngram_multiple


def leaves(config: NgramConfig, number: int) -> Tree:
    """The parameters of the layer with this table."""
    D, E, std = config.hidden_size, config.ngram_width, config.initializer_range
    width, heads = config.residual_streams * D, (config.ngram_size - 1) * config.ngram_heads
    taps = (width, 1, config.ngram_taps)
    return {
        "table": embedding(table_rows(config, number), E // heads, std, axis="ngram", size_axis="ngram_latent"),
        "key_proj": weight((width, E), ("streams", "ngram_latent"), std),
        "value_proj": weight((D, E), ("embed", "ngram_latent"), std),
        **{f"{name}_norm": norm(width, "streams", 0.0) for name in ("key", "query", "conv")},
        "conv": Leaf(taps, torch.float32, ("convolved", "one", "ngram_taps"), Constant(0.0)),
    }


def names(config: NgramConfig, number: int, ours: str, theirs: str) -> dict[str, Stored]:
    """{path of a parameter: its name on disk} of these at `ours`; files have a table as parts of it, by rows."""
    rows = table_rows(config, number)
    each = -(-rows // config.ngram_parts)
    counts = tuple(min(each, rows - start) for start in range(0, rows, each))
    parts = tuple(f"{theirs}.ple_embedding.ngram_embedding.shard_{i}.weight" for i in range(len(counts)))
    found: dict[str, Stored] = {f"{ours}.table": Stack(parts, counts)}
    return found | {f"{ours}.{name}": f"{theirs}.{there}.weight" for name, there in _ON_DISK.items()}


def ids_of(inputs: Any, config: NgramConfig) -> dict[str, Tensor]:
    """For `shared`: {"ids": token ids [B, S], "preceding": [B, S, n - 1]}; {} where no layer embeds n-grams."""
    return dict(zip(("ids", "preceding"), ngram_inputs(inputs), strict=True)) if config.ngram_size else {}


def add(weights: Tree, x: Tensor, mask: Segments, config: Any, kind: str, ctx: Context) -> Tensor:
    """Streams x [B, S, n, D] with the embeddings of n-grams of a layer of this kind, which is numbered."""
    word = next(word for word in kind.split("_") if word.startswith(WORD))
    how: XorHash = config.ngram_hashes[int(word.removeprefix(WORD))]
    rows, held = xor_rows(ctx.shared("ids"), ctx.shared("preceding"), how), ctx.state()
    state = None if held is None else (held[WORD], held["segment"])
    given = x, rows, mask.segment_ids, state
    x, after = add_ngrams_to_streams(
        weights, *given, step=config.ngram_size, eps=config.rms_norm_eps, kernel=ctx.options.kernel
    )
    ctx.keep(**{WORD: after})
    return x

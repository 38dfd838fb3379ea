"""Embeddings and heads of another number of tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import UnsupportedError
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.models.common.registry import family_of, text_config
from fnmodels.tree import Tree

from .lora.leaves import map_leaves, nodes_of
from .sharding import sharding_of

Rows = Literal["mean"] | Tensor | Mapping[str, Tensor]


def resize_vocab(config: DecoderConfig, params: Tree, size: int, *, rows: Rows = "mean") -> tuple[DecoderConfig, Tree]:
    """The same model with another number of tokens: embedding, head and the head's bias.

    Of the parameters, those of tokens are new tensors; the others are those of `params`. Fewer tokens are the first
    ones.

    Args:
        config: Of a model of text, or with a text model in it.
        params: Plain tensors, without adapters.
        size: The new number of tokens, at least 1.
        rows: What new tokens get: "mean", the mean of the old ones; or values [new tokens, D] for every table, or such
            values by path ("embed_tokens", "lm_head"). Biases and tables without values get the mean.

    Returns:
        The config with the new vocab_size, and the tree of parameters.

    Raises:
        ValueError: The size is below 1, the model has no vocabulary, values have another shape or an unknown path, or
            params have adapters.
        UnsupportedError: Leaves are DTensors, or weights in other forms, such as quantized ones; or the model embeds
            n-grams, whose hash depends on the number of tokens, or its embedding has rows that its head has not.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a vocabulary has at least one token.")
    if field_of(text_config(config), "ngram_size"):
        raise UnsupportedError(
            "The model embeds n-grams by a hash that depends on the number of tokens: with another one every n-gram "
            "would read other rows than those it was trained with."
        )
    if hasattr(text_config(config), "embedding_rows"):
        raise UnsupportedError(
            "The embedding of this model has rows beyond those of its head, which tokens of a larger vocabulary would "
            "read as they are: make the tables anew, and a config with their sizes, vocab_size and embedding_rows."
        )
    if not (rows == "mean" if isinstance(rows, str) else isinstance(rows, Tensor | Mapping)):
        raise ValueError(f'rows is {rows!r:.80}; it is "mean", a tensor [new tokens, D], or {{path: such a tensor}}.')
    for path, values in rows.items() if isinstance(rows, Mapping) else ():
        if not isinstance(values, Tensor):
            raise ValueError(f"rows of {path} is a {type(values).__name__}; it must be a tensor [new tokens, D].")
    if nodes_of(params):
        raise ValueError("params hold adapters; merge them, or take params.lora.weights, before a new vocabulary.")
    resized = _resized(config, size)
    leaves = tree.flatten(family_of(resized).spec(resized))
    shapes = {path: leaf.shape for path, leaf in tree.flatten(family_of(config).spec(config)).items()}
    tables = {path for path, leaf in leaves.items() if leaf.shape != shapes[path]}
    given = rows if isinstance(rows, Mapping) else {}
    if unknown := sorted(set(given) - tables):
        raise ValueError(f"rows names {unknown[0]!r}; tables of tokens are {', '.join(sorted(tables)) or 'unchanged'}.")

    def table(path: str, old: Any) -> Any:
        if path not in tables:
            return old
        values = given.get(path) if isinstance(rows, Mapping) else rows if isinstance(rows, Tensor) else None
        return _table(path, old, leaves[path].shape, None if len(shapes[path]) == 1 and path not in given else values)

    return resized, map_leaves(table, params)


def _resized(config: Any, size: int) -> Any:
    """The config with this number of tokens."""
    if hasattr(config, "vocab_size") and not hasattr(family_of(config), "towers"):
        return replace(config, vocab_size=size)
    if not hasattr(getattr(config, "text", None), "vocab_size"):
        raise ValueError(f"{type(config).__module__} has no vocabulary to resize.")
    return replace(config, text=replace(config.text, vocab_size=size))


def _table(path: str, old: Any, shape: tuple[int, ...], values: Tensor | None) -> Tensor:
    """A table of tokens [V, D] (or a bias [V]) with the first rows of `old`, and new ones."""
    if not isinstance(old, Tensor) or sharding_of(old) is not None:
        raise UnsupportedError(f"{path} is a {type(old).__name__}; a vocabulary is resized in plain tensors.")
    count = shape[0] - old.shape[0]
    if values is not None and tuple(values.shape) != (max(count, 0), *shape[1:]):
        raise ValueError(f"rows of {path} is {list(values.shape)}; it must be {[max(count, 0), *shape[1:]]}.")
    if count <= 0:
        return old[: shape[0]].clone()
    wide = torch.promote_types(old.dtype, torch.float32)
    mean = old.mean(0, dtype=wide).expand(count, *shape[1:])
    return torch.cat([old, (mean if values is None else values).to(old)])

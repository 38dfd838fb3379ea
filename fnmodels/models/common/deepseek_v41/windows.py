"""Keys of windows that layers of DeepSeek V4.1 make, lend and choose among (`fnmodels.ops.indexers.shared_windows`)."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.windows import Windows
from fnmodels.models.common.context import Context
from fnmodels.models.common.deepseek_v4.leaves import wide_norm
from fnmodels.models.common.deepseek_v4.windows import Compressor, keys_and_beside
from fnmodels.models.common.family import LayerKind
from fnmodels.models.common.spec import weight
from fnmodels.ops.attention.windows import WindowKeys
from fnmodels.ops.indexer import Indexer
from fnmodels.ops.indexers.shared_windows import Blocks, SharedKeys, choose_shared, index_of
from fnmodels.ops.mla import Rotate
from fnmodels.tree import Tree

from .config import ratio_of


def window_leaves(config: Any, kind: LayerKind) -> Tree:
    """The parameters that a layer of this kind has beside those of attention to its last tokens."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    width, heads = config.index_head_dim, config.index_n_heads
    leaves: Tree = {}
    if not kind.indexed or kind.shares_choice:
        return leaves
    indexer = {
        "q_b_proj": weight((heads * width, config.q_lora_rank), ("latent", "latent"), std),
        "weights_proj": weight((heads, D), ("latent", "embed"), std),
    }
    if kind.beside is None:
        of_tokens = ("kv_proj", "gate_proj") if ratio_of(kind.name) > 1 else ("kv_proj",)
        leaves["compressor"] = {name: weight((H, D), ("latent", "embed"), std) for name in of_tokens}
        leaves["compressor"]["key_scale"] = wide_norm(H, "latent")
        indexer |= {"k_proj": weight((width, H), ("latent", "latent"), std), "k_scale": wide_norm(width, "latent")}
    leaves["indexer"] = {name: replace(leaf, trainable=False) for name, leaf in indexer.items()}
    return leaves


def lent_like(config: Any, kind: str, x: Tensor, keys: int) -> dict[str, Tensor]:
    """Tensors like what a layer of this kind lends, see `function_of`."""
    rows, count = x.shape[0], keys // ratio_of(kind)
    found = {name: x.new_empty(rows, count, dtype=torch.int64) for name in ("ends", "segments")}
    found |= {
        "keys": x.new_empty(rows, count, config.head_dim),
        "index": x.new_empty(rows, count, config.index_head_dim),
    }
    return found | ({"among": x.new_empty(rows, x.shape[1], count, dtype=torch.bool)} if "_finds" in kind else {})


def shared_keys(
    ctx: Context,
    weights: Tree,
    inputs: tuple[Tensor, Tensor],
    mask: Mapping[str, Any],
    freqs: Mapping[str, Tensor],
    *,
    config: Any,
    kind: str,
    rotate: Rotate,
) -> tuple[WindowKeys, Tensor | None]:
    """(the keys of windows that a layer reads, int64 [B, Q, k], the names of those that its queries do; None: all).

    inputs: x [B, S, D] and what queries are projected from. The choice is the tap "choices", and the keyword `choices`
    of the block's call replaces it.
    """
    windows: Windows = mask["windows"]
    makes = "compressor" in weights
    shared = _made(ctx, weights, inputs[0], windows, freqs["start"], config, rotate) if makes else _lent(ctx)
    own = weights.get("indexer")
    if own is None:
        choices: Tensor | None = replace(shared, choices=ctx.tensors.get("choices")).last_choice()
    else:
        inputs, indexer = (inputs[0].detach(), inputs[1].detach()), Indexer(config.index_topk, rotate)
        blocks = Blocks(config.candidate_blocks, config.candidate_size) if makes and "_finds" in kind else None
        given = ctx.tensors.get("choices")
        shared = choose_shared(
            own, inputs, freqs["table"], shared, windows, indexer=indexer, blocks=blocks, choices=given
        )
        ctx.aux["chosen"] = ctx.tap("choices", shared.last_choice())
        shared = replace(shared, choices=ctx.aux["chosen"])
        keys = functools.partial(shared.windows._replace, keys=shared.index)
        choices = ctx.chose_windows(own, inputs, mask, freqs, shared.choices, indexer=indexer, keys=keys)
    if makes:
        among = {} if shared.among is None else {"among": shared.among}
        ctx.lend(**shared.windows._asdict(), index=shared.index, **among)
    return shared.windows, choices


def _made(
    ctx: Context, weights: Tree, x: Tensor, windows: Windows, starts: Tensor, config: Any, rotate: Rotate
) -> SharedKeys:
    """The keys of a layer that makes them; their index keys stand beside them in a cache."""
    eps = config.rms_norm_eps
    beside = functools.partial(index_of, weights["indexer"], eps=eps)
    how = Compressor("window", False, eps, rotate, beside)
    keys, index = keys_and_beside(ctx, weights["compressor"], x, windows, starts, how=how)
    assert index is not None
    return SharedKeys(keys, index)


def _lent(ctx: Context) -> SharedKeys:
    lent = ctx.lent()
    return SharedKeys(WindowKeys(lent["keys"], lent["ends"], lent["segments"]), lent["index"], among=lent.get("among"))

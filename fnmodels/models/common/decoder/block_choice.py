"""`choose_blocks`: the part of a block in which each head of keys chooses blocks of keys (`ops.indexers.blocks`)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.convert import shape_of
from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.context import Context
from fnmodels.ops.indexer import keys_of, keys_of_ranks, reads_choices
from fnmodels.ops.indexers.blocks import BlockIndexer, chosen_blocks, places_in_blocks
from fnmodels.ops.indexers.pooled import PooledIndexer
from fnmodels.ops.invariant.attention import plan_tiles
from fnmodels.ops.slots import Entry


def choose_blocks(
    ctx: Context,
    weights: Mapping[str, Tensor],
    x: Tensor,
    freqs: Any,
    mask: MaskLike,
    *,
    heads: tuple[int, int],
    indexer: BlockIndexer | PooledIndexer,
) -> Any:
    """The mask of the keys in the blocks that each query of x [B, S, D] chooses for each head of keys.

    weights: of the indexer, "q_proj" [G d, D], "k_proj" [d, D] and their norms; a cache holds its keys. heads: how many
    there are of queries, and of keys, G; 1 where all heads share a choice. The choice is the tap "choices", int64 [B,
    S, G count]; the keyword `choices` of the block's call, a choice made before, replaces it. The mask is returned as
    it is where no document can have more than `count` blocks. The choice has no gradient.
    """
    if ctx.options.invariant and heads[1] > 1:
        raise ValueError(
            'kernel="invariant" reads one mask for all heads, and here each head of keys has a choice of its own: '
            'layers of this model have no batch-invariant form; kernel="math" gives the reference.'
        )
    with torch.no_grad():
        return _chosen(ctx, weights, x.detach(), freqs, mask, heads, indexer)


def _chosen(
    ctx: Context,
    weights: Mapping[str, Tensor],
    x: Tensor,
    freqs: Any,
    mask: MaskLike,
    heads: tuple[int, int],
    how: BlockIndexer | PooledIndexer,
) -> Any:
    given, kernel, ranks = ctx.tensors.get("choices"), ctx.options.kernel, keys_of_ranks(ctx.options.kernel)
    whole = mask if ranks is None else ranks.mask(mask)
    everything, cached = given is None and not how.chooses_among(shape_of(whole)[-1]), "cache" in ctx.tensors
    asked = not everything or ctx.wants("choices")
    read: Entry | None = None
    if cached or (given is None and asked):
        read = how.index(weights, x, freqs)
        read = ctx.extend(read) if cached else read
        read = read if ranks is None or not asked else {name: ranks.gather(t) for name, t in read.items()}
    if not asked:
        return mask
    if kernel in ("blocks", "varlen") and not everything:
        raise ValueError(
            f'kernel="{kernel}" reads rules, and here each query sees {how.count} blocks of keys that the layer chose: '
            '"auto", "sdpa" and kernel="math" take any mask.'
        )
    keys = keys_of(whole)
    if given is None:
        assert read is not None
        given = how.choose(weights, x, read, freqs, keys)
    given = ctx.tap("choices", given)
    if everything:
        return mask
    queries, groups = heads
    if reads_choices(kernel) and shape_of(whole)[1] == 1 and not torch.compiler.is_compiling():
        return places_in_blocks(keys, given, groups, how.size)
    allowed = chosen_blocks(keys, given, groups, how.size)
    if ctx.options.invariant:
        return plan_tiles(mask, allowed)
    return allowed if groups == 1 else allowed.repeat_interleave(queries // groups, dim=1)

"""`choose_blocks`: the part of a block in which each head of keys chooses blocks of keys (`ops.indexers.blocks`)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.convert import shape_of
from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.chosen_keys import NO_CHOICE
from fnmodels.models.common.context import Context
from fnmodels.ops.attention.choice import reads_choices
from fnmodels.ops.indexer import keys_of, keys_of_ranks
from fnmodels.ops.indexers.blocks import BlockIndexer, chosen_blocks, places_in_blocks
from fnmodels.ops.indexers.gated_pools import GatedPoolIndexer
from fnmodels.ops.indexers.pooled import PooledIndexer
from fnmodels.ops.invariant.attention import plan_tiles
from fnmodels.ops.slots import Entry

AnyIndexer = BlockIndexer | PooledIndexer | GatedPoolIndexer


def choose_blocks(
    ctx: Context,
    weights: Mapping[str, Tensor] | None,
    x: Tensor | tuple[Tensor, Tensor],
    freqs: Any,
    mask: MaskLike,
    *,
    heads: tuple[int, int],
    indexer: AnyIndexer,
) -> Any:
    """The mask of the keys in the blocks that each query of x [B, S, D] chooses for each head of keys.

    weights: of the indexer, whose keys a cache holds; None: the layer takes the choice of the last layer that made one.
    x: a pair where the indexer reads one, see `GatedPoolIndexer`. heads: how many there are of queries, and of keys, G;
    1 where all heads share a choice. The choice is the tap "choices", int64 [B, S, G count], and that of a
    `GatedPoolIndexer` in aux as "chosen", for later layers; the keyword `choices` of the block's call, a choice made
    before, replaces it. The mask is returned as it is where no document can have more than `count` blocks. The choice
    has no gradient.
    """
    if ctx.options.invariant and heads[1] > 1:
        raise ValueError(
            'kernel="invariant" reads one mask for all heads, and here each head of keys has a choice of its own: '
            'layers of this model have no batch-invariant form; kernel="math" gives the reference.'
        )
    with torch.no_grad():
        x = (x[0].detach(), x[1].detach()) if isinstance(x, tuple) else x.detach()
        seen = _chosen(ctx, weights, x, freqs, mask, heads, indexer)
    return ctx.chose_blocks(weights, x, freqs, mask, seen, indexer=indexer, groups=heads[1])


def _chosen(
    ctx: Context,
    weights: Mapping[str, Tensor] | None,
    x: Any,
    freqs: Any,
    mask: MaskLike,
    heads: tuple[int, int],
    how: AnyIndexer,
) -> Any:
    given, kernel, ranks = ctx.tensors.get("choices"), ctx.options.kernel, keys_of_ranks(ctx.options.kernel)
    whole = mask if ranks is None else ranks.mask(mask)
    everything, cached = given is None and not how.chooses_among(shape_of(whole)[-1]), "cache" in ctx.tensors
    asked = not everything or (weights is not None and ctx.wants("choices"))
    read: Entry | None = None
    if weights is not None and (cached or (given is None and asked)):
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
        if weights is None or read is None:
            raise ValueError(NO_CHOICE)
        given = how.choose(weights, x, read, freqs, keys)
    given = given if weights is None else ctx.tap("choices", given)
    if everything:
        return mask
    if weights is not None and isinstance(how, GatedPoolIndexer):  # layers with the others never share
        ctx.aux["chosen"] = given
    queries, groups = heads
    if reads_choices(kernel) and shape_of(whole)[1] == 1:
        return places_in_blocks(keys, given, groups, how.size)
    allowed = chosen_blocks(keys, given, groups, how.size)
    if ctx.options.invariant:
        return plan_tiles(mask, allowed)
    return allowed if groups == 1 else allowed.repeat_interleave(queries // groups, dim=1)

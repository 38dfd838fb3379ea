"""The passes of Inkling 2's layers: their kinds, and the states that they leave for each other.

A layer reads and leaves the states that the blocks before it began with, [B, S, n, D]. Later passes of a loop leave
after these the states of the pass before, of which they read messages.
"""

from typing import Any

import torch
from torch import Tensor

from ..context import Context


def kinds(config: Any) -> tuple[str, ...]:
    """One per pass of a layer: "begins" a block; "opens" and "folds", the first and the last; "joins", all others.

    In the passes of a loop after the first: "hears" messages, "enters" and "leaves", the first and last of the pass.
    """
    found, passes, last = [], config.order, config.num_hidden_layers - 1
    for index, (kind, stored) in enumerate(zip(config.layer_kinds, passes, strict=True)):
        hears = passes.index(stored) < index
        flags = {
            "joins": index > 0,
            "begins": stored % config.layers_per_block == 0,
            "hears": hears,
            "enters": hears and stored == config.loop_start,
            "leaves": hears and stored == config.loop_end - 1,
            "opens": index == 0,
            "folds": index == last,
        }
        found.append("_".join((kind, *(word for word, on in flags.items() if on))))
    return tuple(found)


def left_shape(config: Any, index: int) -> tuple[int, int]:
    """(n, D): the states of blocks that the layer before `index` leaves, and in a loop those of the pass before."""
    words, stored = kinds(config)[index].split("_"), config.order[index]
    if "enters" in words:
        return config.loop_end // config.layers_per_block, config.hidden_size
    heard = (config.loop_end - config.loop_start) // config.layers_per_block if "hears" in words else 0
    return -(-stored // config.layers_per_block) + heard, config.hidden_size


def begun(x: Tensor, ctx: Context, words: list[str], config: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x, the states of blocks before it, those of the pass before or None) with which a layer begins."""
    if "opens" in words:
        return x, x.unsqueeze(-2)[..., :0, :], None
    left, n = ctx.left(), config.layers_per_block
    if "enters" in words:  # the block that the first pass began has the state before the loop
        first = config.loop_start // n
        return left[..., first, :], left[..., :first, :], torch.cat((left[..., first + 1 :, :], x.unsqueeze(-2)), -2)
    if "hears" in words:
        heard = (config.loop_end - config.loop_start) // n
        blocks, before = left.split((left.shape[-2] - heard, heard), -2)
        return x, blocks, before
    return x, left, None

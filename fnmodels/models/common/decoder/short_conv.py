"""The gated short convolution of LFM2 (arXiv 2511.23404): leaves, names on disk, and the layer's first half."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import Segments, last_segment
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.conv import short_conv
from fnmodels.tree import Tree

from ..context import Context
from ..spec import Leaf, bias, weight
from ..storage import Stored, fuse


def check_kernel(config: Any) -> None:
    """For `Config.__post_init__`: ConfigError unless conv_kernel is the width of a convolution."""
    if isinstance(config.conv_kernel, bool) or not isinstance(config.conv_kernel, int) or config.conv_kernel < 2:
        raise ConfigError(f"conv_kernel is {config.conv_kernel!r}; it must be an integer of at least 2.")


def conv_leaves(config: Any) -> dict[str, Leaf]:
    """The gate before the convolution (b), the one after it (c), what is convolved (x), and the output projection."""
    D, std = config.hidden_size, config.initializer_range
    leaves = {f"{name}_proj": weight((D, D), ("conv", "embed"), std) for name in "bcx"}
    leaves |= {"conv": weight((D, 1, config.conv_kernel), ("conv", "one", "kernel"), std)}
    leaves |= {"o_proj": weight((D, D), ("embed", "conv"), std)}
    if config.conv_bias:
        leaves |= {f"{name}_bias": bias(D, "conv") for name in ("b", "c", "x", "conv")} | {"o_bias": bias(D, "embed")}
    return leaves


def conv_names(config: Any, index: int) -> dict[str, Stored]:
    """{path of a parameter of layer `index`: its name on disk}; the projections are slices of one tensor."""
    names: dict[str, Stored] = {}
    ours, theirs = f"layers.{index}.attention", f"model.layers.{index}.conv"
    for leaf, disk in (("proj", "weight"), ("bias", "bias"))[: 1 + config.conv_bias]:
        names |= fuse(f"{theirs}.in_proj.{disk}", {f"{ours}.{name}_{leaf}": config.hidden_size for name in "bcx"})
        names[f"{ours}.o_{leaf}"] = f"{theirs}.out_proj.{disk}"
        names[f"{ours}.conv" + ("_bias" if leaf == "bias" else "")] = f"{theirs}.conv.{disk}"
    return names


def gated_convolution(weights: Tree, x: Tensor, mask: Segments, ctx: Context) -> Tensor:
    """c * convolution(b * x) of projections of x [B, S, D], projected: [B, S, D]."""
    state, ids = ctx.state() or {}, mask.segment_ids
    before, after, value = (linear(x, weights[f"{name}_proj"], weights.get(f"{name}_bias")) for name in "bcx")
    last = state.get("segment")
    taps, added = weights["conv"][:, 0], weights.get("conv_bias")
    given = before * value, taps, added, ids, state.get("conv"), last
    y, tail = short_conv(*given, overwrite=True, kernel=ctx.options.kernel)
    ctx.keep(conv=tail, segment=last_segment(ids, last).expand(x.shape[0]))
    return linear(after * y, weights["o_proj"], weights.get("o_bias"))

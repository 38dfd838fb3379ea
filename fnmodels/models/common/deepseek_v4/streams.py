"""The residual stream of n rows of families with hyper-connections (`fnmodels.ops.streams`), [B, S, n, D].

The first layer, whose kind has the word "opens", reads x [B, S, D] and makes n equal rows of it; the last one, whose
kind has the word "folds" and whose tree has "fold", returns [B, S, D] again. So what runs layers, in one process or
many, knows nothing of rows but their shape, `family.stream_shape`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnmodels.models.common.context import Context
from fnmodels.models.common.spec import Constant, Leaf, Normal
from fnmodels.ops.streams import hyper
from fnmodels.ops.streams.hyper import HyperConnection
from fnmodels.tree import Tree

T = TypeVar("T")


def with_ends(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds of layers, with the words of the first and the last one."""
    last = len(kinds) - 1
    return tuple(f"{kind}{'_opens' * (i == 0)}{'_folds' * (i == last)}" for i, kind in enumerate(kinds))


def by_ends(kinds: Sequence[str], made: Mapping[str, T]) -> dict[str, T]:
    """{kind with the words of the ends: what `made` holds for the kind without them}, of the kinds of layers."""
    return {kind: made[plain] for kind, plain in zip(with_ends(kinds), kinds, strict=True)}


def hyper_leaves(config: Any, rows: int, scales: int) -> dict[str, Leaf]:
    """The parameters of one hyper-connection with `rows` numbers of maps in `scales` groups; they stay fp32."""
    width = config.residual_streams * config.hidden_size
    shared: dict[str, Any] = {"dtype": torch.float32, "decay": False, "keep_dtype": True}
    return {
        "fn": Leaf((rows, width), axes=("one", "streams"), init=Normal(config.initializer_range), **shared),
        "base": Leaf((rows,), axes=("one",), init=Constant(0.0), **shared),
        "scale": Leaf((scales,), axes=("one",), init=Constant(1.0), **shared),
    }


def through(
    weights: Mapping[str, Tensor], x: Tensor, sublayer: Callable[[Tensor], Tensor], how: HyperConnection
) -> Tensor:
    """The streams [B, S, n, D] after a sublayer, a function of [B, S, D], that reads and writes by a connection."""
    given = hyper.maps(weights, x, how)
    return hyper.connect(x, sublayer(hyper.collapse(x, given.pre)), given)


def tap_mean(ctx: Context, name: str, x: Tensor) -> Tensor:
    """The streams after a tap of their mean [B, S, D], whose edit moves each of them alike."""
    if not ctx.wants(name):
        return x
    mean = hyper.mean(x)
    return hyper.with_mean(x, ctx.tap(name, mean))


def ended(ctx: Context, layer: Tree, x: Tensor, how: HyperConnection) -> Tensor:
    """The result of a layer: its streams, which are the tap "streams", folded to [B, S, D] by the last layer."""
    x = ctx.tap("streams", x)
    return hyper.fold(layer["fold"], x, how) if "fold" in layer else x

"""The messages between stages: hidden states, and what later layers read of earlier stages beside them.

x               hidden states [B, S, D], or streams of them [B, S, n, D]; of an encoder those of its last layer also
                where a decoder begins
memory          [B, K, D], what a decoder's layers read of its encoder
term            balance terms of the layers so far, where a loss has any
layer_inputs    [B, S, layers to come, P], in models whose layers each read something of the token
carried.*       the last choice of keys, keys and values that later layers borrow, and what the last layer left for
                the next, see `fnmodels.models.common.carried`
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels.models.common.carried import borrowed, joins, left_like, stream_shape, takes_choice
from fnmodels.models.common.family import field_of, function_of, parsed, traits_of
from train.parallel.compose import full_width
from train.run_options import RouterTerms

from .microbatch import Microbatch
from .stacks import stacks_of
from .tree_split import stream_like


@dataclass(frozen=True)
class Sharing:
    """The sharding of what stages send.

    key_heads: the number of a layer's key heads on a rank. cp: ranks of a row. width: the number of (entries, along an
    axis) on a rank.
    """

    key_heads: Callable[[int], int] = int
    cp: int = 1
    width: Callable[[int, str], int] = full_width


NOTHING_SHARED = Sharing()


def carries_term(routers: RouterTerms | None) -> bool:
    """Whether stages send the balance terms of their layers along with the hidden states."""
    return routers is not None and any((routers.balance.sequence, routers.balance.batch, routers.balance.z))


def term_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the balance terms that are sent with hidden states of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def received(config: Any, lo: int, part: Microbatch, dtype: torch.dtype, sharing: Sharing) -> dict[str, Tensor]:
    """{name: a tensor like it on the meta device} of what the stage that begins with layer `lo` receives.

    dtype: of the weights; that of hidden states may be wider.
    """
    family = fnmodels.family_of(config)
    kinds = family.kinds(config)
    stacks = [stack for stack in stacks_of(config) if stack.lo < lo]
    streams = [stream_like(config, stack, stack.part(part.inputs), dtype) for stack in stacks]
    x = streams[-1]
    rows, length, _ = x.shape
    found = {"x": x.new_empty(rows, length, *stream_shape(stacks[-1].config, lo - stacks[-1].lo))}
    if len(streams) > 1:
        found["memory"] = streams[0]
    if carries_term(part.routers):
        found["term"] = x.new_empty((), dtype=term_dtype(x.dtype))
    if width := field_of(config, "hidden_size_per_layer_input"):
        found["layer_inputs"] = x.new_empty(rows, length, len(kinds) - lo, width, dtype=dtype)
    if takes_choice(kinds, lo) and (count := _keys_of_a_query(config, part.inputs, length * sharing.cp)):
        found["carried.chosen"] = x.new_empty(rows, length, count, dtype=torch.int64)
    if joins(kinds, lo):
        left = left_like(config, lo, x)
        width = sharing.width(left.shape[-1], traits_of(family).left_axis)
        found["carried.left"] = left.new_empty(*left.shape[:-1], width)  # contiguous, as messages are
    sources = borrowed(kinds, lo)
    if (lent_like := function_of(family, "lent_like")) is not None:
        for kind in sources:
            like = lent_like(config, kind, x, length * sharing.cp)
            found |= {f"carried.kv.{kind}.{name}": value for name, value in like.items()}
        return found
    entries = fnmodels.init_cache(config, 1, 1).layers if sources else ()
    stems = [kind.stem for kind in parsed(kinds)]
    for kind in sources:
        for name in ("k", "v"):
            heads, size = entries[stems.index(kind)][name].shape[2:]
            found[f"carried.kv.{kind}.{name}"] = x.new_empty(rows, length, sharing.key_heads(heads), size, dtype=dtype)
    return found


def _keys_of_a_query(config: Any, inputs: Any, keys: int) -> int:
    """The width of choices over rows of so many keys: a replay's, or the config's; 0: nothing is chosen."""
    replay = inputs.get("choices") if isinstance(inputs, Mapping) else None
    if replay is not None:
        return int(replay.shape[-1])
    count: int = field_of(config, "index_topk")
    return count if keys >= (field_of(config, "index_least_keys") or count + 1) else 0

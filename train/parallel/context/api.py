"""Context parallelism: each rank holds some positions of every row, and attention fetches remote keys and values.

    kernel = context_kernel("ring", mesh["cp"].get_group())               # once
    part = shard_batch(batch, rank, ranks, config=config, order="mask")   # of each batch, the same on every rank
    total, count = next_token_loss(params, part, config=config, kernel=kernel)

Everything but attention is per token, so a shard of the batch is itself a batch: its positions, segment ids, labels and
rotary tables are those of its tokens, in any order. Attention is a `kernel=` of `fnmodels.forward`:

    gather    every rank gathers all keys and values (of the few KV heads) for its own queries
    ulysses   two all-to-alls, between which a rank has all tokens of some heads (arXiv 2309.14509)
    ring      keys and values pass from rank to rank, and partial results are merged (arXiv 2310.01889)

Recurrent layers and convolutions of a hybrid get the state of the positions before theirs (`state`), so ranks hold
contiguous positions of such a model: order "auto". Where attention chooses its keys, a rank gathers the index keys of
all, and its queries choose among them. A function around the kernel must keep its attributes `before` and
`keys_of_ranks`.

Losses are sums: totals, counts and gradients are to be summed over the ranks and divided once. Quantities of full rows
need more: for balance losses, which are means over rows, `whole_balance` computes each rank's summand; for rope
scalings that depend on the sequence length (dynamic, longrope), pass `length=int(batch["positions"].max()) + 1` of the
global batch, or what `global_length` finds. Kernels of "gather" and "ulysses" have every derivative that `inner` has
and can be compiled; that of "ring" runs in eager mode.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import fnmodels
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.load_balance import balanced_order, head_tail_order, visible_keys
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.inputs.segments import preceding_tokens
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.models.common.registry import ordered_kinds
from fnmodels.ops.attention.choice import Choice, reader_of_choices
from fnmodels.ops.attention.kernels import KERNELS
from fnmodels.ops.attention.select import Asks, attention, materialize
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.rotary import Rope
from fnmodels.options import Kernel, is_invariant
from train.comm import collectives
from train.parallel.mesh import DATA, mesh_of
from train.parallel.padding import is_per_row
from train.run_options import Balance

from . import ring
from .keys import RanksKeys, of_all_ranks, over_all_keys
from .once import remembered
from .ring import Call
from .state import RanksBefore

T = TypeVar("T")
Order = Literal["auto", "mask", "head_tail"] | None
Method = Literal["gather", "ulysses", "ring"]
BLOCK = 128  # positions that stay together in the order "mask", if a shard is many of these


def shard_batch(
    batch: Mapping[str, Tensor],
    rank: int,
    ranks: int,
    *,
    order: Order | Tensor = None,
    config: Any = None,
) -> dict[str, Tensor]:
    """The positions of the global batch that `rank` of `ranks` computes, after one permutation of all positions.

    batch: tokens, positions, segment_ids and labels [B, S], any other entries [B, S, ...], and entries [B], which all
    ranks keep; positions [B, S, 3] become [B, S, 4], because a rank cannot count the tokens before its own, and
    "preceding" is added for a model that embeds n-grams.
    order: "mask" distributes blocks of positions by their number of visible keys, under the densest mask of `config`'s
    layers; "head_tail" gives each rank one chunk from the head and one from the tail of each row; a tensor [S] or
    [B, S] is a permutation; None keeps the order (best for "ulysses", where every rank has all tokens of some heads);
    "auto" is "mask", or None for a model whose layers read tokens in their order. ValueError unless `ranks` divides S,
    and for another order of such a model.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}: ranks count from 0.")
    count, length = batch["tokens"].shape[:2]
    of_rows = {name: tensor for name, tensor in batch.items() if is_per_row(tensor, count)}
    batch = {name: tensor for name, tensor in batch.items() if name not in of_rows}
    for name, tensor in batch.items():
        if tensor.ndim < 2 or tensor.shape[1] != length:
            raise ValueError(f"{name} is {list(tensor.shape)}; a batch of rows of {length} tokens holds [B, {length}].")
    if length % ranks:
        raise ValueError(
            f"Rows of {length} tokens do not divide by cp = {ranks}: pad them to a multiple (segment 0, labels -100)."
        )
    order = resolved_order(order, config)
    if isinstance(order, str):
        order = head_tail_order(length, ranks) if order == "head_tail" else _mask_order(batch, ranks, config)
    if batch["positions"].ndim == 3 and batch["positions"].shape[2] == 3:
        counted = fnmodels.inputs.text_order(batch["positions"], batch["segment_ids"])
        batch = {**batch, "positions": torch.cat((counted[..., None], batch["positions"]), -1)}
    ngrams = 0 if config is None else field_of(config, "ngram_size")
    if ngrams and "preceding" not in batch:
        before = preceding_tokens(batch["tokens"], batch["positions"], batch["segment_ids"], ngrams - 1)
        batch = {**batch, "preceding": before}
    whole = dict(batch) if order is None else fnmodels.permute(dict(batch), order)
    share = length // ranks
    return {name: tensor[:, rank * share : (rank + 1) * share] for name, tensor in whole.items()} | of_rows


def resolved_order(order: Order | Tensor, config: DecoderConfig | None) -> Order | Tensor:
    """The order without "auto"; ValueError for one that the model or the call does not allow."""
    if isinstance(order, str) and order not in ("auto", "mask", "head_tail"):
        raise ValueError(f'order is {order!r}: it is "auto", "mask", "head_tail", a tensor or None.')
    if config is None:
        if isinstance(order, str) and order != "head_tail":
            raise ValueError(f'order="{order}" depends on what layers let tokens see: pass config= too.')
        return order
    ordered = ordered_kinds(config)
    if isinstance(order, str) and order == "auto":
        return None if ordered else "mask"
    if ordered and order is not None:
        raise ValueError(
            f"The layers {', '.join(ordered)} of {type(config).__module__} read tokens in their order, so each rank "
            'must have contiguous positions: leave order at "auto", or None.'
        )
    return order


def _mask_order(batch: Mapping[str, Tensor], ranks: int, config: DecoderConfig) -> Tensor:
    masks = fnmodels.family_of(config).attention_masks(config, batch["positions"], batch["segment_ids"])
    parts: list[Any] = [attention_part(mask) for mask in masks.values()]
    fullest = max({id(m): m for m in parts}.values(), key=lambda mask: int(visible_keys(mask).sum()))
    share = batch["tokens"].shape[1] // ranks
    block = math.gcd(BLOCK, share)
    while block > 1 and share < 8 * block:
        block //= 2
    return balanced_order(fullest, ranks, block=block)


def global_length(devices: DeviceMesh) -> Callable[[Any, Tensor, Any], Any]:
    """(config, positions of a shard, length) -> `length`; where it is None and a rope needs it, the global batch's."""
    groups = _groups(devices, DATA)

    def length_of(config: DecoderConfig, positions: Tensor, length: Any) -> Any:
        ropes = [] if config is None else [value for value in vars(config).values() if isinstance(value, Rope)]
        if length is not None or all(rope.kind not in ("dynamic", "longrope") for rope in ropes):
            return length
        here = positions.max() + 1 if positions.numel() else positions.new_ones(())
        return functools.reduce(collectives.maximum, groups, here)

    return length_of


def whole_balance(balance: Balance, devices: DeviceMesh) -> Balance:
    """Balance terms of rows and batches that are sharded over ranks: each rank's summand of their means."""

    def adding(names: Sequence[str]) -> Callable[[Tensor], Tensor] | None:
        groups = _groups(devices, names)
        return (lambda x: functools.reduce(collectives.leave, groups, x)) if groups else None

    return dataclasses.replace(balance, over=adding(("cp",)), across=adding(DATA))


def _groups(devices: DeviceMesh, names: Sequence[str]) -> list[ProcessGroup]:
    return [devices.get_group(name) for name in names if mesh_of(devices).sizes[name] > 1]


def context_kernel(method: Method, group: ProcessGroup, *, inner: str = "auto") -> Kernel:
    """A kernel for `fnmodels.forward` on a shard of the batch, sharded over the ranks of `group` in order.

    inner: the kernel of `fnmodels.ops.attention.kernels.KERNELS` that computes on a rank. "ring" has its own; "gather"
    takes those that need no layout, and on CUDA only "flex" avoids a dense mask there. All ranks must call the kernel
    equally often and in the same order, as they do by running the same model, also under remat. ValueError for
    combinations that a method does not support.
    """
    if is_invariant(inner):
        raise NotImplementedError(
            'kernel="invariant" needs all keys of a document in one process: sum over them in one, without cp.'
        )
    if method not in _METHODS:
        raise ValueError(f"method is {method!r}; it is one of {', '.join(_METHODS)}.")
    if method == "gather" and inner in KERNELS and KERNELS[inner].needs_layout:
        raise ValueError(
            f'inner="{inner}" must know where documents lie, and a rank that gathers keys has only its own queries: '
            '"sdpa", "flex" and "math" can do with that, and with method="ulysses" all can.'
        )
    if method == "ring" and inner not in ("auto", "math"):
        raise ValueError(f'inner is "{inner}", but method="ring" merges partial sums, which only its own maths gives.')
    look, run = _METHODS[method]
    known = remembered(look)

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        *,
        scale: float,
        layout: Layout | None = None,  # of this rank's tokens only, hence unused
        **scoring: Any,  # softcap, sinks and bias, as `attention` has them
    ) -> Tensor:
        _check(method, q, k, mask, group.size())
        call = Call(group, inner, scale, **scoring)
        _check_bias(method, call)
        return run(q, k, v, known(mask, q, call), call)

    kernel.before = RanksBefore(group, "math" if inner == "math" else "auto")  # type: ignore[attr-defined]
    kernel.keys_of_ranks = RanksKeys(group)  # type: ignore[attr-defined]
    kernel.reader_of_choices = reader_of_choices(inner) if method == "gather" else None  # type: ignore[attr-defined]
    return kernel


def _check(method: str, q: Tensor, k: Tensor, mask: Any, ranks: int) -> None:
    """ValueError before any communication, for conditions that are the same on all ranks.

    mask: of local queries and keys, or a choice of local queries among all ranks' keys, as places or as a dense mask.
    """
    chosen = isinstance(mask, Tensor | Choice) and mask.shape[-2:] == (q.shape[1], k.shape[1] * ranks)
    if not chosen and not isinstance(mask, Mask):
        raise ValueError(
            "Context parallelism cuts masks that are data, fnmodels.inputs.Mask, and this one is a "
            f"{type(mask).__name__}."
        )
    if not chosen and (mask.q_positions.shape[1] != q.shape[1] or mask.kv_positions.shape[1] != k.shape[1]):
        raise ValueError(
            f"The mask is of {mask.q_positions.shape[1]} queries and {mask.kv_positions.shape[1]} keys, and this rank "
            f"has {q.shape[1]} and {k.shape[1]}: make it of the rank's part of the batch."
        )
    heads, groups = q.shape[2], k.shape[2]
    if method == "ulysses" and (heads % ranks or groups % ranks):
        raise ValueError(
            f'method="ulysses" deals out heads, and {heads} of queries and {groups} of keys do not divide by '
            f'cp = {ranks}: method="gather" and method="ring" take any number.'
        )


def _check_bias(method: str, call: Call) -> None:
    """ValueError for biases and sinks of tokens, where a rank does not see its own queries with all keys."""
    of_tokens = call.bias is not None or (call.sinks is not None and call.sinks.ndim > 1)
    if method != "gather" and of_tokens:
        raise ValueError(
            f'method="{method}" moves queries or keys between ranks without what is added to their scores: take '
            'method="gather", Strategy(context="gather"), for a model with biases of scores or sinks of tokens.'
        )


def _form(mask: MaskLike, q: Tensor, layout: Layout | None, call: Call) -> Any:
    """The mask in the form that `inner` reads."""
    asks = Asks(call.softcap is not None, call.sinks is not None, call.bias is not None)
    return materialize(mask, call.inner, layout, device=q.device, dtype=q.dtype, asks=asks)


def _look_gather(mask: Mask | Tensor | Choice, q: Tensor, call: Call) -> Any:
    """The mask of local queries over all keys, in the form that `inner` reads; a choice as it is."""
    if isinstance(mask, Choice):
        return mask
    return _form(mask if isinstance(mask, Tensor) else over_all_keys(mask, call.group), q, None, call)


def _run_gather(q: Tensor, k: Tensor, v: Tensor, seen: Any, call: Call) -> Tensor:
    # The gather is in the model's dtype; gradients of keys and values are reduced in fp32 at least.
    both = collectives.all_gather(upcast(torch.cat((k, v), -1)), 1, call.group, dtype=k.dtype)
    k, v = both.split((k.shape[-1], v.shape[-1]), -1)
    bias = call.bias
    if bias is not None:
        bias = bias.of(bias.queries, tuple(collectives.all_gather(read, 1, call.group) for read in bias.keys))
    scoring: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks, "bias": bias}
    return attention(q, k, v, seen, kernel=call.inner, **scoring)


def _look_ulysses(mask: Mask | Tensor, q: Tensor, call: Call) -> tuple[Any, Layout | None]:
    """The mask of all queries over all keys, and its layout where documents are still in order."""
    if isinstance(mask, Tensor):
        return _form(collectives.all_gather(mask.byte(), 2, call.group).bool(), q, None, call), None
    whole = of_all_ranks(mask, call.group)
    asked = call.inner in ("auto", "blocks", "varlen") and not torch.compiler.is_compiling()  # read on the host
    layout = fnmodels.layout({"": whole}) if asked else None
    return _form(whole, q, layout, call), layout


def _run_ulysses(q: Tensor, k: Tensor, v: Tensor, seen: Any, call: Call) -> Tensor:
    # One all-to-all: a rank receives its heads of every token's query, key and value, concatenated.
    group, (mask, layout) = call.group, seen
    parts = [t.unflatten(2, (group.size(), -1)).flatten(3) for t in (q, k, v)]
    mixed = collectives.all_to_all(torch.cat(parts, -1), group, split=2, join=1).squeeze(2)
    mine = mixed.split([part.shape[-1] for part in parts], -1)
    q, k, v = (t.unflatten(-1, (-1, given.shape[-1])) for t, given in zip(mine, (q, k, v), strict=True))
    sinks = None if call.sinks is None else call.sinks.chunk(group.size())[group.rank()]
    out = attention(
        q, k, v, mask, kernel=call.inner, layout=layout, scale=call.scale, softcap=call.softcap, sinks=sinks
    )
    return collectives.all_to_all(out, group, split=1, join=2)


def _look_ring(mask: Mask | Tensor, q: Tensor, call: Call) -> ring.Seen:
    seen = mask if isinstance(mask, Tensor) else over_all_keys(mask, call.group)
    return ring.look(seen, q.shape[1], call.group)


_METHODS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "gather": (_look_gather, _run_gather),
    "ulysses": (_look_ulysses, _run_ulysses),
    "ring": (_look_ring, ring.run),
}

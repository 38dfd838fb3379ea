"""Reading and writing one layer's entry of a cache: tensors [B, C, ...] with C slots per row.

`index` [B, S] is the slot of each new token, or C for a token that is not written (padding, or one that a ring would
overwrite within the same call). It is computed once per kind of layer, by `fnmodels.cache`.

A tensor `k` that is int8 has its scales beside it as `k_scale`, fp32 [B, C, G], one per slot and head ([B, C] for what
has no heads): the value is k * k_scale. New tokens are read as they are stored, also within the call that writes
them, so that results do not depend on how a sequence is divided into calls.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Entry = dict[str, Tensor]
# The tensors of an entry that may be int8 with scales. An indexer's keys may not: rounding would change its choices.
QUANTIZABLE = ("k", "v", "latent", "rope")
# The tensors of an entry that are [B, C, ...]; others are [B, ...].
SLOTTED = frozenset(
    {*QUANTIZABLE, "index", "index_gate", "index_start", "places", *(f"{name}_scale" for name in QUANTIZABLE)}
)

# The tensors of an entry that have a slot for each window of tokens, [B, C / ratio, ...]; see
# `fnmodels.ops.attention.windows`. Beside them is what later windows read of the last tokens, [B, 2 ratio - 1, ...].
WINDOWED = frozenset(f"{name}_{part}" for name in ("window", "index") for part in ("keys", "ends", "documents"))

# The tensors of an entry that a step reads and does not change: keys and values of an encoder's tokens, [B, K, G, H].
MEMORY = frozenset({"memory_k", "memory_v"})


@dataclass(frozen=True)
class SlotUse:
    """The use that the layers of one kind make of their entries in one call; static.

    keys: which keys the mask describes. "both": the slots before this call, then the new tokens, which are written
        afterwards. "slots": the slots after the new tokens are written, the first `length` of them (None: all); right
        if no query sees a token that this call overwrites. "new": the new tokens, for a cache that is empty.
    inplace: write into the entry's tensors, which the caller must not use afterwards. full: every new token is written.
    first: the slot of every row's first new token, where all are written in order from there; None: not known to be so.
    """

    keys: str = "both"
    length: int | None = None
    inplace: bool = False
    full: bool = False
    first: int | None = None


def extended(
    entry: Mapping[str, Tensor], new: Mapping[str, Tensor], index: Tensor, use: SlotUse, occupied: Tensor | None
) -> tuple[Entry, Entry]:
    """(what the queries read [B, K, ...], the entry with the new tokens [B, S, ...] written), by the names of `new`.

    occupied: bool [B, C]; the other slots, which may hold NaN, are set to zero first. None: they are finite.
    """
    at = use.first if occupied is None and use.inplace and use.keys == "slots" else None
    if at is not None and (found := _extended_at(entry, new, at, use.length)) is not None:
        return found
    for name, value in new.items():  # a write would broadcast
        if value.shape[2:] != entry[name].shape[2:] or value.shape[0] != entry[name].shape[0]:
            raise _misfit(name, entry[name], value)
    added = {part: t for name, value in new.items() for part, t in stored(name, value, entry[name].dtype).items()}
    held = {name: entry[name] if occupied is None else _zeroed(entry[name], occupied, use.inplace) for name in added}
    read = added
    if use.keys == "both":  # before the write: it may overwrite keys that the queries see
        read = {name: torch.cat((held[name].to(t.dtype), t), dim=1) for name, t in added.items()}
    put = functools.partial(write_, full=use.full) if use.inplace else write
    written = {name: put(held[name], t.to(held[name].dtype), index, first=use.first) for name, t in added.items()}
    if use.keys == "slots":
        read = {name: t[:, : use.length] for name, t in written.items()}
    return {name: loaded(name, read, value.dtype) for name, value in new.items()}, written


def _extended_at(
    entry: Mapping[str, Tensor], new: Mapping[str, Tensor], first: int, length: int | None
) -> tuple[Entry, Entry] | None:
    """`extended` in place by tokens in the slots from `first` on; None where an entry has another dtype.

    Then some may be written already, which are written again.
    """
    read, written = {}, {}
    for name, value in new.items():
        held = written[name] = entry[name]
        if value.dtype is not held.dtype:
            return None
        place = held[:, first : first + value.shape[1]]
        if place.shape != value.shape:
            raise _misfit(name, held, value)
        place.copy_(value)
        read[name] = held[:, :length]
    return read, written


def _misfit(name: str, held: Tensor, value: Tensor) -> ValueError:
    return ValueError(
        f"The cache holds {name!r} as {list(held.shape)} [B, C, ...], and the new tokens' are "
        f"{list(value.shape)} [B, S, ...]: both must have the same rows, heads and widths."
    )


def stored(name: str, value: Tensor, dtype: torch.dtype) -> Entry:
    """The tensors that hold `value` [B, S, ..., H] in an entry of this dtype: itself, or int8 codes and their scales.

    The largest element of each slot and head is +-127. ValueError for int8 where a gradient would be lost.
    """
    if dtype is not torch.int8:
        return {name: value}
    if torch.is_grad_enabled() and value.requires_grad:
        raise ValueError("An int8 cache has no gradient: compute under torch.no_grad().")
    scale = (value.abs().amax(-1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (value / scale[..., None]).round().clamp(-127, 127).to(torch.int8)
    return {name: codes, f"{name}_scale": scale}


def loaded(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The value that `stored` put into `tensors`."""
    value, scale = tensors[name], tensors.get(f"{name}_scale")
    if scale is None:
        return value.to(dtype)
    return value.float().mul_(scale[..., None]).to(dtype)  # a product of int8 and fp32 takes half as long again


def _zeroed(entry: Tensor, occupied: Tensor, inplace: bool) -> Tensor:
    empty = ~occupied.reshape(*occupied.shape, *[1] * (entry.ndim - 2))
    return entry.masked_fill_(empty, 0) if inplace else entry.masked_fill(empty, 0)


def write(entry: Tensor, new: Tensor, index: Tensor, *, first: int | None = None) -> Tensor:
    """A copy of entry [B, C, ...] with new [B, S, ...] at the slots index [B, S]; differentiable, and works under vmap.

    All tokens that are not written go to one slot more, which the result does not have. first: see `SlotUse`.
    """
    if first is not None:
        return torch.slice_scatter(entry, new, 1, first, first + new.shape[1])
    rows = torch.arange(entry.shape[0], device=entry.device)[:, None]
    wide = torch.cat((entry, entry[:, :1]), dim=1)
    return torch.index_put(wide, (rows, index), new)[:, : entry.shape[1]]


def write_(entry: Tensor, new: Tensor, index: Tensor, *, full: bool = False, first: int | None = None) -> Tensor:
    """`write` into the memory of `entry`, which is returned. full, first: see `SlotUse`.

    A token that is not written repeats the write of the row's last one that is; a row without any rewrites the content
    of its last slot.
    """
    if first is not None:
        entry[:, first : first + new.shape[1]] = new
        return entry
    slots, tokens = entry.shape[1], new.shape[1]
    rows = torch.arange(entry.shape[0], device=entry.device)[:, None]
    if full:
        return entry.index_put_((rows, index), new)
    kept = index < slots
    if tokens == 1:
        target = index.clamp(max=slots - 1)
        kept = kept.reshape(*kept.shape, *[1] * (new.ndim - 2))
        return entry.index_put_((rows, target), torch.where(kept, new, entry[rows, target]))
    steps = torch.arange(tokens, device=entry.device)
    source = torch.where(kept, steps, steps.where(kept, -1).amax(dim=1, keepdim=True))
    target = index.gather(1, source.clamp(min=0)).clamp(max=slots - 1)
    # Index -1 of the source, in rows without a written token, is what the target holds already.
    wide = torch.cat((new, entry[rows, target[:, :1]]), dim=1)
    return entry.index_put_((rows, target), wide[rows, source])

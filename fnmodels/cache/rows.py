"""The algebra of caches: `take`, `insert`, `truncate` and `resize`.

Their arguments are left as they are, and results share no memory with them, for `decode_` writes into its cache. Names
that end in an underscore write into the memory of the cache that they are given, and use it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import has_values
from fnmodels.ops.slots import MEMORY, SLOTTED, WINDOWED, Entry, write

from .value import Cache, Slots, consume, is_clean, known_clean


def take(cache: Cache, rows: Tensor | Sequence[int]) -> Cache:
    """The cache of some rows: in another order, some of them, or some several times (a prefix shared).

    Args:
        cache: The cache, which is not changed.
        rows: Indices of rows, int64 [n].

    Returns:
        The cache of n rows.
    """
    index = _indices(cache, rows)
    found: Cache = tree.map(lambda tensor: _selected(tensor, index), cache)
    return known_clean(found) if is_clean(cache) else found


def _selected(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor.index_select(0, index), with the slots of a head neighbours in memory if they are so before."""
    if tensor.ndim == 4 and tensor.stride(1) < tensor.stride(2):
        return tensor.transpose(1, 2).index_select(0, index).transpose(1, 2)
    return tensor.index_select(0, index)


def insert(cache: Cache, rows: int | Tensor | Sequence[int], other: Cache) -> Cache:
    """The cache with rows replaced by those of another, which may have another capacity.

    Args:
        cache: The cache, which is not changed.
        rows: Indices of the rows that are replaced, [n].
        other: A cache of n rows.

    Returns:
        The new cache.

    Raises:
        ValueError: Rows do not fit: in number, twice the same, another `length` or `kv_dtype`, more tokens than there
            are slots, or a ring that cannot take the form of this cache.
    """
    index, cache, fitted = _inserted(cache, rows, other)
    found: Cache = tree.map(lambda tensor, new: tensor.index_copy(0, index, new.to(tensor.dtype)), cache, fitted)
    return known_clean(found) if is_clean(cache) and is_clean(other) else found


@torch.no_grad()
def insert_(cache: Cache, rows: int | Tensor | Sequence[int], other: Cache) -> Cache:
    """`insert` that writes into the cache's tensors and uses the cache up, as `decode_` does.

    Args:
        cache: The cache, which must not be used again.
        rows: Indices of the rows that are replaced, [n].
        other: A cache of n rows.

    Returns:
        The new cache, in the same memory.
    """
    given = cache
    index, cache, fitted = _inserted(cache, rows, other)
    clean = is_clean(cache) and is_clean(other)
    found: Cache = tree.map(lambda tensor, new: tensor.index_copy_(0, index, new.to(tensor.dtype)), cache, fitted)
    consume(given)
    return known_clean(found) if clean else found


def _inserted(cache: Cache, rows: int | Tensor | Sequence[int], other: Cache) -> tuple[Tensor, Cache, Cache]:
    """(rows, the cache, the other one in its form)."""
    index = _indices(cache, [rows] if isinstance(rows, int) else rows)
    count = next(iter(tree.leaves(other))).shape[0]
    if len(index) != count or (has_values(index) and len(index.unique()) != count):
        raise ValueError(f"The {count} rows of the other cache need as many different rows, not {index.tolist()}.")
    if cache.length != other.length:
        raise ValueError(
            f"The caches were made for the lengths {cache.length} and {other.length}, which rotary scalings may read: "
            "make both with the same init_cache(..., length=)."
        )
    places = [0 if held.memory is None else held.memory.segments.shape[1] for held in (cache, other)]
    if places[0] != places[1]:
        raise ValueError(f"The caches have memories of {places[0]} and {places[1]} tokens: encode rows of one length.")
    if [entry.keys() for entry in cache.layers] != [entry.keys() for entry in other.layers]:
        raise ValueError("The caches hold different tensors: make both for one model, with the same kv_dtype=.")
    fitted = _per_kind(other, lambda kind, slots: _fit(slots, cache.slots[kind]))
    pairs = zip(fitted.layers, cache.layers, strict=True)
    fitted = replace(fitted, layers=tuple(_with_windows_of(own, like) for own, like in pairs))
    return index, _with_spans_of(cache, fitted), _with_spans_of(fitted, cache)


def _with_windows_of(entry: Entry, like: Entry) -> Entry:
    """The entry with as many slots of windows as `like` has."""
    return {name: _windows_in(t, like[name].shape[1]) if name in WINDOWED else t for name, t in entry.items()}


def _windows_in(tensor: Tensor, room: int) -> Tensor:
    """Tensors of windows [B, C, ...] in `room` slots; a row that has more was refused for its tokens."""
    return F.pad(tensor[:, :room], (*[0, 0] * (tensor.ndim - 2), 0, max(room - tensor.shape[1], 0)))


def _with_spans_of(cache: Cache, other: Cache) -> Cache:
    """The cache with `Slots.spans` where the other one has them."""
    slots = {
        kind: replace(held, spans=torch.zeros_like(held.segments))
        if held.spans is None and other.slots[kind].spans is not None
        else held
        for kind, held in cache.slots.items()
    }
    found = replace(cache, slots=slots)
    return known_clean(found) if is_clean(cache) else found


def truncate(cache: Cache, n_valid: int | Tensor | Sequence[int]) -> Cache:
    """The cache with only the first tokens of each row.

    In rings, where rows are one document from position 0, these are the positions below n_valid.

    Args:
        cache: The cache, which is not changed.
        n_valid: Tokens that stay, an int or [B]; more than a row has changes nothing.

    Returns:
        The new cache, in memory of its own.

    Raises:
        ValueError: Tokens that a ring needs then were overwritten or have seen dropped tokens of their image (row
            named, where values can be read), or there are recurrent layers: continue from the cache of that time, which
            is a value.
    """
    found = _shortened(cache, n_valid)
    copied: Cache = tree.map(Tensor.clone, found)
    return known_clean(copied) if is_clean(found) else copied


def truncate_(cache: Cache, n_valid: int | Tensor | Sequence[int]) -> Cache:
    """`truncate` that copies nothing and uses the cache up, as `decode_` does.

    Args:
        cache: The cache, which must not be used again.
        n_valid: As for `truncate`.

    Returns:
        The new cache, in the same memory.

    Raises:
        ValueError: As `truncate`; the cache is left as it is then.
    """
    found = _shortened(cache, n_valid)
    consume(cache)
    return found


def _shortened(cache: Cache, n_valid: int | Tensor | Sequence[int]) -> Cache:
    """The cache without the later tokens, in the same memory."""
    if is_recurrent(cache):
        raise ValueError("Recurrent layers cannot go back: continue from the cache as it was, or decode again from it.")
    batch = next(iter(tree.leaves(cache))).shape[0]
    device = next(iter(tree.leaves(cache))).device
    count = torch.as_tensor(n_valid, device=device).expand(batch)[:, None]
    slots = {kind: _truncated(held, count) for kind, held in cache.slots.items()}
    found = replace(cache, slots=slots)
    return known_clean(found) if is_clean(cache) and _dropped_is_finite(cache, found) else found


def is_recurrent(cache: Cache) -> bool:
    """Whether some layer keeps a state, beside keys and values or without them: a cache that cannot be truncated."""
    return any(name not in SLOTTED | MEMORY for entry in cache.layers for name in entry)


def _truncated(slots: Slots, count: Tensor) -> Slots:
    order = torch.arange(slots.segments.shape[1], device=slots.segments.device)
    keep = slots.positions < count if slots.ring else order < count
    if slots.ring and has_values(slots.segments) and has_values(count):
        oldest = slots.positions.where(slots.occupied, 0).where(slots.occupied, 1 << 62).amin(dim=1)
        newest = slots.positions.where(slots.occupied, -1).amax(dim=1)
        first = (count[:, 0] - slots.segments.shape[1] + 1).clamp(min=0)
        lost = (count[:, 0] > 0) & (count[:, 0] <= newest) & (oldest > first)
        if bool(lost.any()):
            row = int(lost.nonzero()[0])
            raise ValueError(
                f"Row {row} cannot go back to {int(count[row])} tokens: its ring of {slots.segments.shape[1]} holds "
                f"positions from {int(oldest[row])} on. Continue from the cache as it was, or use rings=False."
            )
    if slots.spans is not None and has_values(slots.segments) and has_values(count):
        image = slots.spans.where(slots.occupied, 0)
        newest = image.where(keep, 0).amax(dim=1, keepdim=True)
        cut = ((image == newest) & (newest > 0) & ~keep).any(dim=1)
        if bool(cut.any()):
            row = int(cut.nonzero()[0])
            raise ValueError(
                f"Row {row} cannot go back to {int(count[row])} tokens, which end inside an image, or a prompt that "
                "sees all of itself: those that are kept have seen those that are dropped. Go back to before it, or to "
                "its last token."
            )
    return replace(slots, segments=slots.segments.where(keep, 0))


def _dropped_is_finite(before: Cache, after: Cache) -> bool:
    """Whether the tokens that were dropped are known to be finite in all layers."""
    for kind, slots in after.slots.items():
        dropped = before.slots[kind].occupied & ~slots.occupied
        if not has_values(dropped) or not dropped.is_cpu:
            return False
        where = dropped.nonzero(as_tuple=True)
        of_kind = [entry for at, entry in zip(before.kinds, before.layers, strict=True) if at == kind]
        slotted = (t for entry in of_kind for name, t in entry.items() if name in SLOTTED)
        if len(where[0]) and not all(bool(t[where].isfinite().all()) for t in slotted):
            return False
    return True


def resize(cache: Cache, capacity: int) -> Cache:
    """The cache with room for another number of tokens; rings stay as they are, and so does `length`.

    Args:
        cache: The cache, which is not changed.
        capacity: The number of tokens of each row.

    Returns:
        The new cache.

    Raises:
        ValueError: A row has more tokens (named, where values can be read), or the capacity is below 1.
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}; a cache has at least one slot.")

    def wanted(kind: str, slots: Slots) -> tuple[Slots, Callable[[Tensor], Tensor]]:
        return (tree.map(Tensor.clone, slots), Tensor.clone) if slots.ring else _padded(slots, capacity)

    found = _per_kind(cache, wanted)
    layers = (_with_room(entry, capacity) for entry in found.layers)
    # with tensors of its own: steps and `insert_` write into those of the given cache
    found = replace(found, layers=tuple(layers), memory=tree.map(Tensor.clone, cache.memory))
    return known_clean(found) if is_clean(cache) else found


def _with_room(entry: Entry, capacity: int) -> Entry:
    """The entry with room for the windows of `capacity` tokens, and copies of the tensors without slots.

    ValueError for a row that has more of them.
    """
    made = {name: t if name in SLOTTED else t.clone() for name, t in entry.items()}
    for name in WINDOWED & entry.keys():
        kind = name.partition("_")[0]
        room = max(capacity // ((entry[f"{kind}_numbers"].shape[1] + 1) // 2), 1)
        over = (entry[f"{kind}_documents"][:, room:] > 0).any(dim=1)
        if has_values(over) and bool(over.any()):
            row = int(over.nonzero()[0])
            raise ValueError(f"Row {row} of the cache holds more windows of tokens than {capacity} tokens have.")
        made[name] = _windows_in(entry[name], room).clone()
    return made


def _per_kind(cache: Cache, change: Callable[[str, Slots], tuple[Slots, Callable[[Tensor], Tensor]]]) -> Cache:
    """The cache with slots, and the slotted tensors of their layers, changed kind by kind."""
    changes = {kind: change(kind, slots) for kind, slots in cache.slots.items()}

    def changed(kind: str, entry: Entry) -> Entry:
        return {name: changes[kind][1](t) if name in SLOTTED else t for name, t in entry.items()}

    layers = tuple(changed(kind, entry) for kind, entry in zip(cache.kinds, cache.layers, strict=True))
    return replace(cache, layers=layers, slots={kind: slots for kind, (slots, _) in changes.items()})


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _padded(slots: Slots, room: int) -> tuple[Slots, Callable[[Tensor], Tensor]]:
    """The slots in `room`, and the same for a tensor [B, C, ...]: empty slots at the end, or some fewer of them."""
    over = slots.occupied[:, room:].any(dim=1)
    if has_values(over) and bool(over.any()):
        row = int(over.nonzero()[0])
        held = int(slots.occupied[row].sum())
        raise ValueError(f"Row {row} of the cache holds {held} tokens, for which {room} slots are too few.")

    def padded(tensor: Tensor) -> Tensor:
        more = max(room - tensor.shape[1], 0)
        return F.pad(tensor[:, :room], (*[0, 0] * (tensor.ndim - 2), 0, more))

    return tree.map(padded, slots), padded


def _fit(slots: Slots, like: Slots) -> tuple[Slots, Callable[[Tensor], Tensor]]:
    """The slots in the form of `like`, and the same for a tensor [B, C, ...]."""
    room = like.segments.shape[1]
    if slots.ring == like.ring:
        return (slots, _same) if slots.segments.shape[1] == room else _padded(slots, room)
    if slots.ring:
        raise ValueError("The other cache has a ring where this one holds all tokens: make both with the same rings=.")
    none = like.segments.new_zeros(slots.segments.shape[0], room)
    index = Slots(none, none, None, True).index_of(slots.positions, slots.segments)

    def moved(tensor: Tensor) -> Tensor:
        return write(tensor.new_zeros(tensor.shape[0], room, *tensor.shape[2:]), tensor, index)

    return replace(tree.map(moved, slots), ring=True), moved


def _indices(cache: Cache, rows: Tensor | Sequence[int]) -> Tensor:
    """rows as int64 [n] on the cache's device."""
    first = next(iter(tree.leaves(cache)))
    index = torch.as_tensor(rows, device=first.device)
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"rows are indices of rows, int64 [n], not {list(index.shape)} of {index.dtype}.")
    if has_values(index) and index.is_cpu and bool(((index < 0) | (index >= len(first))).any()):
        raise ValueError(f"rows are {index.tolist()}, and the cache has the rows 0 to {len(first) - 1}.")
    return index

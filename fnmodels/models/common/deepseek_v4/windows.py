"""Attention over the last tokens and keys of windows of tokens (`fnmodels.ops.attention.windows`), cached and over cp.

The mask of such layers is {"attention": that of the last tokens, "windows": `fnmodels.inputs.windows.Windows`}. In a
cache, an entry holds the keys of windows, one slot for `ratio` tokens of its capacity, and what later windows read of
the last tokens of a row, which are those of its last document.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.windows import Windows, window_slots
from fnmodels.models.common.context import Context
from fnmodels.ops.attention.choice import reader_of_choices, reads_choices
from fnmodels.ops.attention.select import attention
from fnmodels.ops.attention.windows import (
    OfTokens,
    WindowKeys,
    appended,
    continued,
    in_slots,
    last_of,
    last_tokens,
    of_tokens,
    weighted_sums,
)
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.indexer import Indexer, all_visible, choose, keys_of_ranks
from fnmodels.ops.indexers.tokens_and_windows import TokensAndWindows, windows_of
from fnmodels.ops.mla import Rotate
from fnmodels.ops.norm import rms_norm_fp32_weight
from fnmodels.options import Kernel


@dataclass(frozen=True)
class Compressor:
    """Settings of a layer's keys of windows. name: the prefix of their names in a cache, "window" or "index".

    overlap: with the tokens of the window before. eps: of the norm. rotate: for the window's first position.
    beside: a function of normed keys [B, C, H] that makes index keys [B, C, d], which are rotated as keys are and stand
    after them in a cache.
    """

    name: str
    overlap: bool
    eps: float
    rotate: Rotate
    beside: Callable[[Tensor], Tensor] | None = None


def window_keys(
    ctx: Context, weights: Mapping[str, Tensor], x: Tensor, windows: Windows, starts: Tensor, *, how: Compressor
) -> WindowKeys:
    """The keys of all windows that queries of x [B, S, D] may see: those of a cache, or of all ranks of cp, too.

    weights: "kv_proj", "gate_proj" (not for windows of one token), "key_scale" [H] and, where places differ, "bias"
    [r, ..]. starts: the rotary table of the first position of each token's window, [B, S, R/2, 2].
    """
    return keys_and_beside(ctx, weights, x, windows, starts, how=how)[0]


def keys_and_beside(
    ctx: Context, weights: Mapping[str, Tensor], x: Tensor, windows: Windows, starts: Tensor, *, how: Compressor
) -> tuple[WindowKeys, Tensor | None]:
    """(`window_keys`, the index keys that `how.beside` makes of them or None)."""
    new, ranks = of_tokens(weights, x, windows), keys_of_ranks(ctx.options.kernel)
    if "cache" in ctx.tensors:
        both, width = _with_cache(ctx, weights, new, starts, windows.ratio, how), len(weights["key_scale"])
        keys, beside = both.keys.tensor_split((width,), -1)
        return both._replace(keys=keys), None if how.beside is None else beside
    slots = windows.slots
    if ranks is not None:
        new, starts = _of_ranks(new, ranks), ranks.gather(starts.expand(x.shape[0], -1, -1, -1))
        slots = window_slots(new.positions, new.segments, windows.ratio)
    return _keys(weights, new, slots, starts, windows.ratio, how)


def _keys(
    weights: Mapping[str, Tensor], tokens: OfTokens, slots: Tensor, starts: Tensor, ratio: int, how: Compressor
) -> tuple[WindowKeys, Tensor | None]:
    """(sums of these tokens, normed and rotated, what stands beside them). starts: of these tokens."""
    bias = weights["bias"] if "bias" in weights else tokens.numbers.new_zeros(ratio, tokens.numbers.shape[-1])
    sums = weighted_sums(tokens, slots, bias, overlap=how.overlap)
    last = last_tokens(tokens, slots.expand_as(tokens.positions), ratio)
    tables = in_slots(starts.expand(last.shape[0], -1, -1, -1), last, sums.keys.shape[1])
    keys = rms_norm_fp32_weight(sums.keys, weights["key_scale"], eps=how.eps)

    def rotated(x: Tensor) -> Tensor:
        return how.rotate(x.unsqueeze(-2), tables).squeeze(-2)

    beside = None if how.beside is None else rotated(how.beside(keys))
    return sums._replace(keys=rotated(keys)), beside


def _of_ranks(new: OfTokens, ranks: Any) -> OfTokens:
    """The inputs of windows from the tokens of all ranks of cp; gradients are reduced in fp32 at least."""
    both = ranks.gather(upcast(torch.cat((new.numbers, new.gates), -1))).to(new.numbers.dtype)
    numbers, gates = both.chunk(2, -1)
    positions, segments = ranks.gather(torch.stack((new.positions, new.segments), -1)).unbind(-1)
    return OfTokens(numbers, gates, positions, segments)


def _with_cache(
    ctx: Context, weights: Mapping[str, Tensor], new: OfTokens, starts: Tensor, ratio: int, how: Compressor
) -> WindowKeys:
    """The cached keys and those of the windows that the new tokens complete, in the cache's slots."""
    entry, name = ctx.state(), how.name
    count = 2 * ratio - 1  # tokens that a window which the next one completes may read, if windows overlap
    if not entry:  # its shapes are asked for: dimension 1 of the keys is the tokens of a slot
        width = len(weights["key_scale"])
        if how.beside is not None:
            width += how.beside(new.numbers.new_zeros(1, 1, width)).shape[-1]
        shapes = (ratio, width), (ratio,), (ratio,)
        kinds = new.numbers.dtype, torch.int64, torch.int64
        rows = len(new.positions)
        empty = WindowKeys(*(torch.zeros(rows, *s, dtype=d) for s, d in zip(shapes, kinds, strict=True)))
        ctx.keep(**_named(name, empty, OfTokens(*(t[:, :1].expand(-1, count, *[-1] * (t.ndim - 2)) for t in new))))
        return empty
    known = continued(OfTokens(*(entry[f"{name}_{part}"] for part in _OPEN)), new)
    slots = window_slots(known.positions, known.segments, ratio)
    none = starts.new_zeros(1, 1, *starts.shape[2:]).expand(starts.shape[0], count, -1, -1)
    new_keys, beside = _keys(weights, known, slots, torch.cat((none, starts), 1), ratio, how)
    new_keys = new_keys if beside is None else new_keys._replace(keys=torch.cat((new_keys.keys, beside), -1))
    last, index = last_tokens(known, slots, ratio), torch.arange(known.positions.shape[1], device=slots.device)
    fresh = in_slots((index >= count).expand_as(last), last, new_keys.keys.shape[1])
    cached = WindowKeys(*(entry[f"{name}_{part}"] for part in _KEYS))
    if "occupied" in ctx.tensors:  # empty slots may hold NaN
        cached = cached._replace(keys=cached.keys.where((cached.segments > 0)[..., None], 0))
    keys = appended(cached, new_keys, fresh, inplace=ctx.use.inplace)
    ctx.keep(**_named(name, keys, last_of(known, count)))
    return keys._replace(keys=keys.keys.to(new.numbers.dtype))


_KEYS = ("keys", "ends", "documents")  # parts of an entry's names: `WindowKeys`,
_OPEN = ("numbers", "gates", "positions", "segments")  # and `OfTokens`


def _named(name: str, keys: WindowKeys, last: OfTokens) -> dict[str, Tensor]:
    parts = (*zip(_KEYS, keys, strict=True), *zip(_OPEN, last, strict=True))
    return {f"{name}_{part}": value for part, value in parts}


def choose_windows(
    ctx: Context,
    weights: Mapping[str, Any],
    inputs: tuple[Tensor, Tensor],
    mask: Mapping[str, Any],
    freqs: Mapping[str, Tensor],
    *,
    indexer: Indexer,
    how: Compressor,
) -> Tensor | None:
    """int64 [B, Q, k]: the windows that the layer's indexer chooses for each query; None: all that have ended.

    weights: of the indexer, with a "compressor". inputs: x [B, S, D] and what queries are projected from. freqs:
    {"table": of the tokens, "start": see `window_keys`}. The choice, of windows by the position of their last token in
    the document, is the tap "choices", and the keyword `choices` of the block's call replaces it. It has no gradient.
    """
    x, latent = (t.detach() for t in inputs)
    with torch.no_grad():
        choices = _chosen_windows(ctx, weights, x, latent, mask, freqs, indexer, how)

    keys = functools.partial(window_keys, ctx, weights["compressor"], x, mask["windows"], freqs["start"], how=how)
    return ctx.chose_windows(weights, (x, latent), mask, freqs, choices, indexer=indexer, keys=keys)


def _chosen_windows(
    ctx: Context,
    weights: Mapping[str, Any],
    x: Tensor,
    latent: Tensor,
    mask: Mapping[str, Any],
    freqs: Mapping[str, Tensor],
    indexer: Indexer,
    how: Compressor,
) -> Tensor | None:
    choices, windows = ctx.tensors.get("choices"), mask["windows"]
    keys = window_keys(ctx, weights["compressor"], x, windows, freqs["start"], how=how)
    named = windows_of(keys, windows)
    if choices is None and keys.keys.shape[1] <= indexer.count:
        if ctx.wants("choices"):
            ctx.aux["choices"] = all_visible(named).expand(x.shape[0], -1, -1)
        return None
    if choices is None:
        choices = choose(weights, x, latent, keys.keys, freqs["table"], named, indexer)
    choices = ctx.aux["chosen"] = ctx.tap("choices", choices)
    return choices


def attend_to_windows(
    ctx: Context,
    q: Tensor,
    kv: Tensor,
    mask: Mapping[str, Any],
    windows: WindowKeys,
    *,
    choices: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of q [B, S, N, H] over keys of tokens kv [B, S, 1, H] and of windows, which are values too.

    choices: int64 [B, Q, k], the names of the windows that are read; None: all that have ended. [B, S, N, H].
    Kernels that read places skip all other keys; "auto" is one where that is faster than a mask of all keys.
    """
    kernel, tokens = ctx.options.kernel, mask["attention"]
    if ctx.options.invariant:
        raise ValueError(
            'kernel="invariant" orders the keys of tokens, and here keys of windows of them stand beside: layers of '
            'this model have no batch-invariant form; kernel="math" gives the reference.'
        )
    if kernel in ("blocks", "varlen"):
        raise ValueError(
            f"kernel={kernel!r} reads rules over the tokens of a row, and here keys of windows stand beside them: "
            '"auto", "sdpa" and kernel="math" take any mask.'
        )
    q, kv = ctx.tap("attention.q", q), ctx.tap("attention.k", kv)
    ranks = keys_of_ranks(kernel)
    if "cache" in ctx.tensors:
        kv = ctx.extend({"k": kv})["k"]
    elif ranks is not None:
        tokens = ranks.mask(tokens)
        kv = ranks.gather(upcast(kv.flatten(2))).to(kv.dtype).unflatten(2, kv.shape[2:])
        own = getattr(kernel, "before").kernel  # noqa: B009 - of one process: all keys are here
        kernel = reader_of_choices(kernel) or own
    read = TokensAndWindows(tokens, windows_of(windows, mask["windows"]), choices)
    seen = read.places() if _reads_places(kernel, read, q) else read.dense()
    keys = torch.cat((kv, windows.keys.unsqueeze(2)), 1)
    ctx.saw_windows(q, keys, seen, kv.shape[1], scale=scale, sinks=sinks)
    show = ctx.tap if ctx.wants_any(("attention.scores", "attention.pattern")) else None
    z = attention(q, keys, keys, seen, kernel=kernel, scale=scale, sinks=sinks, tap=show)
    return ctx.tap("attention.z", z)


def _reads_places(kernel: Kernel, read: TokensAndWindows, q: Tensor) -> bool:
    """Whether a kernel is given the places of keys, and not a mask of all of them, for queries q [B, Q, N, H]."""
    # In this order: a count would bind an exported program to rows that are as long as the reach of its tokens.
    if not reads_choices(kernel) or read.count == math.inf:
        return False
    return reader_of_choices(kernel) != "auto" or read.pays(q)

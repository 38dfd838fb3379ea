"""Prompts into a cache: in chunks, and what prompts share computed once."""

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import Cache
from fnmodels.models.common.registry import DecoderConfig, family_of
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree, leaves

SHARED = 16  # tokens that prompts must have in common for a pass of their own


def activations(params: Tree, dtype: torch.dtype | None = None) -> tuple[torch.dtype, torch.device]:
    """(dtype, device) of a model's activations: those of its first floating parameter, unless dtype is given."""
    first = next(leaf for leaf in leaves(params) if leaf.is_floating_point())
    return dtype or first.dtype, first.device


def empty_caches(
    params: Tree, config: DecoderConfig, capacity: int, *, dtype: torch.dtype | None = None, **form: Any
) -> Callable[[int], Cache]:
    """The function rows -> cache without tokens, for `prefilled`; dtype as for `activations`, form as for `init_cache`.

    The cache is made once, for `init_cache` runs a layer of each kind on the meta device: 10 to 25 ms.
    """
    dtype, device = activations(params, dtype)
    one = fnmodels.init_cache(config, 1, capacity, dtype=dtype, device=device, **form)
    return functools.partial(_copies, one)


def prefilled(
    params: Tree,
    config: DecoderConfig,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    empty: Callable[[int], Cache],
    chunk: int,
    **options: Unpack[ForwardKwargs],
) -> Generator[None, None, Cache]:
    """A generator that yields between chunks and returns a cache with all tokens of each prompt but the last.

    Equal prompts are computed once, and so is what all prompts begin with; both are copied with `fnmodels.take`.
    Prompts of similar lengths are computed together, so that at most half of the tokens are padding.

    lengths: of each prompt, the sequence length that length-dependent rotary scalings read. empty: a cache without
    tokens of so many rows, as of `empty_caches`. chunk: tokens computed at a time, padding included.
    """
    _, device = activations(params)
    tokens = [tuple(prompt[:-1]) for prompt in prompts]
    same_tables = len(set(lengths)) == 1 or not _reads_length(config, lengths, max(map(len, tokens)))
    keys = [(row, 0 if same_tables else length) for row, length in zip(tokens, lengths, strict=True)]
    distinct = list(dict.fromkeys(keys))
    shared = _common([row for row, _ in distinct]) if same_tables and len(distinct) > 1 else 0
    sizes = torch.tensor([lengths[keys.index(key)] for key in distinct], device=device)

    def extended(cache: Cache, new: list[tuple[int, ...]], sizes: Tensor) -> Generator[None, None, Cache]:
        width = max(map(len, new))
        ids, segment_ids = torch.zeros(2, len(new), width, dtype=torch.int64)
        for row, own in enumerate(new):
            ids[row, : len(own)], segment_ids[row, : len(own)] = torch.tensor(own, dtype=torch.int64), 1
        each = max(1, chunk // len(new))
        for begin in range(0, width, each):
            if begin:
                yield
            part = slice(begin, begin + each)
            step = fnmodels.prepare_step(
                config, ids[:, part].to(device), cache, segment_ids=segment_ids[:, part].to(device), length=sizes
            )
            _, cache = fnmodels.decode_(params, *step, cache, config=config, at="last", **options)
        return cache

    def suffixes(group: list[int], cache: Cache) -> Generator[None, None, Cache]:
        return extended(cache, [distinct[row][0][shared:] for row in group], sizes[group])

    start = empty
    if shared:
        prefix = yield from extended(empty(1), [distinct[0][0][:shared]], sizes[:1])
        start = functools.partial(_copies, prefix)
        yield
    found, groups = start(len(distinct)), _similar([len(row) - shared for row, _ in distinct])
    if len(groups) == 1:
        found = yield from suffixes(groups[0], found)
    else:
        for group in groups:
            found = fnmodels.insert_(found, group, (yield from suffixes(group, start(len(group)))))
            yield
    if len(distinct) < len(keys):
        found = fnmodels.take(found, [distinct.index(key) for key in keys])
    return found


def _similar(sizes: Sequence[int]) -> list[list[int]]:
    """Indices in groups whose sizes are at least half of the group's largest, or at most SHARED below it."""
    groups: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if groups and max(2 * sizes[index], sizes[index] + SHARED) >= sizes[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


def _copies(cache: Cache, rows: int) -> Cache:
    return fnmodels.take(cache, [0] * rows)


def _common(rows: list[tuple[int, ...]]) -> int:
    """How many tokens all rows begin with; 0 if fewer than SHARED."""
    low, high = min(rows), max(rows)  # what these share, all share; they may differ in length
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return same if same >= SHARED else 0


def run_all(chunks: Generator[None, None, Cache]) -> Cache:
    """The result of `prefilled`, without a pause between chunks."""
    while True:
        try:
            next(chunks)
        except StopIteration as done:
            found: Cache = done.value
            return found


def _reads_length(config: DecoderConfig, lengths: Sequence[int], width: int) -> bool:
    """Whether the rotary tables of some positions differ between these sequence lengths."""
    positions = torch.arange(max(width, 1))[None]
    low, high = (leaves(family_of(config).freqs_cis(config, positions, length=n)) for n in (min(lengths), max(lengths)))
    return not all(torch.equal(a, b) for a, b in zip(low, high, strict=True))

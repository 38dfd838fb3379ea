"""Prompts into a cache: in chunks, and what prompts share computed once."""

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import Cache
from fnmodels.image_text import Image
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import family_of, text_config
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree, leaves

from .images import reader_of
from .requests import Held
from .routing import TAPS, recorded

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


@dataclass(frozen=True)
class Prefilled:
    """cache: of all tokens of each prompt but the last. logits: {prompt: [V]} of those that end with an image or see
    all of themselves, whose last token is in the cache too. computed: the tokens that went through the model. routing:
    for each prompt the experts of its tokens in the cache, in pieces [tokens, layers with experts, k]; empty where they
    were not asked for."""

    cache: Cache
    logits: dict[int, Tensor]
    computed: int = 0
    routing: tuple[tuple[Tensor, ...], ...] = ()

    def with_text_last(self) -> Cache:
        """The cache; ValueError for a prompt whose last token is in it."""
        if self.logits:
            raise ValueError(
                f"Prompt {min(self.logits)} ends with an image, or sees all of itself: end it with a token of text "
                "that does not, or take train.generate."
            )
        return self.cache


def prefilled(
    params: Tree,
    config: Any,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    empty: Callable[[int], Cache],
    chunk: int,
    images: Sequence[Sequence[Image]] | None = None,
    record_routing: bool = False,
    **options: Unpack[ForwardKwargs],
) -> Generator[None, None, Prefilled]:
    """A generator that yields between chunks and returns a cache with all tokens of each prompt but the last.

    Equal prompts are computed once, and so is what all prompts begin with; both are copied with `fnmodels.take`.
    Prompts of similar lengths are computed together, so that at most half of the tokens are padding.

    lengths: of each prompt, the sequence length that length-dependent rotary scalings read. empty: a cache without
    tokens of so many rows, as of `empty_caches`. chunk: tokens computed at a time, padding included, or more where an
    image is computed in one call. images: those of each prompt, see `Request`; params and config are then those of the
    whole model. record_routing: whether the experts of the tokens are returned too.
    """
    _, device = activations(params)
    reader, rows = reader_of(params, config, prompts, images or [()] * len(prompts), options.get("kernel", "auto"))
    tokens = [row if reader.takes_last(row) else row[:-1] for row in rows]
    same_tables = len(set(lengths)) == 1 or not _reads_length(text_config(config), lengths, max(map(len, tokens)))
    keys = [(row, 0 if same_tables else length) for row, length in zip(tokens, lengths, strict=True)]
    distinct = list(dict.fromkeys(keys))
    shared = _common([row for row, _ in distinct]) if same_tables and len(distinct) > 1 else 0
    shared = reader.undivided([row for row, _ in distinct], shared)
    sizes = torch.tensor([lengths[keys.index(key)] for key in distinct], device=device)
    axes = [reader.axes(rows[keys.index(key)]) for key in distinct]
    logits: dict[int, Tensor] = {}  # of distinct rows whose last token is computed with the others
    computed = 0
    experts: dict[int, list[Tensor]] = {}  # of distinct rows, in pieces
    taps = TAPS if record_routing else ()

    def extended(cache: Cache, which: list[int], begin: int, stop: int | None) -> Generator[None, None, Cache]:
        """The tokens from begin to stop of the distinct rows `which`."""
        nonlocal computed
        new = [distinct[row][0][:stop] for row in which]
        starts, each = [begin] * len(new), max(1, chunk // len(new))
        while any(start < len(row) for start, row in zip(starts, new, strict=True)):
            if max(starts) > begin:
                yield
            ends = [reader.end(row, start, each) for row, start in zip(new, starts, strict=True)]
            parts = list(zip(new, [axes[row] for row in which], starts, ends, strict=True))
            computed += sum(ends) - sum(starts)
            found, cache, tapped = reader.decoded(
                [row[start:end] for row, _, start, end in parts],
                [None if own is None else own[start:end] for _, own, start, end in parts],
                cache,
                sizes[which],
                taps,
                **options,
            )
            for i, chosen in enumerate(recorded(tapped).cpu() if tapped else ()):
                experts.setdefault(which[i], []).append(chosen[: ends[i] - starts[i]])
            for i, (row, _, start, end) in enumerate(parts):
                if start < end == len(row) and stop is None and reader.takes_last(row):
                    logits[which[i]] = found[i]
            starts = ends
        return cache

    start, begun = empty, list[Tensor]()
    if shared:
        prefix = yield from extended(empty(1), [0], 0, shared)
        start = functools.partial(_copies, prefix)
        begun = experts.pop(0, [])
        yield
    found, groups = start(len(distinct)), _similar([len(row) - shared for row, _ in distinct])
    if len(groups) == 1:
        found = yield from extended(found, groups[0], shared, None)
    else:
        for group in groups:
            found = fnmodels.cache.insert_(found, group, (yield from extended(start(len(group)), group, shared, None)))
            yield
    if len(distinct) < len(keys):
        found = fnmodels.take(found, [distinct.index(key) for key in keys])
    places = [distinct.index(key) for key in keys]
    routing = tuple((*begun, *experts.get(place, ())) for place in places) if record_routing else ()
    of_rows = {i: logits[places[i]] for i, row in enumerate(rows) if reader.takes_last(row)}
    return Prefilled(found, of_rows, computed, routing)


def continued(
    params: Tree,
    config: Any,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    held: Sequence[Held],
    *,
    empty: Callable[[int], Cache],
    chunk: int,
    record_routing: bool = False,
    **options: Unpack[ForwardKwargs],
) -> Generator[None, None, Prefilled]:
    """`prefilled` of prompts that begin with what earlier turns left in the cache: nothing is computed again.

    The experts that it returns are those of the other tokens.
    """
    _, device = activations(params)
    reader, rows = reader_of(params, config, prompts, [()] * len(prompts), options.get("kernel", "auto"))
    sizes = torch.tensor(lengths, device=device)
    cache = empty(len(rows))
    for row, one in enumerate(held):
        cache = fnmodels.cache.insert_(cache, [row], one.cache)
    starts, stops = [len(one.tokens) for one in held], [len(row) - 1 for row in rows]
    begin, each = sum(starts), max(1, chunk // len(rows))
    experts: list[list[Tensor]] = [[] for _ in rows]
    taps = TAPS if record_routing else ()
    while starts != stops:
        ends = [min(start + each, stop) for start, stop in zip(starts, stops, strict=True)]
        new = [row[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        _, cache, tapped = reader.decoded(new, [None] * len(rows), cache, sizes, taps, **options)
        for own, part, chosen in zip(experts, new, recorded(tapped).cpu() if tapped else (), strict=False):
            own.append(chosen[: len(part)])
        starts = ends
        if starts != stops:
            yield
    return Prefilled(cache, {}, sum(stops) - begin, tuple(map(tuple, experts)) if record_routing else ())


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
    """The length of the prefix that all rows share; 0 if less than SHARED."""
    low, high = min(rows), max(rows)  # what these share, all share; they may differ in length
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return same if same >= SHARED else 0


def run_all(chunks: Generator[None, None, Prefilled]) -> Prefilled:
    """The result of `prefilled`, without a pause between chunks."""
    while True:
        try:
            next(chunks)
        except StopIteration as done:
            found: Prefilled = done.value
            return found


def _reads_length(config: DecoderConfig, lengths: Sequence[int], width: int) -> bool:
    """Whether the rotary tables of some positions differ between these sequence lengths."""
    positions = torch.arange(max(width, 1))[None]
    low, high = (leaves(family_of(config).freqs_cis(config, positions, length=n)) for n in (min(lengths), max(lengths)))
    return not all(torch.equal(a, b) for a, b in zip(low, high, strict=True))

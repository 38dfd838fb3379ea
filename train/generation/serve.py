"""Continuous batching as a pure step over slots: `ServeState`, `serve_step` and `admit`.

    state = admit(empty_state(config, slots, capacity), rows, cache, ...)    # prompts, prefilled elsewhere
    state = serve_step(params, state, config=config)                         # one more token for every active slot

A slot is a row of the cache. Slots without a request are padding: nothing of them is written, and their content changes
no bit of the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import Cache, tree
from fnmodels.cache import DecodingStep
from fnmodels.inputs.values import has_values
from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .routing import NONE, TAPS, recorded
from .sampling import LogitsFn, SampleState, Sampling, check_sampling, sample_step


@tree.pytree
@dataclass(frozen=True)
class Ready:
    """Slots [B] whose cache holds the last token of the prompt too, and their logits [B, V] for the first draw."""

    slots: Tensor
    logits: Tensor


@tree.pytree
@dataclass(frozen=True)
class ServeState:
    """The contents of B slots between two steps.

    Args:
        cache: All tokens of each row but the last.
        last: int64 [B], the last token, drawn or of the prompt.
        active: bool [B], whether the slot has a request.
        lengths: int64 [B], the sequence lengths that length-dependent rotary scalings read.
        draws: The state of sampling.
        logp: fp32 [B], nats of `last` where the step drew it, see `sample_step`.
        logp_kept: fp32 [B], nats of `last` under the distribution that was drawn from.
        ready: Slots of new prompts that end with an image; None: there are none.
        routing: int16 [B, layers with experts, k], the experts of the token before `last`, -1 for slots where the step
            computed none; None where it was not asked for.
    """

    cache: Cache
    last: Tensor
    active: Tensor
    lengths: Tensor
    draws: SampleState
    logp: Tensor
    logp_kept: Tensor
    ready: Ready | None = None
    routing: Tensor | None = None


def empty_state(
    config: DecoderConfig,
    slots: int,
    capacity: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> ServeState:
    """Slots without requests, each with room for `capacity` tokens; dtype and kv_dtype as for `init_cache`."""
    zero = torch.zeros(slots, dtype=torch.int64, device=device)
    none = zero.float()
    draws = SampleState(Sampling(), zero, zero, zero)
    cache = fnmodels.init_cache(config, slots, capacity, dtype=dtype, device=device, kv_dtype=kv_dtype)
    return ServeState(cache, zero, zero > 0, zero + capacity, draws, none, none)


def serve_step(
    params: Tree,
    state: ServeState,
    /,
    *,
    config: DecoderConfig,
    logits_fn: LogitsFn | None = None,
    inplace: bool = False,
    step: DecodingStep | None = None,
    record_routing: bool = False,
    **options: Unpack[ForwardKwargs],
) -> ServeState:
    """Writes each active slot's last token into the cache and draws the next one.

    Args:
        params: The parameters of the model.
        state: The slots; those that are not active keep what they hold.
        config: The model's config.
        logits_fn: Edits the logits [B, V] before the draw; None: no edit.
        inplace: Whether the cache of `state` is overwritten, which must not be used again then.
        step: A result of `fnmodels.compiled_step`, which overwrites the cache too and has its own options; None: eager.
        record_routing: Whether the experts of the written tokens are returned, by an eager step in place of `step` that
            overwrites the cache.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The slots after the step.
    """
    ready = state.ready
    written = state.active if ready is None else state.active & ~ready.slots
    tokens = state.last[:, None]
    everyone = has_values(written) and written.is_cpu and bool(written.all())
    ids = None if everyone and step is None else written[:, None].long()
    routing: Tensor | None = None
    if record_routing:
        tapped_step = fnmodels.cache.tapped_step(config, TAPS, **options)
        logits, cache, tapped = tapped_step(params, tokens, state.cache, segment_ids=ids, length=state.lengths)
        routing = recorded(tapped)[:, 0].masked_fill(~written[:, None, None], NONE)
    elif step is None and not inplace:
        made = fnmodels.prepare_step(config, tokens, state.cache, segment_ids=ids, length=state.lengths)
        logits, cache = fnmodels.decode(params, *made, state.cache, config=config, **options)
    else:
        step = step or fnmodels.cache.eager_step(config, **options)
        logits, cache = step(params, tokens, state.cache, segment_ids=ids, length=state.lengths)
    logits = logits[:, 0]
    if ready is not None:
        logits = torch.where(ready.slots[:, None], ready.logits, logits)
    active = None if everyone else state.active  # all slots, where the host knows it
    drawn, logp, kept, draws = sample_step(logits, state.draws, active=active, logits_fn=logits_fn)
    last = drawn if active is None else torch.where(active, drawn, state.last)
    return replace(state, cache=cache, last=last, draws=draws, logp=logp, logp_kept=kept, ready=None, routing=routing)


def admit(
    state: ServeState,
    rows: Sequence[int],
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    ids: Sequence[int],
    lengths: Sequence[int],
    sampling: Sampling,
    vocab: int,
    logits: Mapping[int, Tensor] | None = None,
    inplace: bool = False,
) -> ServeState:
    """The state with requests in the slots `rows`, which become active.

    cache: one row per request with all tokens of its prompt but the last. seeds, ids: of the requests' noise.
    sampling: of all slots, so that each field is a number or a tensor [B]. vocab: the number of logits.
    logits: {i: [V]} of requests whose last token the cache holds too. inplace: as in `serve_step`.
    """
    check_sampling(sampling, len(state.last))
    device = state.last.device
    at = torch.tensor(rows, device=device)

    def put(values: Tensor, new: Sequence[int]) -> Tensor:
        return values.index_copy(0, at, torch.tensor(new, dtype=values.dtype, device=device))

    draws = replace(
        state.draws,
        sampling=sampling,
        seeds=put(state.draws.seeds, seeds),
        rows=put(state.draws.rows, ids),
        steps=state.draws.steps.index_fill(0, at, 0),
    )
    if sampling.penalizes or draws.counts is not None:
        draws = _with_counts(draws, at, prompts, vocab)
    return replace(
        state,
        cache=(fnmodels.cache.insert_ if inplace else fnmodels.insert)(state.cache, at, cache),
        last=put(state.last, [prompt[-1] for prompt in prompts]),
        active=state.active.index_fill(0, at, True),
        lengths=put(state.lengths, lengths),
        draws=draws,
        ready=_ready(state, at, logits) if logits else state.ready,
    )


def _ready(state: ServeState, rows: Tensor, logits: Mapping[int, Tensor]) -> Ready:
    index, new = rows[list(logits)], torch.stack(list(logits.values()))
    held = state.ready or Ready(state.active & False, new.new_zeros(len(state.last), new.shape[1]))
    return Ready(held.slots.index_fill(0, index, True), held.logits.index_copy(0, index, new))


def take_slots(state: ServeState, rows: Sequence[int]) -> ServeState:
    """The state of these slots alone, in this order: a step takes less time for fewer rows."""
    index = torch.tensor(rows, dtype=torch.int64, device=state.last.device)
    others = {
        name: getattr(state, name) for name in ("last", "active", "lengths", "draws", "logp", "logp_kept", "ready")
    }
    taken = tree.map(lambda leaf: leaf.index_select(0, index) if isinstance(leaf, Tensor) else leaf, others)
    return ServeState(cache=fnmodels.take(state.cache, index), **taken)


def _with_counts(draws: SampleState, rows: Tensor, prompts: Sequence[Sequence[int]], vocab: int) -> SampleState:
    counts, seen = draws.counts, draws.seen
    if counts is None or seen is None:
        counts = torch.zeros(len(draws.seeds), vocab, dtype=torch.int32, device=rows.device)
        seen = counts > 0
    fresh = torch.zeros(len(rows), vocab, dtype=torch.bool, device=rows.device)
    for row, prompt in zip(fresh, prompts, strict=True):
        row[torch.tensor(list(prompt), dtype=torch.int64, device=rows.device)] = True
    return replace(draws, counts=counts.index_fill(0, rows, 0), seen=seen.index_copy(0, rows, fresh))

"""Sampling of the next token: penalties, temperature, truncation of the support, and the draw.

    state = sample_state(Sampling(temperature=0.8, top_p=0.95), seeds, rows)
    tokens, logp, logp_kept, state = sample_step(logits, state)

Every setting is a number for all rows or a tensor [B]. A row's draw depends on its logits, its settings, its seed, its
row id and its step, not on its neighbours.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.dtypes import widest
from fnmodels.ops.torch_internals import versions

from .noise import exponential

Number = float | Tensor
# Draws whose noise is computed at once, at most, and as many elements of it, which stay in a CPU's cache.
_DRAWS, _ELEMENTS = 32, 1 << 15
LogitsFn = Callable[[Tensor], Tensor]


@tree.pytree
@dataclass(frozen=True)
class Sampling:
    """Settings of drawing the next token; each field is a number, or a tensor [B] with one value per row.

    Truncations apply in the order top_k, top_p, min_p. A token exactly as likely as the last one kept is kept too.

    Args:
        temperature: Divides the logits; 0 takes the likeliest token, the lowest id among equals.
        top_k: The number of likeliest tokens that are kept; None: all.
        top_p: The fewest likeliest tokens are kept whose share of what top_k leaves reaches this (nucleus sampling,
            arXiv 1904.09751).
        min_p: Tokens at least this many times as likely as the likeliest are kept (arXiv 2407.01082).
        repetition: Divides positive and multiplies negative logits of tokens in the prompt or the answer; 1: no effect.
        presence: Subtracted from the logits of tokens in the answer, once.
        frequency: Subtracted from the logits of tokens in the answer, once per occurrence.
    """

    temperature: Number = 1.0
    top_k: int | Tensor | None = None
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition: Number = 1.0
    presence: Number = 0.0
    frequency: Number = 0.0

    @property
    def greedy(self) -> bool:
        """Whether every row takes its likeliest token; False where temperatures are a tensor."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p leave out tokens; True for tensors."""
        return self.top_k is not None or not _is(self.top_p, 1) or not _is(self.min_p, 0)

    @property
    def penalizes(self) -> bool:
        """Whether repetition, presence or frequency change logits; True for tensors."""
        return not (_is(self.repetition, 1) and _is(self.presence, 0) and _is(self.frequency, 0))


@tree.pytree
@dataclass(frozen=True)
class SampleState:
    """The state of a draw beside the logits.

    seeds, rows, steps: int64 [B], the counter of the noise. counts: int32 [B, V], occurrences in the answer; seen:
    bool [B, V], tokens of the prompt or the answer; None where there are no penalties.
    """

    sampling: Sampling
    seeds: Tensor
    rows: Tensor
    steps: Tensor
    counts: Tensor | None = None
    seen: Tensor | None = None


def _is(value: Any, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number


_VALID: dict[str, tuple[Callable[[Any], Any], str]] = {
    "temperature": (lambda t: (t >= 0) & (t < float("inf")), "at least 0 and finite"),
    "top_k": (lambda k: k >= 1, "at least 1, or None for all tokens"),
    "top_p": (lambda p: (p > 0) & (p <= 1), "above 0 and at most 1"),
    "min_p": (lambda p: (p >= 0) & (p <= 1), "from 0 to 1"),
    "repetition": (lambda r: (r > 0) & (r < float("inf")), "above 0 and finite"),
    "presence": (lambda x: abs(x) < float("inf"), "finite"),
    "frequency": (lambda x: abs(x) < float("inf"), "finite"),
}


def check_sampling(sampling: Sampling, batch: int | None = None) -> None:
    """ValueError that names a setting that is out of range, or whose tensor is not [batch]."""
    for name, (valid, words) in _VALID.items():
        value = getattr(sampling, name)
        if isinstance(value, Tensor) and batch is not None and value.shape != (batch,):
            raise ValueError(f"Sampling: {name} is a tensor {list(value.shape)}; it must be [B] = [{batch}].")
        if value is not None and not (bool(valid(value).all()) if isinstance(value, Tensor) else valid(value)):
            shown = value.tolist() if isinstance(value, Tensor) else value
            raise ValueError(f"Sampling: {name} is {shown}; it must be {words}.")


def stack_samplings(samplings: list[Sampling], device: torch.device | str | None = None) -> Sampling:
    """One Sampling for a batch from one per row, whose fields are numbers: equal fields stay numbers."""

    def field(name: str) -> Any:
        values = [getattr(sampling, name) for sampling in samplings]
        if all(value == values[0] for value in values):
            return values[0]
        if name == "top_k":
            return torch.tensor([2**31 - 1 if k is None else k for k in values], device=device)
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Sampling(**{f.name: field(f.name) for f in dataclasses.fields(Sampling)})


def sample_state(
    sampling: Sampling,
    seeds: Tensor,
    rows: Tensor,
    *,
    prompts: list[list[int]] | None = None,
    vocab: int | None = None,
    steps: Tensor | None = None,
) -> SampleState:
    """The state before the first draw (or the draw `steps`). seeds, rows: int64 [B].

    prompts, vocab: token ids of each row and the size of the vocabulary, needed for penalties only. ValueError for
    settings out of range.
    """
    check_sampling(sampling, len(seeds))
    steps = torch.zeros_like(seeds) if steps is None else steps
    if not sampling.penalizes:
        return SampleState(sampling, seeds, rows, steps)
    if vocab is None or prompts is None:
        raise ValueError("Sampling with penalties needs the prompts and the size of the vocabulary.")
    seen = torch.zeros(len(seeds), vocab, dtype=torch.bool, device=seeds.device)
    for row, prompt in enumerate(prompts):
        seen[row, torch.tensor(prompt, dtype=torch.int64, device=seeds.device)] = True
    return SampleState(sampling, seeds, rows, steps, torch.zeros_like(seen, dtype=torch.int32), seen)


def sample_step(
    logits: Tensor, state: SampleState, *, active: Tensor | None = None, logits_fn: LogitsFn | None = None
) -> tuple[Tensor, Tensor, Tensor, SampleState]:
    """Draws one token per row from logits.

    Args:
        logits: [B, V].
        state: The samplings, seeds and counts of the rows, of `train.generation.sampling`.
        active: bool [B]; rows that are False get a token of no meaning, and their state does not change. None: all are
            active.
        logits_fn: Edits the logits [B, V] before anything else, -inf for a token that must not be drawn; None: no edit.

    Returns:
        (tokens [B], logp [B], logp_kept [B], the next state). logp is of the token under the full softmax of the logits
        at the temperature, in nats, as `token_logprobs` computes it. It is without penalties and logits_fn, and at
        temperature 1 for rows of temperature 0. logp_kept is of the token under the distribution it was drawn from:
        with penalties and logits_fn, over the kept support. It is 0 for rows of temperature 0.

    Raises:
        ValueError: logits_fn leaves a row without a token.
    """
    sampling = state.sampling
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    edited = wide if logits_fn is None else _edited(wide, logits_fn, active)
    edited = _penalized(edited, state)
    later: tuple[Tensor, ...] = ()
    if sampling.greedy:
        tokens, full = edited.argmax(-1), torch.log_softmax(wide, -1)
        logp = _at(full, tokens)
        logp_kept = torch.zeros_like(logp)
    else:
        heat, greedy = _column(sampling.temperature, wide), None
        if isinstance(sampling.temperature, Tensor):  # of rows, of which some may be 0
            greedy, heat = heat[:, 0] == 0, torch.where(heat == 0, 1.0, heat)
        is_one = _is(sampling.temperature, 1)
        full = torch.log_softmax(wide if is_one else wide / heat, -1)
        scaled = truncated(edited if is_one else edited / heat, sampling)
        noise, later = _log_noise(state, wide.shape[-1], active)
        tokens = (scaled - noise.to(wide.device)).argmax(-1)
        tokens = tokens if greedy is None else torch.where(greedy, edited.argmax(-1), tokens)
        changed = sampling.truncates or logits_fn is not None or state.counts is not None
        logp = _at(full, tokens)
        logp_kept = _at(torch.log_softmax(scaled, -1), tokens) if changed else logp
        logp_kept = logp_kept if greedy is None else torch.where(greedy, 0.0, logp_kept)
    after = _advanced(state, tokens, active)
    if later:
        object.__setattr__(after, "_later", (_counters(after), later))
    return tokens, logp, logp_kept, after


def _log_noise(state: SampleState, width: int, active: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(The logarithms [B, V] of the noise of this draw, those of the next ones as far as they are known).

    Those of some draws of all rows are computed at once, for each takes fifty operations. They belong to the state that
    they follow, and are computed anew once its counters were written into.
    """
    counters = _counters(state)
    made = vars(state).get("_later")
    if active is None and made is not None and made[0] == counters and made[1][0].shape[-1] == width:
        return made[1][0], made[1][1:]
    batch = state.seeds.shape[0]
    count = min(_DRAWS, _ELEMENTS // max(1, batch * width)) if active is None and counters is not None else 1
    if count < 2:
        return exponential(state.seeds, state.rows, state.steps, width).log(), ()
    steps = state.steps[:, None] + torch.arange(count, device=state.steps.device)
    seeds, rows = (t.repeat_interleave(count) for t in (state.seeds, state.rows))
    logs = exponential(seeds, rows, steps.flatten(), width).log()
    noise, *later = logs.view(batch, count, width).unbind(1)
    return noise, tuple(later)


def _counters(state: SampleState) -> list[int] | None:
    """The numbers of writes into the counters of the noise; None where torch does not count writes."""
    return versions((state.seeds, state.rows, state.steps))


def truncated(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Logits at the temperature [B, V], -inf for tokens that top_k, top_p or min_p drop."""
    if not sampling.truncates:
        return scaled
    top_k, highest = sampling.top_k, scaled.amax(-1, keepdim=True)
    lowest = highest + _column(sampling.min_p, scaled).log()
    if top_k is not None or not _is(sampling.top_p, 1):
        # values alone: one threshold per row says what is kept, however a sort places equal ones
        if isinstance(top_k, int):
            ranked = scaled.topk(min(top_k, scaled.shape[-1])).values
        else:
            ranked = scaled.sort(descending=True).values
        rank = torch.arange(ranked.shape[-1], device=scaled.device)
        inside = rank < (ranked.shape[-1] if top_k is None else _column(top_k, rank))
        # fp64 and in order: the sums do not depend on how many tokens stand behind
        share = torch.where(inside, (ranked - highest).exp(), 0.0).to(widest(ranked.device))
        until = share.cumsum(-1)
        top_p = _column(sampling.top_p, until)
        # top_p = 1 by name, for the shares of unlikely tokens vanish in the sum
        inside = inside & ((until - share < top_p * until[:, -1:]) | (top_p >= 1))
        last = ranked.gather(-1, (inside.sum(-1, keepdim=True) - 1).clamp(min=0))
        lowest = torch.maximum(lowest, last)
    return scaled.masked_fill(scaled < lowest, -torch.inf)


def _column(value: Any, like: Tensor) -> Tensor:
    """A number or a tensor [B] as [1, 1] or [B, 1], in the dtype and on the device of `like`."""
    return torch.as_tensor(value, device=like.device).to(like.dtype).reshape(-1, 1)


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens[:, None])[:, 0]


def _edited(logits: Tensor, logits_fn: LogitsFn, active: Tensor | None) -> Tensor:
    edited = logits_fn(logits)
    if edited.shape != logits.shape:
        raise ValueError(f"logits_fn returned {list(edited.shape)}; it must return logits {list(logits.shape)}.")
    empty = (edited == -torch.inf).all(-1)
    empty = empty if active is None else empty & active
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(f"logits_fn set all tokens of row {row} to -inf; at least one must be left to draw.")
    return edited.to(logits.dtype)


def _penalized(logits: Tensor, state: SampleState) -> Tensor:
    sampling = state.sampling
    if state.counts is None or state.seen is None:
        return logits
    repetition = _column(sampling.repetition, logits)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(state.seen, repeated, logits)
    counts = state.counts.to(logits.dtype)
    return logits - _column(sampling.frequency, logits) * counts - _column(sampling.presence, logits) * (counts > 0)


def _advanced(state: SampleState, tokens: Tensor, active: Tensor | None) -> SampleState:
    counts, seen = state.counts, state.seen
    if active is None and counts is None:
        return dataclasses.replace(state, steps=state.steps + 1)
    one = torch.ones_like(state.steps) if active is None else active.to(state.steps.dtype)
    if counts is not None and seen is not None:
        counts = counts.scatter_add(1, tokens[:, None], one[:, None].to(counts.dtype))
        seen = seen | (counts > 0)
    return dataclasses.replace(state, steps=state.steps + one, counts=counts, seen=seen)

"""Speculative decoding: a small model drafts tokens, and the model checks them all in one step.

Both draw a step's token with the same noise, so a draft is right where both races have the same winner (Daliri, Musco
and Suresh, 2024: drafter-invariant speculative decoding). What is kept is always the model's own draw: the answer is
that of plain decoding with the same seed, whatever the draft model is, and so has its distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import Cache
from fnmodels.models.common.registry import DecoderConfig, family_of, source_kind
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .prompts import activations, prefilled, run_all
from .requests import Answer, Generations, Request, capacity_of, collect, requests_of
from .sampling import SampleState, Sampling, sample_state, sample_step, stack_samplings
from .stop import Decodes


@torch.no_grad()
def speculate(
    params: Tree,
    config: DecoderConfig,
    draft_params: Tree,
    draft_config: DecoderConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int | Sequence[int],
    ahead: int = 4,
    sampling: Sampling | None = None,
    seeds: int | Sequence[int] = 0,
    stop_ids: Sequence[int] = (),
    stop_texts: Sequence[str] = (),
    tokenizer: Decodes | None = None,
    chunk: int = 512,
    kv_dtype: torch.dtype | None = None,
    **options: Unpack[ForwardKwargs],
) -> tuple[Generations, float]:
    """(what `generate` returns for the same arguments, the share of drafted tokens that were right).

    draft_params, draft_config: a smaller model with the same vocabulary. ahead: tokens that it drafts for each step of
    the model. kv_dtype: of the model's cache, as for `serve`. All prompts run at once. Equality holds up to rounding:
    a step over several tokens adds in another order than one over a single token, which can decide between two tokens
    that are as good as equal.
    """
    if draft_config.vocab_size != config.vocab_size:
        raise ValueError(
            f"The draft model has a vocabulary of {draft_config.vocab_size} and the model one of {config.vocab_size}; "
            "both must have the same tokens."
        )
    if ahead < 1:
        raise ValueError(f"ahead is {ahead}; it must be at least 1.")
    made = requests_of(prompts, max_new, sampling, seeds, stop_ids, stop_texts)
    if not made:
        return collect([], 0), 0.0
    answers = [Answer(row, request, tokenizer) for row, request in enumerate(made)]
    model = _Side(params, config, made, ahead, chunk, options, kv_dtype)
    draft = _Side(draft_params, draft_config, made, ahead, chunk, options)
    device = model.device
    last, seed, draw = (
        torch.tensor(values, device=device)
        for values in zip(*((r.prompt[-1], r.seed, r.draw) for r in made), strict=True)
    )
    together = stack_samplings([request.sampling for request in made], device)
    prompt_ids = [list(request.prompt) for request in made]
    draws = sample_state(together, seed, draw, prompts=prompt_ids, vocab=config.vocab_size)
    active = torch.ones(len(made), dtype=torch.bool, device=device)
    events, right, drafted = [], 0, 0
    while bool(active.any()):
        tokens = draft.drafted(last, active, draws, ahead)  # [B, ahead + 1], the last token first
        logits, after = model.step(model.cache, tokens, active[:, None].long().expand_as(tokens))
        found, draws = _checked(logits, tokens, draws, active)
        kept = found.count
        drafted += ahead * int(active.sum())
        right += int((kept - 1).clamp(min=0).sum())
        model.keep(after, tokens, kept)
        draft.keep(draft.ahead_cache, tokens, kept)
        last = torch.where(active, found.tokens.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0], last)
        rows = zip(found.tokens.tolist(), found.logp.tolist(), found.logp_kept.tolist(), kept.tolist(), strict=True)
        for answer, (ids, logp, logp_kept, count) in zip(answers, rows, strict=True):
            for new in zip(ids[:count], logp, logp_kept, strict=False):  # those not kept have log-probabilities too
                events.append(answer.append(*new))
                if events[-1].reason is not None:
                    active[answer.row] = False
                    break
    return collect(events, len(made)), right / drafted


@dataclass(frozen=True)
class _Checked:
    """The model's draws [B, ahead + 1], of which the first count [B] are valid; 0 for idle rows."""

    tokens: Tensor
    logp: Tensor
    logp_kept: Tensor
    count: Tensor


def _checked(logits: Tensor, tokens: Tensor, draws: SampleState, active: Tensor) -> tuple[_Checked, SampleState]:
    """The model's own draws: one after the other while the draft agrees, and the first on which it does not."""
    going, found = active, []
    count = torch.zeros_like(tokens[:, 0])
    for place in range(tokens.shape[1]):
        token, logp, kept, draws = sample_step(logits[:, place], draws, active=going)
        found.append((token, logp, kept))
        count = count + going
        if place + 1 < tokens.shape[1]:
            going = going & (token == tokens[:, place + 1])
    ids, logp, logp_kept = (torch.stack(values, 1) for values in zip(*found, strict=True))
    return _Checked(ids, logp, logp_kept, count), draws


class _Side:
    """A model with its cache, which holds all tokens of each row but the last."""

    def __init__(
        self,
        params: Tree,
        config: DecoderConfig,
        requests: Sequence[Request],
        ahead: int,
        chunk: int,
        options: ForwardKwargs,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.params, self.config, self.options = params, config, options
        _, self.device = activations(params)
        prompts = [request.prompt for request in requests]
        sizes = [len(request.prompt) + request.max_new for request in requests]
        # drafted tokens are written before they are dropped: not into rings, where they would evict others
        self.cache = run_all(
            prefilled(
                params,
                config,
                prompts,
                sizes,
                capacity=capacity_of(requests) + ahead,
                chunk=chunk,
                form={"rings": False, "kv_dtype": kv_dtype},
                **options,
            )
        )
        self.lengths = torch.tensor(sizes, device=self.device)
        self.held = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        slotted = set(self.cache.slots)
        self.recurrent = any((source_kind(kind) or kind) not in slotted for kind in family_of(config).kinds(config))
        self.ahead_cache = self.cache

    def step(self, cache: Cache, tokens: Tensor, segment_ids: Tensor) -> tuple[Tensor, Cache]:
        step = fnmodels.prepare_step(self.config, tokens, cache, segment_ids=segment_ids, length=self.lengths)
        found: tuple[Tensor, Cache] = fnmodels.decode(self.params, *step, cache, config=self.config, **self.options)
        return found

    def drafted(self, last: Tensor, active: Tensor, draws: SampleState, ahead: int) -> Tensor:
        """[B, ahead + 1]: the last token, and those drawn after it; `ahead_cache` holds them all."""
        cache, tokens, segment_ids = self.cache, [last], active[:, None].long()
        for place in range(ahead + 1):
            logits, cache = self.step(cache, tokens[-1][:, None], segment_ids)
            if place < ahead:
                token, _, _, draws = sample_step(logits[:, 0], draws, active=active)
                tokens.append(token)
        self.ahead_cache = cache
        return torch.stack(tokens, 1)

    def keep(self, after: Cache, tokens: Tensor, count: Tensor) -> None:
        """Keeps the first count [B] of the tokens [B, S] that `after` holds beyond `cache`."""
        self.held = self.held + count
        if self.recurrent:  # a state cannot be rolled back: from the old one, with the tokens that are kept
            kept = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
            _, self.cache = self.step(self.cache, tokens, kept.long())
        else:
            self.cache = fnmodels.truncate(after, self.held)

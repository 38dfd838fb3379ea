"""Speculative decoding: a small model or the model's MTP head drafts tokens, and the model checks them in one step.

Both draw a step's token with the same noise, so a draft is right where both races have the same winner (Daliri, Musco
and Suresh, 2024: drafter-invariant speculative decoding). What is kept is always the model's own draw: the answer is
that of plain decoding with the same seed, whatever the draft model is, and so has its distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import Cache, mtp
from fnmodels.apply import hidden_states
from fnmodels.cache.rows import is_recurrent
from fnmodels.cache.step import logits_at, run_planned, runs_freely
from fnmodels.cache.step_plan import plan_step
from fnmodels.image_text import Image
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.mtp import blocks
from fnmodels.models.common.registry import text_config
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree

from .checks import check_head, check_request, learned_positions
from .decoder_traits import Decodes
from .images import text_model
from .prompts import activations, empty_caches, prefilled, run_all
from .requests import Answer, Generations, Request, capacity_of, collect, requests_of
from .sampling import SampleState, Sampling, sample_state, sample_step, stack_samplings

_ENDLESS = 1 << 62  # positions of a model that computes them


@torch.no_grad()
def speculate(
    params: Tree,
    config: DecoderConfig,
    draft_params: Tree | None,
    draft_config: DecoderConfig | None,
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
    images: Sequence[Sequence[Image]] | None = None,
    **options: Unpack[ForwardKwargs],
) -> tuple[Generations, float]:
    """Speculative decoding (arXiv 2211.17192): a draft model proposes tokens, and the model checks several at once.

    Results are those of `generate`, up to rounding: a step over several tokens adds in another order than that over a
    single token, which can decide between two tokens that are as good as equal. All prompts run at once.

    Args:
        params: The parameters of the model.
        config: The model's config.
        draft_params: A smaller model with the same vocabulary; a draft of text reads image tokens as they are. None:
            the first MTP head in `params`, see `fnmodels.mtp`, which goes on from its own states where it drafts
            several tokens.
        draft_config: The draft's config; None with draft_params None.
        prompts: Token ids of each prompt.
        max_new: Tokens generated at most, one number or one per prompt.
        ahead: Tokens drafted for each step of the model at most; fewer where the answer ends before, or where the draft
            has learned no position for more.
        sampling: How tokens are drawn; None: temperature 1.
        seeds: One for all prompts or one per prompt, as for `generate`.
        stop_ids: Tokens after which an answer ends.
        stop_texts: Texts that end an answer; they need a tokenizer.
        tokenizer: Of the tokenizers library; None: no texts.
        chunk: Tokens of prompts computed at a time.
        kv_dtype: Of the model's cache; torch.int8 for half the size. None: the activations' dtype.
        images: For each prompt its images, floats [C, H, W]; None: no images.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        What `generate` returns for the same arguments, and the share of drafted tokens that were accepted, 0 to 1.

    Raises:
        ValueError: `ahead` is below 1, only one of draft_params and draft_config is None, the vocabularies differ, or a
            prompt has no room for its answer.
    """
    if ahead < 1:
        raise ValueError(f"ahead is {ahead}; it must be at least 1.")
    if (draft_params is None) != (draft_config is None):
        raise ValueError("draft_params and draft_config belong together: pass both, or None for both.")
    made = requests_of(prompts, max_new, sampling, seeds, stop_ids, stop_texts, images)
    if not made:
        return collect([], 0), 0.0
    learned = learned_positions(config)
    for row, request in enumerate(made):
        check_request(row, request, config, tokenizer=tokenizer, learned=learned)
    answers = [Answer(row, request, tokenizer) for row, request in enumerate(made)]
    model = _Side(params, config, made, chunk, options, kv_dtype)
    draft: _Side | _Head
    if draft_params is None or draft_config is None:
        draft = _Head(model, made)
    else:
        check_head(draft_config)
        _check_vocabulary(model.config, text_config(draft_config))
        draft = _Side(draft_params, draft_config, made, chunk, options)
    device = model.device
    last, seed, draw = (
        torch.tensor(values, device=device)
        for values in zip(*((r.prompt[-1], r.seed, r.draw) for r in made), strict=True)
    )
    together = stack_samplings([request.sampling for request in made], device)
    prompt_ids = [list(request.prompt) for request in made]
    draws = sample_state(together, seed, draw, prompts=prompt_ids, vocab=model.config.vocab_size)
    active = torch.ones(len(made), dtype=torch.bool, device=device)
    events, right, drafted = [], 0, 0
    while bool(active.any()):
        left = torch.tensor([request.max_new for request in made]) - torch.tensor([len(a.tokens) for a in answers])
        # a step draws a token itself: drafts that the answer has no room for could stand beyond the model's positions
        count = (left.to(device) - 1).clamp(max=ahead).minimum(draft.room()).where(active, -1)
        tokens = draft.drafted(last, count, draws)  # [B, most drafts + 1], the last token first
        x, states, after = model.step(model.cache, tokens, _first(count + 1, tokens.shape[1]))
        logits = model.logits(x)
        found, draws = _checked(logits, tokens, draws, count)
        kept = found.count
        drafted += int(count.clamp(min=0).sum())
        right += int((kept - 1).clamp(min=0).sum())
        model.keep(after, tokens, kept)
        draft.follow(states, tokens, found.tokens, kept)
        last = torch.where(active, found.tokens.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0], last)
        rows = zip(found.tokens.tolist(), found.logp.tolist(), found.logp_kept.tolist(), kept.tolist(), strict=True)
        for answer, (ids, logp, logp_kept, count) in zip(answers, rows, strict=True):
            for new in zip(ids[:count], logp, logp_kept, strict=False):  # those not kept have log-probabilities too
                events.append(answer.append(*new))
                if events[-1].reason is not None:
                    active[answer.row] = False
                    break
    return collect(events, len(made)), right / max(drafted, 1)


def _first(count: Tensor, width: int) -> Tensor:
    """int64 [B, width] with 1 in the first count [B] columns: segment ids of that many tokens."""
    return (torch.arange(width, device=count.device) < count[:, None]).long()


def _check_vocabulary(config: DecoderConfig, draft_config: DecoderConfig) -> None:
    if draft_config.vocab_size != config.vocab_size:
        raise ValueError(
            f"The draft model has a vocabulary of {draft_config.vocab_size} and the model one of {config.vocab_size}; "
            "both must have the same tokens."
        )


@dataclass(frozen=True)
class _Checked:
    """The model's draws [B, S], of which the first count [B] are valid; 0 for idle rows."""

    tokens: Tensor
    logp: Tensor
    logp_kept: Tensor
    count: Tensor


def _checked(logits: Tensor, tokens: Tensor, draws: SampleState, count: Tensor) -> tuple[_Checked, SampleState]:
    """The model's own draws: one after the other while the draft agrees, and the first on which it does not.

    count: int64 [B], the tokens that were drafted, -1 for idle rows.
    """
    going, found = count >= 0, []
    kept = torch.zeros_like(count)
    for place in range(tokens.shape[1]):
        token, logp, logp_kept, draws = sample_step(logits[:, place], draws, active=going)
        found.append((token, logp, logp_kept))
        kept = kept + going
        if place + 1 < tokens.shape[1]:
            going = going & (place < count) & (token == tokens[:, place + 1])
    ids, logp, logp_kept = (torch.stack(values, 1) for values in zip(*found, strict=True))
    return _Checked(ids, logp, logp_kept, kept), draws


class _Side:
    """A model with its cache, which holds all tokens of each row but the last, or as many as it has learned positions.

    held: int64 [B], how many.
    """

    def __init__(
        self,
        params: Tree,
        config: DecoderConfig,
        requests: Sequence[Request],
        chunk: int,
        options: ForwardKwargs,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        (self.params, self.config), self.options = text_model(params, config), ForwardOptions(**options)
        _, self.device = activations(params)
        self.learned = learned_positions(config) or _ENDLESS
        prompts = [request.prompt[: self.learned + 1] for request in requests]
        sizes = [len(request.prompt) + request.max_new for request in requests]
        # drafted tokens are written before they are dropped: not into rings, where they would evict others
        empty = empty_caches(params, config, capacity_of(requests), rings=False, kv_dtype=kv_dtype)
        # a model of text drafts from image tokens as they are
        images = [request.images if text_config(config) is not config else () for request in requests]
        chunks = prefilled(params, config, prompts, sizes, empty=empty, chunk=chunk, images=images, **options)
        self.cache = run_all(chunks).with_text_last()
        self.lengths = torch.tensor(sizes, device=self.device)
        self.held = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        self.ahead_cache = self.cache
        self.taps: tuple[str, ...] = ()  # that its MTP head reads, where it drafts

    def step(self, cache: Cache, tokens: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor, Cache]:
        """(hidden states [B, S, D], what the model's MTP head reads of it, the cache with the tokens)."""
        prepared = fnmodels.prepare_step(self.config, tokens, cache, segment_ids=segment_ids, length=self.lengths)
        planned = plan_step(prepared, cache, self.config, self.options, free=runs_freely(self.params, self.options))
        x, after, tapped = run_planned(self.params, prepared[0], planned, cache, self.taps)
        return x, mtp.read(x, tapped, self.config) if self.taps else x, after

    def logits(self, x: Tensor) -> Tensor:
        with invariant_rows(self.options.invariant):
            return logits_at(self.params, x, {}, self.config, "all", self.options.edits)

    def room(self) -> Tensor:
        """int64 [B], the learned positions behind the tokens that the cache holds."""
        return self.learned - self.held

    def drafted(self, last: Tensor, count: Tensor, draws: SampleState) -> Tensor:
        """[B, S]: the last token, and the count [B] drawn after it, -1 for idle rows; `ahead_cache` holds them all,
        where there is room."""
        cache, tokens, width = self.cache, [last], int(count.max()) + 1
        inside = _first((count + 1).minimum(self.room()), width)
        for place in range(width):
            x, _, cache = self.step(cache, tokens[-1][:, None], inside[:, place : place + 1])
            if place + 1 < width:
                token, _, _, draws = sample_step(self.logits(x)[:, 0], draws, active=place < count)
                tokens.append(token)
        self.ahead_cache = cache
        return torch.stack(tokens, 1)

    def keep(self, after: Cache, tokens: Tensor, count: Tensor) -> None:
        """Keeps the first count [B] of the tokens [B, S] that `after` holds beyond `cache`, where there is room."""
        count = count.minimum(self.room())
        self.held = self.held + count
        if is_recurrent(after):  # a state cannot be rolled back: from the old one, with the tokens that are kept
            *_, self.cache = self.step(self.cache, tokens, _first(count, tokens.shape[1]))
        else:
            self.cache = fnmodels.cache.truncate_(after, self.held)

    def follow(self, x: Tensor, tokens: Tensor, drawn: Tensor, count: Tensor) -> None:
        """Keeps, as a draft, the tokens that the model kept; see `_Head.follow`."""
        self.keep(self.ahead_cache, tokens, count)


class _Head:
    """The first MTP head of a model as its draft.

    The head computes, from the model's state at a position and the token after it, a state that predicts the token
    after that. Its cache holds the positions of the model's; `first` is its state at the last of them, [B, D], and
    `source` what the head reads to go on from there, [B, D] or streams [B, n, D].
    """

    def __init__(self, model: _Side, requests: Sequence[Request]) -> None:
        if not model.params.get("mtp"):
            raise ValueError(
                "Without draft_params the model's MTP head drafts, and params has none: pass a smaller model."
            )
        if any(request.images for request in requests):
            raise ValueError("An MTP head drafts after prompts of text: pass a smaller model as the draft.")
        if model.options.layer_fn is not None or model.options.edits:
            raise ValueError("An MTP head drafts without layer_fn and edits: pass a smaller model as the draft.")
        self.model, self.params = model, {**model.params, "mtp": model.params["mtp"][:1]}
        # A later token's state is the head's own, with its norm instead of the model's final one.
        own_norm = {name: leaf for name, leaf in self.params["mtp"][0].items() if name == "norm"}
        self.own_params = {**self.params, **own_norm}
        self.output = mtp.view(self.params, 0)
        prompts = [torch.tensor(request.prompt, device=model.device) for request in requests]
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        room = next(slots.segments.shape[1] for slots in model.cache.slots.values())
        dtype, _ = activations(model.params)
        self.config, self.begin = blocks(model.config)
        made = fnmodels.init_cache(self.config, len(prompts), room, dtype=dtype, device=model.device, rings=False)
        kinds = made.kinds[self.begin :]
        slots = {kind: made.slots[kind] for kind in kinds if kind in made.slots}
        self.cache = Cache(made.layers[self.begin :], slots, kinds, made.length)
        model.taps = mtp.source_taps(model.config)
        self.streams = ("streams",) if model.taps else ()  # of the head's block, from which it goes on
        rows = (model.config.residual_streams,) if model.taps else ()
        self.first = torch.zeros(len(prompts), model.config.hidden_size, dtype=dtype, device=model.device)
        self.source = self.first.new_zeros(len(prompts), *rows, model.config.hidden_size)
        held = torch.tensor([len(prompt) - 1 for prompt in prompts], device=model.device)
        if tokens.shape[1] > 1:
            inside = _first(held, tokens.shape[1] - 1)
            prepared = fnmodels.prepare(model.config, tokens[:, :-1], segment_ids=inside, length=model.lengths)
            x, tapped, _ = hidden_states(model.params, *prepared, model.config, model.options, model.taps)
            self.follow(mtp.read(x, tapped, model.config), tokens[:, :-1], tokens[:, 1:], held)

    def _step(
        self, params: Tree, x: Tensor, tokens: Tensor, cache: Cache, segment_ids: Tensor
    ) -> tuple[Tensor, Tensor, Cache]:
        """(the head's states [B, S, D], those that it goes on from, its cache), of the model's states x [B, S, ...] and
        the tokens after them."""
        config: Any = self.model.config
        lengths = self.model.lengths
        prepared = fnmodels.prepare_step(self.config, tokens, cache, segment_ids=segment_ids, length=lengths)
        planned = plan_step(prepared, cache, self.config, self.model.options, free=self.model.options.layer_fn is None)
        step = planned.step._replace(entries=dict(enumerate(cache.layers, self.begin)))
        known = tokens.where(segment_ids > 0, -1)[..., None]
        how = planned.options.keywords
        how |= {"config": config, "cache": step, "taps": self.streams}
        state, *tapped, entries = mtp.hidden(params, x, known, planned.masks, prepared[2], **how)
        source = tapped[0]["mtp.0.streams"] if tapped else state
        return state, source, planned.after(cache, dict(enumerate(entries)))

    def _logits(self, state: Tensor) -> Tensor:
        with invariant_rows(self.model.options.invariant):
            found: Tensor = fnmodels.family_of(self.model.config).unembed(
                self.output, state[:, None], config=self.model.config
            )
        return found[:, 0]

    def room(self) -> Tensor:
        return torch.full_like(self.model.held, _ENDLESS)  # it stands at the model's positions

    def drafted(self, last: Tensor, count: Tensor, draws: SampleState) -> Tensor:
        """[B, S]: the last token, and the count [B] drawn after it, -1 for idle rows."""
        state, source, cache, tokens = self.first, self.source, self.cache, [last]
        for place in range(int(count.max())):
            if place:
                inside = (place < count)[:, None].long()
                x, after, cache = self._step(self.own_params, source[:, None], tokens[-1][:, None], cache, inside)
                state, source = x[:, 0], after[:, 0]
            token, _, _, draws = sample_step(self._logits(state), draws, active=place < count)
            tokens.append(token)
        return torch.stack(tokens, 1)

    def follow(self, x: Tensor, tokens: Tensor, drawn: Tensor, count: Tensor) -> None:
        """Goes on with the model's states x [B, S, ...] of tokens [B, S], of which the first count [B] were kept, and
        the tokens drawn after each of them, [B, S]."""
        state, source, self.cache = self._step(self.params, x, drawn, self.cache, _first(count, x.shape[1]))
        rows, newest = torch.arange(len(count), device=count.device), (count - 1).clamp(min=0)
        self.first = torch.where(count[:, None] > 0, state[rows, newest], self.first)
        kept = (count > 0).reshape(-1, *[1] * (source.ndim - 2))
        self.source = torch.where(kept, source[rows, newest], self.source)

"""`ContinuousBatch`: continuous batching of requests that come, end and are cancelled between any two steps."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import Cache
from fnmodels.cache import DecodingStep
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .decoder_traits import Decodes
from .memories import Memories, decoding_model
from .prompts import Prefilled, activations, continued, empty_caches, prefilled
from .requests import Answer, Event, Held, Request, length_of
from .routing import NONE
from .sampling import stack_samplings
from .serve import admit, empty_state, serve_step, take_slots

Hook = Callable[[Tensor, list[list[int]]], Tensor]


@dataclass
class _Admission:
    """Requests whose prompts are on their way into the cache."""

    rows: list[int]
    answers: list[Answer]
    chunks: Generator[None, None, Prefilled]


@dataclass(frozen=True)
class BatchSettings:
    """Settings of a batch's computation and of its texts.

    Args:
        tokenizer: Of the tokenizers library, for texts and stop texts; None: neither.
        skip_special_tokens: Whether texts are without special tokens.
        logits_fn: (logits [B, V], tokens) -> logits edited before the draw, see `generate`.
        chunk: Tokens of prompts computed between two steps of the others.
        dtype: Of the activations; None: that of the parameters.
        kv_dtype: torch.int8 for a cache of half the size, see `fnmodels.init_cache`; None: `dtype`.
        memories: What cross attention of the run reads; None: of a run without any.
    """

    tokenizer: Decodes | None = None
    skip_special_tokens: bool = True
    logits_fn: Hook | None = None
    chunk: int = 512
    dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    memories: Memories | None = None


class ContinuousBatch:
    """Requests over slots: each step draws one token for every active slot.

    A prompt costs about a step, alone or with others, so that free slots wait for more until a quarter of a step is
    left idle.

    Args:
        params: The parameters of the model.
        config: The model's config.
        slots: Requests that run at once.
        capacity: The most tokens of a request, prompt and answer.
        allocated: Slots that have memory at the beginning; `take` makes others as it needs them. None: all.
        settings: How it computes; None: the default settings.
        **options: Keywords of `fnmodels.forward`.
    """

    step: DecodingStep | None = None
    """A compiled step, which keeps the number of slots; None: steps are eager, as are those that record experts."""
    stepped: bool = False
    """Whether the compiled step has run."""
    computed: int = 0
    """Tokens of prompts that went through the model: shared and held ones are not computed again."""

    def __init__(
        self,
        params: Tree,
        config: Any,
        *,
        slots: int,
        capacity: int,
        allocated: int | None = None,
        settings: BatchSettings | None = None,
        **options: Unpack[ForwardKwargs],
    ) -> None:
        self._params, self._config, self._options = params, config, options
        self._text_params, self._text = decoding_model(params, config)
        self._settings = settings = settings or BatchSettings()
        memories, kv_dtype = settings.memories, settings.kv_dtype
        dtype, self._device = activations(params, settings.dtype)
        read = config if memories is None else self._text
        self._empty = empty_caches(params, read, capacity, dtype=dtype, kv_dtype=kv_dtype)
        begin = slots if allocated is None else allocated
        state = empty_state(self._text, begin, capacity, dtype=dtype, device=self._device, kv_dtype=kv_dtype)
        self._state = state if memories is None else replace(state, cache=memories.with_memory(state.cache))
        self._slots = self._idle = slots  # _idle: slot-steps without a request
        self._places = list[Answer | None]([None] * begin)
        self._admission: _Admission | None = None
        self._cancelled = set[int]()

    @property
    def cache(self) -> Cache:
        """The cache of all slots, which the next step uses up."""
        return self._state.cache

    @property
    def allocated(self) -> int:
        """The slots that have memory now."""
        return len(self._places)

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self._admission is not None or self._active() > 0

    @property
    def admitting(self) -> bool:
        """Whether prompts of requests are on their way."""
        return self._admission is not None

    def room(self) -> int:
        """The number of requests to take now: 0 while prompts are computed, and while free slots wait for others."""
        free = self._slots - self._active()
        return 0 if self._admission is not None or 4 * (self._idle + free) < self._slots else free

    def take(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Begins requests, at most `room()` of them; each with the number that its events have as `row`."""
        self._idle = 0
        if not requests:
            return
        settings = self._settings
        answers = [Answer(row, request, settings.tokenizer, settings.skip_special_tokens) for row, request in requests]
        self._grow(self._active() + len(answers))
        free = [row for row, answer in enumerate(self._places) if answer is None]
        if settings.memories is None:
            chunks = self._chunks([answer.request for answer in answers])
        else:
            chunks = settings.memories.encoded([answer.request for answer in answers], **self._options)
        self._admission = _Admission(free[: len(answers)], answers, chunks)

    def _chunks(self, requests: Sequence[Request]) -> Generator[None, None, Prefilled]:
        """The prompts' cache in the order of the requests: new ones, then those that go on from what they hold."""
        form: dict[str, Any] = {"empty": self._empty, "chunk": self._settings.chunk, **self._options}
        form["record_routing"] = any(request.record_routing for request in requests)
        new = [row for row, request in enumerate(requests) if request.held is None]
        fresh = [requests[row] for row in new]
        going = [(row, request, request.held) for row, request in enumerate(requests) if request.held is not None]
        found = None
        if new:
            found = yield from prefilled(
                self._params,
                self._config,
                [request.prompt for request in fresh],
                list(map(length_of, fresh)),
                images=[request.images for request in fresh],
                **form,
            )
        if not going:
            assert found is not None  # `take` has requests
            return found
        further = yield from continued(
            self._params,
            self._config,
            [request.prompt for _, request, _ in going],
            [length_of(request) for _, request, _ in going],
            [held for _, _, held in going],
            **form,
        )
        if found is None:
            return further
        cache = fnmodels.cache.insert_(self._empty(len(requests)), new, found.cache)
        cache = fnmodels.cache.insert_(cache, [row for row, _, _ in going], further.cache)
        logits = {new[row]: value for row, value in found.logits.items()}
        order = [*new, *(row for row, _, _ in going)]
        routing = dict(zip(order, (*found.routing, *further.routing), strict=False))  # none, or one for each
        of_all = tuple(routing[row] for row in range(len(requests))) if routing else ()
        return Prefilled(cache, logits, found.computed + further.computed, of_all)

    def cancel(self, rows: set[int]) -> None:
        """Ends the requests of these numbers, which have no further events; those not under way are ignored."""
        if self._admission is not None:
            self._cancelled |= rows & {answer.row for answer in self._admission.answers}
        self._free([i for i, answer in enumerate(self._places) if answer is not None and answer.row in rows])

    def advance(self, *, shrink: bool = False) -> list[Event]:
        """A chunk of the prompts that are on their way, and a token of each active slot.

        shrink: whether idle slots are left out where a quarter of them is idle, until `take` needs them: a step takes
        less time for fewer rows.
        """
        self.prefill()
        return self.draw(shrink=shrink)

    def prefill(self) -> None:
        """A chunk of the prompts that are on their way. Where it raises, their requests are dropped, others go on."""
        admission = self._admission
        if admission is None:
            return
        try:
            next(admission.chunks)
        except StopIteration as done:
            self._admitted(admission, done.value)
        except BaseException:
            self._admission, self._cancelled = None, set()
            raise

    def draw(self, *, shrink: bool = False) -> list[Event]:
        """A token of each active slot; shrink: see `advance`."""
        active = [(row, answer) for row, answer in enumerate(self._places) if answer is not None]
        if not active:
            self._idle = self._slots
            return []
        records = [answer.request.record_routing for _, answer in active]
        eager = self.step is None or all(records)
        if shrink and self._admission is None and eager and 4 * len(active) <= 3 * len(self._places):
            self._state = take_slots(self._state, [row for row, _ in active])
            self._places = [answer for _, answer in active]
            active = list(enumerate(answer for _, answer in active))
        state = self._state = serve_step(
            self._text_params,
            self._state,
            config=self._text,
            logits_fn=self._hook(),
            inplace=True,
            step=self.step,
            record_routing=any(records),
            **self._options,
        )
        self.stepped |= self.step is not None and not any(records)
        if state.routing is not None:
            chosen = state.routing.cpu()
            for row, answer in active:
                answer.note_routing([chosen[row, None]] if chosen[row, 0, 0] != NONE else [])
        self._idle += self._slots - len(active)
        tokens, logp, kept = state.last.tolist(), state.logp.tolist(), state.logp_kept.tolist()
        events = [answer.append(tokens[row], logp[row], kept[row]) for row, answer in active]
        events = [
            replace(event, held=self._left(row, answer)) if event.reason is not None and answer.request.keep else event
            for (row, answer), event in zip(active, events, strict=True)
        ]
        self._free([row for (row, _), event in zip(active, events, strict=True) if event.reason is not None])
        return events

    def _left(self, row: int, answer: Answer) -> Held:
        return Held((*answer.request.prompt, *answer.tokens[:-1]), fnmodels.take(self._state.cache, [row]))

    def _grow(self, slots: int) -> None:
        """Makes room for so many requests where slots were left out, and for twice as many as there were: a copy."""
        if slots <= len(self._places):
            return
        slots = max(slots, min(2 * len(self._places), self._slots))
        added = slots - len(self._places)
        rows = [*range(len(self._places)), *[0] * added]
        state = take_slots(self._state, rows)
        idle = torch.arange(len(self._places), slots, device=self._device)
        ready = state.ready
        if ready is not None:
            ready = replace(ready, slots=ready.slots.index_fill(0, idle, False))
        self._state = replace(state, active=state.active.index_fill(0, idle, False), ready=ready)
        self._places += [None] * added

    def _active(self) -> int:
        return sum(answer is not None for answer in self._places)

    def _free(self, rows: list[int]) -> None:
        if not rows:
            return
        for row in rows:
            self._places[row] = None
        index = torch.tensor(rows, device=self._device)
        self._state = replace(self._state, active=self._state.active.index_fill(0, index, False))

    def _admitted(self, admission: _Admission, found: Prefilled) -> None:
        self._admission, cancelled, self._cancelled = None, self._cancelled, set()
        self.computed += found.computed
        requests, places = [answer.request for answer in admission.answers], list(self._places)
        for row, answer in zip(admission.rows, admission.answers, strict=True):
            places[row] = answer
        for answer, pieces in zip(admission.answers, found.routing, strict=False):  # none, or one for each
            answer.note_routing(pieces)
        # slots without a request take any settings, so that equal fields stay numbers
        samplings = [requests[0].sampling if one is None else one.request.sampling for one in places]
        self._state = admit(
            self._state,
            admission.rows,
            found.cache,
            [request.prompt for request in requests],
            seeds=[request.seed for request in requests],
            ids=[request.draw for request in requests],
            lengths=list(map(length_of, requests)),
            sampling=stack_samplings(samplings, device=self._device),
            vocab=self._text.vocab_size,
            logits=found.logits,
            inplace=True,
        )
        self._places = places
        self.cancel(cancelled)

    def _hook(self) -> Callable[[Tensor], Tensor] | None:
        """The edits of logits of the run and of single requests, which keep the likeliest tokens of those that ask."""
        logits_fn = self._settings.logits_fn
        if logits_fn is None and not any(one is not None and one.edits for one in self._places):
            return None
        places = self._places

        def edited(logits: Tensor) -> Tensor:
            own = [(row, one) for row, one in enumerate(places) if one is not None and one.edits]
            for row, one in own:
                one.note_likeliest(logits[row])
            if logits_fn is not None:
                logits = logits_fn(logits, [[] if one is None else list(one.tokens) for one in places])
            for row, one in own:
                if one.request.logits_fn is not None:
                    new = one.request.logits_fn(logits[row], list(one.tokens))
                    logits = logits.index_copy(0, torch.tensor([row], device=logits.device), new[None])
            return logits

        return edited

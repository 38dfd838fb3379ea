"""Generation of many continuations: a queue of requests over slots, `generate` and `stream`."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels.cache import DecodingStep
from fnmodels.image_text import Image
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.invariant.attention import TILE
from fnmodels.options import ForwardKwargs, is_invariant
from fnmodels.tree import Tree

from .checks import check_request, learned_positions
from .compile_choice import choose, roomy, steps_of
from .decoder_traits import Decodes
from .pairs import begun, decoding_model, sources_of, with_sources
from .prompts import Prefilled, activations, empty_caches, prefilled
from .requests import Answer, Event, Generations, Request, capacity_of, collect, requests_of
from .sampling import Sampling, stack_samplings
from .serve import ServeState, admit, empty_state, serve_step, take_slots

SLOTS = 32
Hook = Callable[[Tensor, list[list[int]]], Tensor]
_HOW = ("auto", "none", "step", "graph")


class ServeKwargs(ForwardKwargs, total=False):
    """Keywords of `serve` that `generate` and `stream` pass on."""

    tokenizer: Decodes | None
    logits_fn: Hook | None
    chunk: int
    dtype: torch.dtype | None
    kv_dtype: torch.dtype | None
    compile: str | DecodingStep


@dataclass
class _Admission:
    """Requests whose prompts are on their way into the cache."""

    rows: list[int]
    answers: list[Answer]
    chunks: Generator[None, None, Prefilled]


def serve(
    params: Tree,
    config: DecoderConfig,
    requests: Iterable[Request],
    *,
    slots: int,
    capacity: int,
    tokenizer: Decodes | None = None,
    logits_fn: Hook | None = None,
    chunk: int = 512,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    compile: str | DecodingStep = "auto",
    skip_special_tokens: bool = True,
    **options: Unpack[ForwardKwargs],
) -> Generator[Event, None, str]:
    """Continuous batching: yields tokens as they are drawn, and fills a slot with the next request when one is free.

    requests: taken one after the other as slots become free. slots: requests that run at once; when there are no
    more requests, steps that are not compiled leave out idle slots each time a quarter of them is idle. A prompt
    costs about a step, alone or with others, so that free slots wait for more until a quarter of a step is left
    idle. capacity: the most tokens of a request, prompt and answer. chunk: tokens of prompts computed between two
    steps of the others. dtype: of the activations; None: that of the parameters. kv_dtype: torch.int8 for a cache
    of half the size, see `init_cache`. compile: "step" for compiled steps, by code in a file that later processes
    load (`fnmodels.cache.saved.SavedStep`), or where no file can hold it by `fnmodels.compiled_step`; a result of that
    function, made with the same config and options; "graph" for steps by `fnmodels.cache.captured_step`, on CUDA;
    "none"; or "auto": "step" where that saves more time than it takes, see `explain_compile`, and never for an
    iterator of requests or images. logits_fn: see `generate`.
    skip_special_tokens: whether texts, in which stop texts are found, are without special tokens. options: as for
    `fnmodels.forward`. ValueError for options that no compiled step has, and for a request that cannot be answered to
    its end: before the first token where requests are a sequence, else when all requests before it are answered. The
    generator's value is how steps ran: "none", "step" or "graph".
    """
    if not callable(compile) and compile not in _HOW:
        raise ValueError(
            f'compile is {compile!r}; it must be "auto", "none", "step", "graph" or a result of fnmodels.compiled_step '
            "or fnmodels.cache.captured_step."
        )
    if callable(compile) and (is_invariant(options.get("kernel")) or options.get("layer_fn") is not None):
        raise ValueError(
            'compile is a compiled step, which has no layer_fn and not kernel="invariant": leave compile out, or these.'
        )
    sources = sources_of(params, config, requests, capacity, {"kv_dtype": kv_dtype, "compile": compile})
    text_params, text = decoding_model(params, config)
    read = config if sources is None else text
    check = functools.partial(
        check_request, config=read, tokenizer=tokenizer, capacity=capacity, learned=learned_positions(read)
    )
    known = isinstance(requests, Sequence)
    for row, request in enumerate(requests if known else ()):
        check(row, request)
    dtype, device = activations(params, dtype)
    empty = empty_caches(params, read, capacity, dtype=dtype, kv_dtype=kv_dtype)
    state = empty_state(text, slots, capacity, dtype=dtype, device=device, kv_dtype=kv_dtype)
    if sources is not None:
        state, compile = replace(state, cache=sources.with_memory(state.cache)), "none"
    counted = requests if isinstance(requests, Sequence) and not any(r.images for r in requests) else ()
    choice = choose(compile, text_params, text, state.cache, steps_of(counted, slots), options)
    step, places = choice.step, list[Answer | None]([None] * slots)
    mistake: Exception | None = None  # of a later request, or of the iterator: raised when no answer is under way
    queue, admission, drained, idle = enumerate(requests), None, False, slots  # idle: slot-steps without a request
    while True:
        free = [row for row, answer in enumerate(places) if answer is None]
        if admission is None and not drained and free and 4 * (idle + len(free)) >= slots:
            answers = []
            try:
                for row, request in islice(queue, len(free)):
                    if not known:
                        check(row, request)
                    answers.append(Answer(row, request, tokenizer, skip_special_tokens))
            except Exception as error:
                mistake = error
            drained, idle = len(answers) < len(free), 0
            if answers:
                prompts, lengths = [answer.request.prompt for answer in answers], list(map(_length, answers))
                images = [answer.request.images for answer in answers]
                if sources is None:
                    how: dict[str, Any] = {"empty": empty, "chunk": chunk, "images": images}
                    chunks = prefilled(params, config, prompts, lengths, **how, **options)
                else:
                    chunks = sources.encoded([answer.request for answer in answers], **options)
                admission = _Admission(free[: len(answers)], answers, chunks)
        if admission is not None:
            try:
                next(admission.chunks)
            except StopIteration as done:
                state = _admitted(state, places, admission, done.value, text)
                admission = None
        active = [(row, answer) for row, answer in enumerate(places) if answer is not None]
        if not active:
            if admission is None and drained:
                if mistake is not None:
                    raise mistake
                return choice.how
            idle = slots
            continue
        if drained and admission is None and step is None and 4 * len(active) <= 3 * len(places):
            state = take_slots(state, [row for row, _ in active])
            places = [answer for _, answer in active]
            active = list(enumerate(answer for _, answer in active))
        hook = None if logits_fn is None else _hook(logits_fn, places)
        state = serve_step(text_params, state, config=text, logits_fn=hook, inplace=True, step=step, **options)
        idle += len(places) - len(active)
        tokens, logp, kept = state.last.tolist(), state.logp.tolist(), state.logp_kept.tolist()
        ended = []
        for row, answer in active:
            event = answer.append(tokens[row], logp[row], kept[row])
            if event.reason is not None:
                places[row] = None
                ended.append(row)
            yield event
        if ended:
            state = replace(state, active=state.active.index_fill(0, torch.tensor(ended, device=device), False))


def _length(answer: Answer) -> int:
    """The length that length-dependent rotary scalings read: a function of the request alone, not of its neighbours."""
    return len(answer.request.prompt) + answer.request.max_new


def _admitted(
    state: ServeState, places: list[Answer | None], admission: _Admission, found: Prefilled, config: DecoderConfig
) -> ServeState:
    requests = [answer.request for answer in admission.answers]
    for row, answer in zip(admission.rows, admission.answers, strict=True):
        places[row] = answer
    # slots without a request take any settings, so that equal fields stay numbers
    samplings = [requests[0].sampling if answer is None else answer.request.sampling for answer in places]
    return admit(
        state,
        admission.rows,
        found.cache,
        [request.prompt for request in requests],
        seeds=[request.seed for request in requests],
        ids=[request.draw for request in requests],
        lengths=[_length(answer) for answer in admission.answers],
        sampling=stack_samplings(samplings, device=state.last.device),
        vocab=config.vocab_size,
        logits=found.logits,
        inplace=True,
    )


def _hook(logits_fn: Hook, places: list[Answer | None]) -> Callable[[Tensor], Tensor]:
    tokens = [[] if answer is None else list(answer.tokens) for answer in places]
    return lambda logits: logits_fn(logits, tokens)


def generate(
    params: Tree,
    config: DecoderConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int | Sequence[int],
    sampling: Sampling | None = None,
    seeds: int | Sequence[int] = 0,
    stop_ids: Sequence[int] = (),
    stop_texts: Sequence[str] = (),
    slots: int | None = None,
    images: Sequence[Sequence[Image]] | None = None,
    beginnings: Sequence[Sequence[int]] | None = None,
    **options: Unpack[ServeKwargs],
) -> Generations:
    """A continuation of each prompt (token ids), with a cache and continuous batching.

    Of a model of an encoder and a decoder the prompts are what the encoder reads (Whisper's are frames [S, 5 bins] of
    `fnmodels.inputs.frame_rows`), and the answer is what the decoder writes.

    max_new: tokens generated at most, one number or one per prompt. sampling: by default temperature 1; its fields are
        numbers or tensors [prompts].
    seeds: one for all prompts or one per prompt. Equal seeds draw with different noise, by the number of earlier
        prompts with this seed; a prompt with a seed of its own gets the same draws in any batch and order.
    stop_ids: tokens after which an answer ends. stop_texts: texts that end it, found in the decoded text.
    slots: answers that are generated at once; by default all, at most 32.
    images: for each prompt its images, floats [C, H, W] as the tower reads them, in the order of the prompt's image
        tokens, one token for each feature; params and config are those of the whole model.
    beginnings: for each prompt the token ids with which the decoder begins, of a model with an encoder; by default
        decoder_start_token_id and, where config.json has one, forced_bos_token_id. No answer repeats them.
    options: tokenizer, one of the tokenizers library, for texts and stop_texts; logits_fn, (logits [B, V], tokens) ->
        logits edited before the draw, such as -inf for what a grammar forbids, where tokens are the ids of each slot's
        answer so far, empty for a slot without a request; chunk, dtype, kv_dtype and compile, see `serve`; those of
        `fnmodels.forward`.

    Equal prompts, and a beginning that prompts share, are computed once. The result says how steps ran (`compile`).
    """
    own = begun(config, prompts, beginnings)
    made = with_sources(config, requests_of(own, max_new, sampling, seeds, stop_ids, stop_texts, images), prompts)
    return collect(_served(params, config, made, slots, **options), len(made))


def stream(
    params: Tree,
    config: DecoderConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int | Sequence[int],
    sampling: Sampling | None = None,
    seeds: int | Sequence[int] = 0,
    stop_ids: Sequence[int] = (),
    stop_texts: Sequence[str] = (),
    slots: int | None = None,
    images: Sequence[Sequence[Image]] | None = None,
    beginnings: Sequence[Sequence[int]] | None = None,
    **options: Unpack[ServeKwargs],
) -> Iterator[tuple[int, int, float]]:
    """(row of the prompt, token, logp) of each token as it is drawn; arguments as for `generate`."""
    own = begun(config, prompts, beginnings)
    made = with_sources(config, requests_of(own, max_new, sampling, seeds, stop_ids, stop_texts, images), prompts)
    return ((event.row, event.token, event.logp) for event in _served(params, config, made, slots, **options))


def _served(
    params: Tree, config: DecoderConfig, made: list[Request], slots: int | None, **options: Unpack[ServeKwargs]
) -> Generator[Event, None, str]:
    slots = max(1, min(len(made), SLOTS)) if slots is None else slots
    capacity = capacity_of(made)
    if is_invariant(options.get("kernel")):  # whose tiles are full then, and read where they are
        capacity = -(-capacity // TILE) * TILE
    elif options.get("compile", "auto") in ("auto", "step"):
        capacity = roomy(capacity)
    return serve(params, config, made, slots=slots, capacity=capacity, **options)

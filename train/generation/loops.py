"""Generation of many continuations: a queue of requests over slots, `generate` and `stream`."""

import functools
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Unpack

import torch

from fnmodels.cache import DecodingStep
from fnmodels.image_text import Image
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import stack_configs
from fnmodels.ops.invariant.attention import TILE
from fnmodels.ops.torch_internals import transformed
from fnmodels.options import ForwardKwargs, is_invariant
from fnmodels.tree import Tree

from .batching import BatchSettings, ContinuousBatch, Hook
from .checks import check_request, learned_positions
from .compile_choice import choose, roomy, steps_of
from .decoder_traits import Decodes
from .memories import begun, decoding_model, memories_of, with_sources
from .requests import Event, Generations, Request, capacity_of, collect, requests_of
from .sampling import Sampling

SLOTS = 32
_HOW = ("auto", "none", "step", "graph")


class ServeKwargs(ForwardKwargs, total=False):
    """Keywords of `serve` that `generate` and `stream` pass on."""

    tokenizer: Decodes | None
    """A tokenizer of the tokenizers library, for texts and stop texts; None: neither."""
    logits_fn: Hook | None
    """(logits [B, V], tokens) -> logits edited before the draw, such as -inf for what a grammar forbids; tokens are
    the ids of each slot's answer so far, empty for a slot without a request. None: no edit."""
    chunk: int
    """Tokens of prompts computed between two steps of the others."""
    dtype: torch.dtype | None
    """The dtype of the activations; None: that of the parameters."""
    kv_dtype: torch.dtype | None
    """torch.int8 for a cache of half the size, see `fnmodels.init_cache`; None: `dtype`."""
    compile: str | DecodingStep
    """The way in which steps run: "none", "step", "graph" or "auto", see `serve`."""


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
    """Continuous batching: yields tokens as they are drawn, and fills a slot with the next request when it is free.

    When there are no more requests, steps that are not compiled leave out idle slots each time a quarter of them is
    idle. A prompt costs about a step, alone or with others, so that free slots wait for more until a quarter of a step
    is left idle.

    Args:
        params: The parameters of the model.
        config: The model's config.
        requests: The requests, taken one after the other as slots become free.
        slots: Requests that run at once.
        capacity: The most tokens of a request, prompt and answer.
        tokenizer: Of the tokenizers library, for texts and stop texts; None: neither.
        logits_fn: (logits [B, V], tokens) -> logits edited before the draw, see `generate`.
        chunk: Tokens of prompts computed between two steps of the others.
        dtype: Of the activations; None: that of the parameters.
        kv_dtype: torch.int8 for a cache of half the size, see `fnmodels.init_cache`; None: `dtype`.
        compile: "step" for compiled steps, by code in a file that later processes load
            (`fnmodels.cache.saved.SavedStep`), or where no file can hold it by `fnmodels.compiled_step`; "graph" for
            steps by `fnmodels.cache.captured_step`, on CUDA; "none"; "auto": "step" where that saves more time than it
            takes, see `explain_compile`, and never for an iterator of requests or images. Or a result of
            `fnmodels.compiled_step`, made with the same config and options.
        skip_special_tokens: Whether texts, in which stop texts are found, are without special tokens.
        **options: Keywords of `fnmodels.forward`.

    Yields:
        One `Event` for each token: row of the request, token, logp, text and, at its end, the reason. The generator's
            value is how steps ran: "none", "step" or "graph".

    Raises:
        ValueError: `compile` does not fit the other options, or a request cannot be answered to its end: before the
            first token where requests are a sequence, else when all requests before it are answered.
    """
    if transformed():
        raise ValueError(
            "Generation reads each token on the host, so it is not for vmap, grad and jvp of torch.func: take "
            "fnmodels.prefill and decode, which go through them, or call it for each member of an ensemble."
        )
    if not callable(compile) and compile not in _HOW:
        raise ValueError(
            f'compile is {compile!r}; it must be "auto", "none", "step", "graph" or a result of fnmodels.compiled_step '
            "or fnmodels.cache.captured_step."
        )
    if callable(compile) and (is_invariant(options.get("kernel")) or options.get("layer_fn") is not None):
        raise ValueError(
            'compile is a compiled step, which has no layer_fn and not kernel="invariant": leave compile out, or these.'
        )
    memories = memories_of(params, config, requests, capacity, {"kv_dtype": kv_dtype, "compile": compile})
    text_params, text = decoding_model(params, config)
    read = text if stack_configs(config) else config
    check = functools.partial(
        check_request,
        config=read,
        tokenizer=tokenizer,
        capacity=capacity,
        learned=learned_positions(read),
        memories=memories is not None,
    )
    known = isinstance(requests, Sequence)
    for row, request in enumerate(requests if known else ()):
        check(row, request)
    settings = BatchSettings(tokenizer, skip_special_tokens, logits_fn, chunk, dtype, kv_dtype, memories)
    batch = ContinuousBatch(params, config, slots=slots, capacity=capacity, settings=settings, **options)
    counted = requests if isinstance(requests, Sequence) and not any(r.images for r in requests) else ()
    records = [request.record_routing for request in counted]  # whose steps are eager, see `serve_step`
    eager = memories is not None or (any(records) if compile == "auto" else bool(records) and all(records))
    how = "none" if eager else compile
    choice = choose(how, text_params, text, batch.cache, steps_of(counted, slots), options)
    batch.step = choice.step
    mistake: Exception | None = None  # of a later request, or of the iterator: raised when no answer is under way
    queue, drained = enumerate(requests), False
    while True:
        if not drained and (room := batch.room()):
            taken: list[tuple[int, Request]] = []
            try:
                for row, request in islice(queue, room):
                    if not known:
                        check(row, request)
                    taken.append((row, request))
            except Exception as error:
                mistake = error
            drained = len(taken) < room
            batch.take(taken)
        if drained and not batch.busy:
            if mistake is not None:
                raise mistake
            return choice.how if batch.stepped or choice.step is None else "none"
        yield from batch.advance(shrink=drained)


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
    record_routing: bool = False,
    **options: Unpack[ServeKwargs],
) -> Generations:
    """Generates a continuation of each prompt, with a cache and continuous batching.

    Of a model of an encoder and a decoder the prompts are what the encoder reads (Whisper's are frames [S, 5 bins] of
    `fnmodels.inputs.frame_rows`, Moonshine's samples of `sample_rows`), and the answer is what the decoder writes.
    Equal prompts, and a beginning that prompts share, are computed once.

    Args:
        params: The parameters of the model.
        config: The model's config.
        prompts: Token ids of each prompt.
        max_new: Tokens generated at most, one number or one per prompt.
        sampling: How tokens are drawn; its fields are numbers or tensors [prompts]. None: temperature 1.
        seeds: One for all prompts or one per prompt. Equal seeds draw with different noise, by the number of earlier
            prompts with this seed; a prompt with a seed of its own gets the same draws in any batch and order.
        stop_ids: Tokens after which an answer ends.
        stop_texts: Texts that end an answer, found in the decoded text; they need a tokenizer.
        slots: Answers that are generated at once; None: all, at most 32.
        images: For each prompt its images, floats [C, H, W] as the tower reads them, in the order of the prompt's image
            tokens, one token for each feature; params and config are those of the full model. None: no images.
        beginnings: For each prompt the token ids with which the decoder begins, of a model with an encoder. None:
            decoder_start_token_id and, where config.json has one, forced_bos_token_id. No answer repeats them.
        record_routing: Whether the experts of every token are returned, of a decoder with experts; such steps are
            eager.
        **options: tokenizer, one of the tokenizers library, for texts and stop_texts; logits_fn, (logits [B, V],
            tokens) -> logits edited before the draw, such as -inf for what a grammar forbids. Its tokens are the ids of
            each slot's answer so far, empty for a slot without a request. Also chunk, dtype, kv_dtype and compile, see
            `serve`, and keywords of `fnmodels.forward`.

    Returns:
        Tokens, log-probabilities, reasons and texts in the order of the prompts, and how steps ran (`compile`).

    Raises:
        ValueError: A prompt is empty or has no room for its answer, a number is out of range, or options do not fit
            each other.
    """
    own = begun(config, prompts, beginnings)
    made = with_sources(config, requests_of(own, max_new, sampling, seeds, stop_ids, stop_texts, images), prompts)
    made = [replace(request, record_routing=True) for request in made] if record_routing else made
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
    """Generates as `generate` does, and yields each token as it is drawn.

    Args:
        params: The parameters of the model.
        config: The model's config.
        prompts: Token ids of each prompt.
        max_new: Tokens generated at most, one number or one per prompt.
        sampling: How tokens are drawn; None: temperature 1.
        seeds: One for all prompts or one per prompt, as for `generate`.
        stop_ids: Tokens after which an answer ends.
        stop_texts: Texts that end an answer; they need a tokenizer.
        slots: Answers that are generated at once; None: all, at most 32.
        images: For each prompt its images, floats [C, H, W]; None: no images.
        beginnings: For each prompt the token ids with which the decoder begins, of a model with an encoder.
        **options: As for `generate`: tokenizer, logits_fn, chunk, dtype, kv_dtype, compile, and keywords of
            `fnmodels.forward`.

    Returns:
        An iterator of (row of the prompt, token, logp in nats).

    Raises:
        ValueError: A prompt is empty or has no room for its answer, a number is out of range, or options do not fit
            each other.
    """
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

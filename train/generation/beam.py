"""Beam search: the most likely continuations, by keeping the best few of every length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels.image_text import Image
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.dtypes import upcast
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .checks import check_request, learned_positions
from .images import text_model
from .prompts import activations, empty_caches, prefilled, run_all
from .requests import Request


@dataclass(frozen=True)
class Hypothesis:
    """tokens: of the answer, its stop token included. logp: the sum of theirs, in nats. score: see `beam_search`."""

    tokens: list[int]
    logp: float
    score: float


@torch.no_grad()
def beam_search(
    params: Tree,
    config: DecoderConfig,
    prompt: Sequence[int],
    *,
    beams: int,
    max_new: int,
    stop_ids: Sequence[int] = (),
    length_penalty: float = 1.0,
    chunk: int = 512,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    images: Sequence[Image] = (),
    **options: Unpack[ForwardKwargs],
) -> list[Hypothesis]:
    """Beam search: the likeliest answers to a prompt.

    At every length the `beams` likeliest unfinished answers are kept. The search ends early when no unfinished answer,
    at its present score, is above the worst of `beams` finished ones.

    Args:
        params: The parameters of the model.
        config: The model's config.
        prompt: Token ids, at least one.
        beams: Answers at most.
        max_new: Tokens of an answer at most.
        stop_ids: Tokens after which an answer ends.
        length_penalty: An answer's score is its logp / length ** length_penalty.
        chunk: Tokens of the prompt computed at a time.
        dtype: Of the activations; None: that of the parameters.
        kv_dtype: Of the cache; torch.int8 for half the size. None: `dtype`.
        images: Of the prompt, floats [C, H, W], see `Request`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        At most `beams` answers with tokens, logp in nats and score, the best first.

    Raises:
        ValueError: A number is not above 0, the prompt is empty, or the answer has no room in the model's positions.
    """
    if beams < 1 or max_new < 1 or not len(prompt):
        raise ValueError(
            f"beams ({beams}), max_new ({max_new}) and the prompt's length ({len(prompt)}) must be above 0."
        )
    text_params, text = text_model(params, config)
    request = Request(prompt, max_new, images=images)
    check_request(0, request, config, learned=learned_positions(config))
    prompt = [int(token) for token in prompt]
    dtype, device = activations(params, dtype)
    capacity = len(prompt) + max_new
    empty = empty_caches(params, config, capacity, dtype=dtype, kv_dtype=kv_dtype)
    own = [request.images]
    chunks = prefilled(params, config, [prompt], [capacity], empty=empty, chunk=chunk, images=own, **options)
    cache = run_all(chunks).with_text_last()
    tokens, logp = [list(prompt)], torch.zeros(1, device=device)
    finished: list[Hypothesis] = []
    for length in range(1, max_new + 1):
        last = torch.tensor([[row[-1]] for row in tokens], device=device)
        step = fnmodels.prepare_step(text, last, cache)
        logits, cache = fnmodels.decode_(text_params, *step, cache, config=text, **options)
        total = logp[:, None] + torch.log_softmax(upcast(logits[:, 0]), -1)
        parents, ids, values = _best(total, beams + beams * len(stop_ids))
        running: list[tuple[int, int, float]] = []
        for parent, token, value in zip(parents, ids, values, strict=True):
            if token in stop_ids:
                found = [*tokens[parent][len(prompt) :], token]
                finished.append(Hypothesis(found, value, value / length**length_penalty))
            elif len(running) < beams:
                running.append((parent, token, value))
        finished = sorted(finished, key=lambda answer: -answer.score)[:beams]
        tokens = [[*tokens[parent], token] for parent, token, _ in running]
        logp = total.new_tensor([value for *_, value in running])
        done = len(finished) == beams and (not running or running[0][2] / length**length_penalty <= finished[-1].score)
        if done or not running:
            return finished
        if length < max_new:
            cache = fnmodels.take(cache, torch.tensor([parent for parent, *_ in running], device=device))
    cut = [
        Hypothesis(row[len(prompt) :], value, value / max_new**length_penalty)
        for row, value in zip(tokens, logp.tolist(), strict=True)
    ]
    return sorted([*finished, *cut], key=lambda answer: -answer.score)[:beams]


def _best(total: Tensor, count: int) -> tuple[list[int], list[int], list[float]]:
    """(rows, tokens, values) of the `count` highest of total [beams, V]."""
    values, places = total.flatten().topk(min(count, total.numel()))
    width = total.shape[-1]
    return (places // width).tolist(), (places % width).tolist(), values.tolist()

"""Checks of requests before their first token, so that a mistake in one does not cost the answers to others."""

from collections.abc import Sequence
from operator import index
from typing import Any, SupportsIndex

import torch

import fnmodels
from fnmodels.models.common.family import field_of
from fnmodels.models.common.registry import family_of, text_config, token_ids
from fnmodels.models.common.spec import Leaf
from fnmodels.ops.position_range import check_count, position_range
from params.axes import POSITION

from .decoder_traits import Decodes
from .images import check_images, check_memory_images, positions_less
from .requests import Request
from .routing import check_records
from .sampling import check_sampling
from .stop import StopText


def check_request(
    row: int,
    request: Request,
    config: Any,
    *,
    tokenizer: Decodes | None = None,
    capacity: int | None = None,
    learned: int | None = None,
    memories: bool = False,
) -> None:
    """ValueError that names the request where it cannot be answered to its end; `PositionWarning` where it may go past
    the range of the model's rotary tables.

    config: of the model, the whole one where it reads images. capacity: the tokens that its row of the cache has room
    for. learned: of `learned_positions`. memories: whether the run keeps what layers attend to, see `memories_of`.
    """
    check_head(config)
    size = len(request.prompt)
    if not size:
        raise ValueError(f"The prompt of request {row} is empty: there must be at least one token to continue.")
    if request.max_new < 1:
        raise ValueError(f"max_new of request {row} is {request.max_new}; it must be at least 1.")
    if request.stop_texts and tokenizer is None:
        raise ValueError("stop_texts need a tokenizer, for they are found in the text: pass tokenizer=.")
    StopText(request.stop_texts)
    # first: image tokens may be no ids of the vocabulary
    beside = hasattr(family_of(config), "image_memory")
    if beside and (memories or not request.images):
        check_memory_images(row, request.prompt, request.images, config)
    else:
        check_images(row, request.prompt, request.images, config)
    _check_ids(row, request.prompt, token_ids(config.text) if beside else text_config(config).vocab_size)
    check_sampling(request.sampling)
    _check_turns(row, request, config, memories)
    if request.record_routing:
        check_records(row, text_config(config), paired=request.source is not None)
    if capacity is not None and size + request.max_new > capacity:
        raise ValueError(
            f"Request {row} has {size} tokens and max_new {request.max_new}; the capacity is {capacity} tokens."
        )
    if learned is not None and size + request.max_new - 1 > learned:  # the last token of an answer is not read
        most = learned + 1 - size
        raise ValueError(
            f"Request {row} has {size} tokens and max_new {request.max_new}, but the model has learned "
            f"{learned} positions: "
            + (f"max_new is at most {most} there." if most > 0 else f"a prompt has at most {learned} tokens.")
        )
    text = text_config(config)
    known, reach = position_range(text), size + request.max_new - 1 - positions_less(request.images, config)
    if known is not None and reach > known:
        one = torch.zeros(1, 1, dtype=torch.int64)
        check_count(text, fnmodels.prepare(text, one, length=1)[2], reach)


def check_head(config: Any) -> None:
    """ValueError for a model without a head for tokens, whose hidden states would be read as logits."""
    if (head := field_of(text_config(config), "head")) not in ("lm", "masked_lm"):
        raise ValueError(
            f"Tokens are drawn from logits, but the model's head is {head!r}: a checkpoint of a class such as "
            "LlamaForCausalLM has one, and that of LlamaModel has none."
        )


def _check_turns(row: int, request: Request, config: Any, memories: bool) -> None:
    """ValueError where a conversation cannot go on from the cache of its earlier turns."""
    if not request.keep and request.held is None:
        return
    beside = memories or request.images or request.source is not None
    if beside or hasattr(family_of(config), "prompt_masks"):
        raise ValueError(
            f"Request {row} keeps its cache or goes on from one, which is for runs of prompts of text alone that a "
            "decoder reads from left to right: leave keep and held out."
        )
    held = () if request.held is None else request.held.tokens
    if len(held) >= len(request.prompt) or tuple(request.prompt[: len(held)]) != held:
        raise ValueError(
            f"Request {row} holds {len(held)} tokens of earlier turns; its prompt must begin with exactly these and "
            "have at least one more."
        )
    if request.length is not None and request.length < len(request.prompt) + request.max_new:
        raise ValueError(
            f"The length of request {row} is {request.length}; it must be at least that of its prompt and max_new, "
            f"{len(request.prompt) + request.max_new}."
        )


def learned_positions(config: Any) -> int | None:
    """The number of positions that the model has a learned vector for; None where it computes them from any number."""
    text = text_config(config)
    leaves = [leaf for leaf in family_of(text).spec(text).values() if isinstance(leaf, Leaf)]
    sizes = [leaf.shape[leaf.axes.index(POSITION)] for leaf in leaves if POSITION in leaf.axes]
    return min(sizes, default=None)


def _check_ids(row: int, prompt: Sequence[int], vocab: int) -> None:
    place = next((place for place, token in enumerate(prompt) if not _is_id(token, vocab)), None)
    if place is not None:
        raise ValueError(
            f"Token {place} of the prompt of request {row} is {prompt[place]!r}; "
            f"token ids are integers from 0 to {vocab - 1}."
        )


def _is_id(token: SupportsIndex, vocab: int) -> bool:
    try:
        is_bool = isinstance(token, bool) or getattr(token, "dtype", None) is torch.bool
        return not is_bool and 0 <= index(token) < vocab
    except TypeError:
        return False

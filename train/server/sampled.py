"""The fields that both kinds of requests have: how tokens are drawn, what ends an answer, what is streamed."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from train.generation.requests import Request
from train.generation.sampling import Sampling, check_sampling

from .body import Body
from .errors import ApiError
from .grammar import Grammars
from .model import Model, Prompt

CHOICES = 128  # of one request
LIKELIEST = 20  # tokens that are named at each place, at most
STOPS = 16
SHARE = 1e-30  # the least top_p, which keeps the likeliest token alone; fp32 would make 0 of less
PENALTY = 100.0  # at most: logits stay finite in fp32

# Fields of clients that change no token of an answer.
_HARMLESS = """
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity
"""
HARMLESS = frozenset(_HARMLESS.split())

# Fields that are common and have no effect with this value.
WITHOUT_EFFECT: tuple[tuple[str, Any], ...] = (
    ("logit_bias", {}),
    ("suffix", ""),
    ("functions", []),
    ("modalities", ["text"]),
)


@dataclass(frozen=True)
class Drawn:
    """Settings of drawing the choices of a request.

    Args:
        sampling: Temperature and truncation.
        n: Choices of each prompt.
        seed: Of the noise; choices with one seed differ by their number.
        stop_ids: Token ids that end a choice.
        stop_texts: Texts that end a choice.
        constraint: Makes the `logits_fn` of each choice; None: texts are free.
        stream: Whether pieces are sent as they come.
        usage: Whether a stream ends with the number of tokens.
    """

    sampling: Sampling
    n: int
    seed: int
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    constraint: Callable[[], Callable[[Tensor, list[int]], Tensor]] | None
    stream: bool
    usage: bool

    def requests(self, prompts: Sequence[Prompt], max_new: int, likeliest: int) -> list[Request]:
        """A request for each choice of each prompt."""
        return [
            Request(
                prompt.ids,
                max_new,
                self.sampling,
                self.seed,
                draw,
                self.stop_ids,
                self.stop_texts,
                prompt.images,
                likeliest=likeliest,
                logits_fn=None if self.constraint is None else self.constraint(),
            )
            for draw, prompt in enumerate(one for one in prompts for _ in range(self.n))
        ]


def truncated(body: Body) -> Sampling:
    """Temperature, top_k and top_p, which all interfaces have."""
    top_k, top_p = body.integer("top_k", -1, low=-1, high=2**31 - 1), body.number("top_p", 1.0, low=0, high=1)
    return Sampling(
        temperature=body.number("temperature", 1.0, low=0, high=100),
        top_k=top_k if top_k > 0 else None,
        top_p=max(top_p, SHARE) if top_p else top_p,
    )


def drawn(body: Body, model: Model, grammars: Grammars) -> Drawn:
    """The settings of a request for drawing its choices. ApiError names the field that is wrong."""
    model.check_name(body.take("model"))
    n = body.integer("n", 1, low=1, high=CHOICES)
    if body.integer("best_of", n, low=1) != n:
        raise body.wrong("best_of", f"left out, or n, {n}: every choice is returned")
    sampling = replace(
        truncated(body),
        min_p=body.number("min_p", 0.0, low=0, high=1),
        repetition=body.number("repetition_penalty", 1.0, low=1 / PENALTY, high=PENALTY),
        presence=body.number("presence_penalty", 0.0, low=-PENALTY, high=PENALTY),
        frequency=body.number("frequency_penalty", 0.0, low=-PENALTY, high=PENALTY),
    )
    try:
        check_sampling(sampling)
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    more: Any = body.take("stop_token_ids", [])
    if not isinstance(more, list) or not all(type(one) is int and 0 <= one < model.vocab_size for one in more):
        raise body.wrong("stop_token_ids", f"a list of token ids from 0 to {model.vocab_size - 1}")
    ends = () if body.flag("ignore_eos") else model.ends
    stream, options = body.flag("stream"), body.object("stream_options")
    if options is not None and not stream:
        raise body.wrong("stream_options", "left out, for nothing is streamed")
    usage = options is not None and options.flag("include_usage")
    if options is not None:
        options.finish()
    return Drawn(
        sampling,
        n,
        body.integer("seed", secrets.randbits(31), low=-(2**63)),
        (*ends, *more),
        body.texts("stop", STOPS),
        grammars.hook(body.object("response_format")),
        stream,
        usage,
    )

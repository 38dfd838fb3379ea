"""Requests and what becomes of them: `Request`, `Answer` as it grows, `Event` per token, `Generations` at the end."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import index
from typing import Any

import torch
from torch import Tensor

from fnmodels import Cache
from fnmodels.image_text import Image

from .decoder_traits import Decodes
from .routing import joined
from .sampling import Sampling, check_sampling
from .stop import StopText, TextStream


@dataclass(frozen=True)
class Held:
    """What a request left in the cache, for the next turn of its conversation.

    Args:
        tokens: The ids in it: prompt and answer, without the last token, which no step has read.
        cache: One row, with the capacity of the batch that it comes from and goes into.
    """

    tokens: tuple[int, ...]
    cache: Cache


@dataclass(frozen=True)
class Request:
    """One continuation to generate.

    Args:
        prompt: Token ids, at least one; of a model with an encoder, what the decoder begins with.
        max_new: Tokens generated at most.
        sampling: How tokens are drawn, with numbers as fields.
        seed: What the noise depends on beside the step; requests with equal seed and draw have the same noise.
        draw: The number of the draw with this seed.
        stop_ids: Tokens after which it ends.
        stop_texts: Texts that end it, which need a tokenizer.
        images: Floats [C, H, W] as the tower reads them, in the order of the prompt's image tokens, one token for each
            feature.
        source: Of a model with an encoder, what that reads, ids or vectors [S, ...].
        likeliest: How many of the likeliest tokens each event names.
        logits_fn: (logits [V], the answer's tokens so far) -> logits edited before the draw, for this request alone,
            behind the `logits_fn` of the run; None: no edit.
        keep: Whether the last event has what the request leaves in the cache, see `Held`.
        held: What an earlier turn left, whose tokens the prompt begins with and are not computed again; None: nothing.
        length: The sequence length that length-dependent rotary scalings read, which the turns of a conversation must
            have in common; None: that of the prompt and `max_new`.
        record_routing: Whether its events have the experts of its tokens, of a decoder with experts; steps with such a
            request are eager. Tokens of `held` are left out: the turn that computed them has theirs.
    """

    prompt: Sequence[int]
    max_new: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    draw: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    images: Sequence[Image] = field(default=(), compare=False)
    source: Any = field(default=None, compare=False)
    likeliest: int = 0
    logits_fn: Callable[[Tensor, list[int]], Tensor] | None = field(default=None, compare=False)
    keep: bool = False
    held: Held | None = field(default=None, compare=False)
    length: int | None = None
    record_routing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", tuple(self.images))  # read twice: also of a tensor and of an iterator


def length_of(request: Request) -> int:
    """The length that length-dependent rotary scalings read: a function of the request alone, not of its neighbours."""
    return len(request.prompt) + request.max_new if request.length is None else request.length


@dataclass(frozen=True)
class Event:
    """A generated token of request `row` (counted from 0 in the order of the requests).

    logp, logp_kept: see `sample_step`. text: what can be shown after this token, with a tokenizer; the texts of a
    request joined are its answer, without a stop text. reason: None, or why the request ends with this token:
    "stop_id", "stop_text" or "max_new". likeliest: (token, logp) of the likeliest tokens, where the request asks.
    held: what the request leaves in the cache, with the last event of one that has `keep`.
    routing: int16 [tokens, layers with experts, k], the experts of the tokens computed since the last event, those of
    the prompt first; None where they are not recorded.
    """

    row: int
    token: int
    logp: float
    logp_kept: float
    text: str = ""
    reason: str | None = None
    likeliest: tuple[tuple[int, float], ...] = ()
    held: Held | None = field(default=None, compare=False)
    routing: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Generations:
    """Results in the order of the prompts; tokens include the one that stopped an answer.

    Args:
        tokens: Ids of each answer, without the prompt's.
        logp: fp32 [tokens] of each answer, nats under the full softmax, see `sample_step`.
        logp_kept: fp32 [tokens] of each answer, nats under the distribution that was drawn from.
        reasons: "stop_id", "stop_text" or "max_new" for each answer.
        texts: Answers without their stop text; empty without a tokenizer.
        compile: How steps ran: "none", "step" or "graph".
        routing: int16 [tokens, layers with experts, k] of each prompt and answer but its last token, the experts that
            computed them; empty without record_routing.
    """

    tokens: list[list[int]]
    logp: list[Tensor]
    logp_kept: list[Tensor]
    reasons: list[str]
    texts: list[str]
    compile: str = "none"
    routing: list[Tensor] = field(default_factory=list)


class Answer:
    """The answer to a request as it grows, on the host."""

    def __init__(self, row: int, request: Request, tokenizer: Decodes | None, skip_special_tokens: bool = True) -> None:
        self.row, self.request, self.tokens = row, request, list[int]()
        self._text = (
            None
            if tokenizer is None
            else TextStream(tokenizer, request.prompt, skip_special_tokens=skip_special_tokens)
        )
        self._stop = StopText(request.stop_texts)
        self._likeliest: tuple[tuple[int, float], ...] = ()
        self._routing = list[Tensor]()  # of tokens computed since the last event

    @property
    def edits(self) -> bool:
        """Whether the request reads its logits before the draw."""
        return self.request.likeliest > 0 or self.request.logits_fn is not None

    def note_likeliest(self, logits: Tensor) -> None:
        """Keeps the likeliest of the next token, of its logits [V] before any edit, for the event of that token."""
        heat = float(self.request.sampling.temperature) or 1.0
        best = torch.log_softmax(logits / heat, -1).topk(min(self.request.likeliest, len(logits)))
        self._likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def note_routing(self, pieces: Iterable[Tensor]) -> None:
        """Keeps the experts of computed tokens, in pieces [tokens, layers with experts, k], for the next event, where
        the request asks for them."""
        if self.request.record_routing:
            self._routing += pieces

    def append(self, token: int, logp: float, logp_kept: float) -> Event:
        """The event of the next token."""
        self.tokens.append(token)
        reason = "stop_id" if token in self.request.stop_ids else None
        text = "" if self._text is None or reason else self._stop.push(self._text.push(token))
        if self._stop.found or (self._text is not None and self._stops_here(self._text)):
            reason = "stop_text"
        elif reason is None and len(self.tokens) >= self.request.max_new:
            reason = "max_new"
        if reason is not None and self._text is not None and not self._stop.found:
            text += self._stop.push(self._text.flush()) + self._stop.flush()
        # the drawn one by the number of the event, so that the two are the same to the bit
        likeliest = tuple((other, logp if other == token else nats) for other, nats in self._likeliest)
        routing, self._routing = joined(self._routing), []
        return Event(self.row, token, logp, logp_kept, text, reason, likeliest, routing=routing)

    def _stops_here(self, stream: TextStream) -> bool:
        """Whether a stop text is complete, though later tokens might have changed it, as bytes do."""
        return bool(self.request.stop_texts) and self._stop.ends(stream.pending())


def collect(events: Iterable[Event], rows: int) -> Generations:
    """The results of `rows` requests from the events of all, of `serve` or of steps that are not compiled."""
    found: list[list[Event]] = [[] for _ in range(rows)]
    rest, how = iter(events), None
    while how is None:
        try:
            event = next(rest)
        except StopIteration as end:
            how = end.value or "none"
        else:
            found[event.row].append(event)
    return Generations(
        [[event.token for event in row] for row in found],
        [torch.tensor([event.logp for event in row]) for row in found],
        [torch.tensor([event.logp_kept for event in row]) for row in found],
        [str(row[-1].reason) for row in found],
        ["".join(event.text for event in row) for row in found],
        how,
        [torch.cat(pieces) for row in found if (pieces := [e.routing for e in row if e.routing is not None])],
    )


def best_of(found: Generations, each: int) -> list[int]:
    """The best of each group of consecutive answers, by the mean of logp over its tokens.

    Generate from prompts repeated `each` times, which are computed once.

    Args:
        found: The answers, of `generate`.
        each: Answers in a group.

    Returns:
        The index of the best answer of each group.

    Raises:
        ValueError: `each` is below 1 or does not divide the number of answers.
    """
    if each < 1 or len(found.tokens) % each:
        raise ValueError(
            f"each is {each}; it must be at least 1 and divide the number of answers, {len(found.tokens)}."
        )
    scores = torch.tensor([float(logp.sum()) / len(logp) for logp in found.logp])
    return (scores.reshape(-1, each).argmax(1) + torch.arange(0, len(scores), each)).tolist()


def requests_of(
    prompts: Sequence[Sequence[int]],
    max_new: int | Sequence[int],
    sampling: Sampling | None,
    seeds: int | Sequence[int],
    stop_ids: Sequence[int],
    stop_texts: Sequence[str],
    images: Sequence[Sequence[Image]] | None = None,
) -> list[Request]:
    """One request per prompt; see `generate`. ValueError for a sequence of another length than the prompts, and where
    there is no sequence, or something else than integers."""
    if images is not None and len(images) != len(prompts):
        raise ValueError(f"images has {len(images)} lists; it must have one for each of {len(prompts)} prompts.")
    sampling = sampling or Sampling()
    check_sampling(sampling, len(prompts))
    StopText(stop_texts)
    single = [prompt for prompt in prompts if _is_single(prompt)]
    if single:
        raise ValueError(f"A prompt is {single[0]!r}; prompts is a sequence of prompts, each a sequence of token ids.")
    if _is_single(stop_ids):
        raise ValueError(f"stop_ids is {stop_ids!r}; it must be a sequence of token ids.")
    sizes, seeds = (_each(name, value, len(prompts)) for name, value in (("max_new", max_new), ("seeds", seeds)))
    earlier: dict[int, int] = {}
    made = []
    for row, (prompt, size, seed) in enumerate(zip(prompts, sizes, seeds, strict=True)):
        draw = earlier[seed] = earlier.get(seed, -1) + 1
        own = Sampling(**{f.name: _of_row(getattr(sampling, f.name), row) for f in fields(Sampling)})
        pictures = () if images is None else images[row]
        if _is_single(pictures):
            raise ValueError(f"images[{row}] is {pictures!r}; it must be a sequence of images, () for none.")
        made.append(Request(list(prompt), size, own, seed, draw, tuple(stop_ids), tuple(stop_texts), pictures))
    return made


def _each(name: str, value: int | Sequence[int], rows: int) -> list[int]:
    values: list[Any] = [value] * rows if _is_single(value) else list(value)  # type: ignore[arg-type]
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} values; it must be one number or one for each of {rows} prompts.")
    try:
        return [int(index(one)) for one in values]
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer, or one for each of {rows} prompts.") from None


def _is_single(value: Any) -> bool:
    """Whether a value is no sequence; a tensor or an array without dimensions is none."""
    return not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0


def _of_row(value: Any, row: int) -> Any:
    return value[row].item() if isinstance(value, Tensor) else value


def capacity_of(requests: Sequence[Request]) -> int:
    return max((len(request.prompt) + request.max_new for request in requests), default=1)

"""What a request of `/asample` asks of its prompt, and the answer to it."""

from dataclasses import dataclass
from typing import Any

from ..body import Body
from ..scores import Draws, PromptScores, ScoredPrompt
from .targets import Targets, targets_of
from .wire import DrawnPrompt, tensor_message

LIKELIEST = 64  # tokens that are named or drawn at each place, at most


@dataclass(frozen=True)
class AskedOfPrompt:
    """What is asked of a prompt.

    Args:
        logp: Whether log-probabilities are.
        likeliest: The likeliest tokens at each place.
        targets: Further tokens whose log-probabilities are asked for.
        draws: Tokens that are drawn at each place.
        last: How many of the last tokens have log-probabilities and likeliest tokens in the answer; None: all.
    """

    logp: bool
    likeliest: int
    targets: Targets | None
    draws: int
    last: int | None

    @staticmethod
    def of(body: Body, tokens: int, vocab: int) -> "AskedOfPrompt":
        """The fields of a request, whose prompt has so many tokens. ApiError for wrong ones."""
        last, logp = body.take("prompt_logprobs_last_n"), body.flag("prompt_logprobs")
        if last is not None and not (logp and type(last) is int and 1 <= last < tokens):
            must = f"an integer from 1 to {tokens - 1}, for the prompt has {tokens} tokens" if logp else "left out"
            raise body.wrong("prompt_logprobs_last_n", must + ("" if logp else ", or prompt_logprobs must be true"))
        return AskedOfPrompt(
            logp,
            body.integer("topk_prompt_logprobs", 0, high=LIKELIEST),
            targets_of(body, tokens, vocab),
            body.integer("prompt_alt_tokens_k", 0, high=LIKELIEST),
            last,
        )

    def scored(self, tokens: list[int], images: Any, temperature: float, seed: int) -> ScoredPrompt | None:
        """What the worker does for it; None: nothing."""
        if not (self.logp or self.likeliest or self.targets or self.draws):
            return None
        cells = None if self.targets is None else self.targets.cells
        draws = Draws(self.draws, temperature, seed) if self.draws else None
        return ScoredPrompt(tokens, images, self.likeliest, cells, draws)

    def most(self, tokens: int) -> int:
        """Bytes of what the answer says of a prompt of so many tokens, at most."""
        further = 0 if self.targets is None else 12 * len(self.targets.asked) + 8 * tokens
        return tokens * (4 * self.logp + 8 * self.likeliest + 12 * self.draws) + further

    def answer(self, scores: PromptScores | None) -> DrawnPrompt:
        """What the message of the answer has of it."""
        if scores is None:
            return DrawnPrompt()
        before = 0 if self.last is None else len(scores.logp) - self.last
        targets, drawn = None, None
        if self.targets is not None and scores.cells is not None:
            targets = self.targets.message(scores.cells)
        if scores.drawn is not None:
            ids, nats = (tensor_message(one.contiguous().numpy(), one.shape) for one in scores.drawn)
            drawn = ids, nats
        nothing = [None] * before
        return DrawnPrompt(
            [*nothing, *scores.logp[before:]] if self.logp else None,
            [*nothing, *scores.likeliest[before:]],
            targets,
            drawn,
        )

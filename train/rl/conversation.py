"""A conversation as it grows, in token ids, and the `Trajectory` that is left of it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from train.data.token_budget import token_budget
from train.generation.requests import Event, Held, Request
from train.generation.routing import DTYPE, joined, replayable
from train.generation.sampling import Sampling

from .environment import Environment, Outcome
from .turns import Turns


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation.

    Args:
        turns: Turns of the model, at most.
        tokens: Tokens of a turn, at most.
        context: Tokens of the conversation, at most.
    """

    turns: int
    tokens: int
    context: int


@dataclass(frozen=True)
class Trajectory:
    """A conversation that has ended.

    Args:
        number: Its number in the update.
        version: The updates that the weights had seen with which all of its tokens were sampled.
        tokens: The ids as they were read and sampled, S of them.
        sampled: For each token, whether the model sampled it: only those are trained on.
        logp: For each token its log-probability in nats as it was sampled, 0 for the others.
        rewards: Of each turn.
        mistakes: Calls that were refused.
        ended: "done", or the limit that was reached: "turns" or "context".
        routing: int16 [computed tokens, layers with experts, k], the experts that computed them; None: not recorded.
    """

    number: int
    version: int
    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
    logp: tuple[float, ...]
    rewards: tuple[float, ...]
    mistakes: int
    ended: str
    routing: Tensor | None = field(default=None, compare=False)

    @property
    def reward(self) -> float:
        """The sum over the turns."""
        return sum(self.rewards)

    @property
    def prompt_size(self) -> int:
        """The tokens before the first one that was sampled."""
        return self.sampled.index(True)

    def to_json(self) -> dict[str, Any]:
        """The values for a saved step, which has no tuples; its numbers are exact."""
        values = dataclasses.asdict(self) | {"routing": None if self.routing is None else self.routing.tolist()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Trajectory":
        """The inverse of `to_json`."""
        routing = values.get("routing")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**fields | {"routing": None if routing is None else torch.tensor(routing, dtype=DTYPE)})


class Conversation:
    """A conversation under way: its ids only ever grow at their end."""

    def __init__(self, number: int, version: int, environment: Environment) -> None:
        self.number, self.environment = number, environment
        self.ended: str | None = None
        self._version, self._mistakes = version, 0
        self._tokens, self._sampled, self._logp = list[int](), list[bool](), list[float]()
        self._rewards, self._text = list[float](), list[str]()
        self._held: Held | None = None
        self._routing = list[Tensor]()

    def begin(self, prompt: Sequence[int]) -> None:
        """The ids of the first messages."""
        self._append(prompt)

    def request(
        self, limits: Limits, sampling: Sampling, seed: int, stop_ids: tuple[int, ...], record_routing: bool = False
    ) -> Request:
        """The request of the next turn; its draws follow from the seed, the conversation and the turn."""
        turn = len(self._rewards)
        self._text.clear()
        return Request(
            list(self._tokens),
            min(limits.tokens, limits.context - len(self._tokens)),
            sampling,
            seed,
            (self.number << 20) + turn,
            stop_ids,
            keep=turn + 1 < limits.turns,
            held=self._held,
            length=limits.context,
            record_routing=record_routing,
        )

    def push(self, event: Event) -> str | None:
        """Takes a sampled token; returns the text of the turn where it was its last one."""
        self._tokens.append(event.token)
        self._sampled.append(True)
        self._logp.append(event.logp)
        self._text.append(event.text)
        self._routing += [] if event.routing is None else [event.routing]
        if event.reason is None:
            return None
        self._held = event.held
        return "".join(self._text)

    def observe(self, outcome: Outcome, turns: Turns, limits: Limits) -> None:
        """Takes the outcome of a turn: the observation is appended, or the conversation ends."""
        self._rewards.append(float(outcome.reward))
        self._mistakes += outcome.mistakes
        if outcome.done:
            self.ended = "done"
        elif len(self._rewards) == limits.turns:
            self.ended = "turns"
        else:
            ids = turns.between(self._tokens[-1], outcome.text)
            if len(self._tokens) + len(ids) < limits.context:
                self._append(ids)
            else:
                self.ended = "context"
        if self.ended:
            self._held = None

    def trajectory(self) -> Trajectory:
        """The record of a conversation that has ended."""
        assert self.ended is not None
        lists = (tuple(self._tokens), tuple(self._sampled), tuple(self._logp), tuple(self._rewards))
        return Trajectory(self.number, self._version, *lists, self._mistakes, self.ended, joined(self._routing))

    def _append(self, ids: Sequence[int]) -> None:
        self._tokens += ids
        self._sampled += [False] * len(ids)
        self._logp += [0.0] * len(ids)


def microbatches(found: Sequence[Trajectory], gains: Tensor, budget: int) -> list[dict[str, Tensor]]:
    """Packed rows of conversations for the policy loss.

    Args:
        found: The conversations.
        gains: The advantage of each, [conversations].
        budget: Tokens of a row, at most.

    Returns:
        Microbatches [1, T] with `learnt`, `advantages` and `old_logp` beside the tokens, aligned with the labels: entry
        s is of the token s + 1. Only tokens that the model sampled are learnt. Conversations that recorded their
        experts have them as `routing`, which the losses replay.
    """
    entries: dict[str, list[Tensor]] = {"tokens": [], "learnt": [], "advantages": [], "old_logp": []}
    for one, gain in zip(found, gains, strict=True):
        learnt = torch.tensor([*one.sampled[1:], False])
        entries["tokens"].append(torch.tensor(one.tokens))
        entries["learnt"].append(learnt)
        entries["advantages"].append(gain * learnt)
        entries["old_logp"].append(torch.tensor([*one.logp[1:], 0.0]))
        if one.routing is not None:
            entries.setdefault("routing", []).append(replayable(one.routing, len(one.tokens)))
    (rows,) = token_budget(entries, budget)
    return [row.batch for row in rows]

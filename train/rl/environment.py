"""What a conversation takes place in: `Environment`, the `Outcome` of a turn, and environments by name."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fnmodels.errors import UserError
from params.imported import place_raised
from train.imported import FunctionFailed, Imported, is_import_path

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a turn of the model led to.

    Args:
        text: The observation, which the model reads next; without a meaning where the conversation is done.
        reward: Of this turn; the reward of a conversation is the sum over its turns.
        done: Whether the conversation ends.
        mistakes: Calls of the turn that were refused, for the metrics.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    mistakes: int = 0


class Environment(Protocol):
    """The other side of one conversation; each conversation has one of its own.

    `reset` and `step` are called in turn, by one thread at a time. All that they draw follows from the seed.
    """

    def reset(self, seed: int) -> Sequence[Message]:
        """Begins the conversation.

        Args:
            seed: The number of the task; all answers of a group have the same.

        Returns:
            The messages that the model answers first, as chat templates take them.
        """
        ...

    def step(self, text: str) -> Outcome:
        """Answers a turn of the model.

        Args:
            text: What the model wrote, without the token that ended it.

        Returns:
            The observation, the reward, and whether the conversation is done.
        """
        ...


MakeEnvironment = Callable[[], Environment]


def environment_of(name: str, known: Mapping[str, MakeEnvironment]) -> MakeEnvironment:
    """The function that makes environments, by its name or by its import path.

    Args:
        name: One of `known`, or `module:function` of a function without arguments.
        known: {name: function}.

    Returns:
        The function. What its environments raise, or return of another kind, becomes FunctionFailed.

    Raises:
        UserError: There is no such environment.
    """
    if name in known:
        return known[name]
    if not is_import_path(name):
        raise UserError(f"--environment {name}: it is none of {', '.join(known)}, and no function as module:name")
    function = Imported(name, "--environment").function
    return lambda: _Guarded(f"--environment {name}", function)


class _Guarded:
    """An environment of the user's, whose exceptions and results of another kind become FunctionFailed."""

    def __init__(self, flag: str, make: Callable[[], Environment]) -> None:
        self._flag = flag
        self._inner: Environment = self._called(make)

    def reset(self, seed: int) -> Sequence[Message]:
        return self._called(lambda: checked_messages(self._inner.reset(seed)))

    def step(self, text: str) -> Outcome:
        return self._called(lambda: checked_outcome(self._inner.step(text)))

    def _called(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            raise FunctionFailed.of(self._flag, error, place=place_raised(error)) from error


def checked_messages(messages: Any) -> list[Message]:
    """The messages of a reset. TypeError for another kind of value."""
    found = list(messages) if isinstance(messages, Sequence) and not isinstance(messages, str) else []
    if not found or not all(isinstance(message, Mapping) and "role" in message for message in found):
        raise TypeError(f"reset returned {messages!r:.80}; it must return a list of messages, each with a role")
    return found


def checked_outcome(outcome: Any) -> Outcome:
    """The outcome of a step. TypeError for another kind of value."""
    if not isinstance(outcome, Outcome) or not isinstance(outcome.text, str):
        raise TypeError(f"step returned {outcome!r:.80}; it must return an Outcome, whose text is a str")
    if isinstance(outcome.reward, str) or not math.isfinite(float(outcome.reward)):
        raise TypeError(f"the reward of a step is {outcome.reward!r:.80}; it must be a finite number")
    return outcome

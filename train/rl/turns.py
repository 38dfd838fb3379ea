"""The tokens between two turns of the model: its end of turn, the observation, and the cue for its next turn.

What the model sampled is never decoded and encoded again. The template's text around an observation is found once, from
a conversation of marks; each observation with it is encoded alone and appended to the ids of the history.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fnmodels.errors import UserError
from train.data.chat import Template, render

ANSWER, OBSERVED = "MarkOfTheAnswer", "MarkOfTheObservation"


@dataclass(frozen=True)
class Turns:
    """The text around observations.

    Args:
        tokenizer: Of the tokenizers library.
        opening: From the end of an answer to the observation, with the marker that ends the assistant's turn.
        closing: From the end of the observation to the end of the cue for the next answer.
        ends: Tokens that end an answer.
    """

    tokenizer: Any
    opening: str
    closing: str
    ends: tuple[int, ...]

    def between(self, last: int, observation: str) -> list[int]:
        """The ids to append behind an answer, of the observation and the markers around it.

        Special tokens are those of the template alone: an observation that spells one is encoded as text, in a piece of
        its own, so that it cannot pose as another turn.

        Args:
            last: The last token of the answer. Where it is the marker that ends the turn, it is not repeated; an answer
                that was cut off gets it here.
            observation: The text.

        Returns:
            The ids.
        """
        opening, ended = self.opening, self.tokenizer.id_to_token(last) if last in self.ends else None
        if ended and opening.startswith(ended):
            opening = opening[len(ended) :]
        whole = self._encoded(opening + observation + self.closing)
        if _specials(self.tokenizer, whole) == _specials(self.tokenizer, self._encoded(opening + self.closing)):
            return whole
        plain = self._encoded(observation, special=False)
        return [*self._encoded(opening), *plain, *self._encoded(self.closing)]

    def _encoded(self, text: str, *, special: bool = True) -> list[int]:
        self.tokenizer.encode_special_tokens = not special
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        finally:
            self.tokenizer.encode_special_tokens = False


def _specials(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return [token for token in ids if token in special]


def turns_of(tokenizer: Any, template: Template, ends: Sequence[int], role: str) -> Turns:
    """The text that a chat template writes around an observation.

    Args:
        tokenizer: Of the tokenizers library.
        template: The chat template.
        ends: Tokens that end an answer.
        role: The role of observations, such as "tool".

    Returns:
        The markers.

    Raises:
        UserError: The template does not write both the answer and the observation behind it.
    """
    asked, answered = {"role": "user", "content": "Mark?"}, {"role": "assistant", "content": ANSWER}
    text = render(template, [asked, answered, {"role": role, "content": OBSERVED}], prompt=True)
    if not 0 <= text.find(ANSWER) < text.find(OBSERVED) or text.count(ANSWER) != 1 or text.count(OBSERVED) != 1:
        raise UserError(
            f"the chat template does not write an observation of the role {role!r} once behind the answer: name "
            "another --role, such as user"
        )
    _, _, rest = text.partition(ANSWER)
    opening, _, closing = rest.partition(OBSERVED)
    return Turns(tokenizer, opening, closing, tuple(ends))

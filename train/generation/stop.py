"""Token ids to text as they arrive, and where a text stops.

A token may end within a character, and a stop text may begin in one token and end in another. So text is held back
until its characters are complete and until no stop text can begin in it; what is held back at the end is flushed.
"""

from collections.abc import Sequence
from typing import Protocol

BROKEN = "\ufffd"  # what tokenizers decode incomplete bytes to
BEFORE = 8  # tokens of a prompt that are decoded with an answer: a character has at most 4 bytes


class Decodes(Protocol):
    """A tokenizer of the `tokenizers` library."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """The text of token ids, in pieces of complete characters: pieces and flush joined are the text of all ids.

    before: ids in front, such as the prompt's; their text is not part of the pieces, but a character may begin there.
    """

    def __init__(self, tokenizer: Decodes, before: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(before)[-BEFORE:]  # a window: its text up to _sent has been returned
        self._sent = self._text().rstrip(BROKEN)

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def push(self, token: int) -> str:
        """The text that this token completes; empty while bytes of a character are missing."""
        self._ids.append(token)
        text = self._text()
        return "" if text.endswith(BROKEN) else self._unsent(text)

    def flush(self) -> str:
        """The text that is held back: bytes that no token completed, decoded as the tokenizer does."""
        return self._unsent(self._text())

    def _unsent(self, text: str) -> str:
        same = len(self._sent)
        while not text.startswith(self._sent[:same]):  # byte fallback rewrites a character before invalid bytes
            same -= 1
        piece, self._sent = text[same:], text
        self._shrink()
        return piece

    def _shrink(self) -> None:
        """Forgets ids whose text cannot matter any more, so that a token costs the same however long the text is."""
        if len(self._ids) >= 4 * BEFORE:
            recent = self._ids[-BEFORE:]
            text = self._tokenizer.decode(recent, skip_special_tokens=self._skip)
            if text and self._sent.endswith(text) and BROKEN not in text:
                self._ids, self._sent = recent, text


class StopText:
    """Finds the first of some stop texts in text that arrives in pieces. ValueError for an empty stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(stops):
            raise ValueError(f"stop_texts is {stops!r}; it must be a sequence of texts, none of them empty.")
        self._stops, self._held, self.found = tuple(stops), "", False

    def push(self, piece: str) -> str:
        """The text that is certainly in front of any stop text; `found` says whether one was found behind it."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        size = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The length of the longest end of `text` with which `stop` begins."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)

    def flush(self) -> str:
        """The text held back because a stop text might have begun in it."""
        held, self._held = self._held, ""
        return held

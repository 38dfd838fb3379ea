"""Token ids to text as they arrive, and where a text stops.

A token may end within a character, and a stop text may begin in one token and end in another. So text is held back
until no later token can change it and until no stop text can begin in it; what is held back at the end is flushed.
"""

from collections.abc import Sequence
from operator import eq

from .decoder_traits import Decodes, decoder_traits, is_byte

BROKEN = "\ufffd"  # what tokenizers decode incomplete bytes to
WINDOW = 8  # tokens that are decoded with new ones, because a token's text may depend on those in front of it


class TextStream:
    """The text of token ids, in pieces that no later token changes: pieces and flush joined are the text of all ids.

    before: ids in front, such as the prompt's. Their text, up to an incomplete character at its end, is not part of the
    pieces; a character that begins there and ends in a later token is.
    """

    def __init__(self, tokenizer: Decodes, before: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._traits = decoder_traits(tokenizer)
        self._ids = list(before)  # a window: its text up to _sent has been returned
        self._ids = self._ids[self._beginning() :]
        self._limit = 4 * WINDOW
        self._run: int | None = None  # the index of the first byte of a run that later tokens may go on with
        for index, token in enumerate(self._ids):
            self._read(token, index + 1)
        self._sent = self._text().rstrip(BROKEN)
        self._spoilt: str | None = self._sent  # what _sent becomes by later tokens, while all of it is `before`'s
        if self._run is not None:  # an invalid byte turns each byte of its run into one BROKEN
            self._spoilt = self._text(self._run) + BROKEN * sum(map(self._is_byte, self._ids[self._run :]))

    def _text(self, stop: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[:stop], skip_special_tokens=self._skip)

    def push(self, token: int) -> str:
        """The text that is final with this token; empty while a later token may change it."""
        self._ids.append(token)
        self._read(token, len(self._ids))
        if self._run is not None:
            return ""
        text = self._text()
        final = text.rstrip(BROKEN)
        piece = self._unsent(final[: max(0, len(final) - self._traits.open_end)])
        self._shrink(text)
        return piece

    def pending(self) -> str:
        """The text that `flush` would return, without an incomplete character at its end."""
        text = self._text().rstrip(BROKEN)
        return text[self._sent_size(text) :]

    def flush(self) -> str:
        """The text that is held back: bytes that no token completed, decoded as the tokenizer does."""
        return self._unsent(self._text())

    def _is_byte(self, token: int) -> bool:
        return self._traits.byte_runs and is_byte(self._tokenizer, token)

    def _read(self, token: int, end: int) -> None:
        """Begins or ends a run of bytes at ids[end - 1]. A token without a text, such as a special one, ends none."""
        if self._is_byte(token):
            self._run = end - 1 if self._run is None else self._run
        elif self._run is not None and self._text(end) != self._text(end - 1):
            self._run = None

    def _unsent(self, text: str) -> str:
        piece = text[self._sent_size(text) :]
        if piece:
            self._sent, self._spoilt = text, None
        return piece

    def _sent_size(self, text: str) -> int:
        """How much of the window's text has been returned or is `before`'s."""
        if self._spoilt is None or text.startswith(self._sent) or self._sent.startswith(text):
            return len(self._sent)
        return max(len(_common(text, before)) for before in (self._sent, self._spoilt))

    def _shrink(self, text: str) -> None:
        """Forgets ids whose text cannot matter any more, so that a token costs the same however long the text is."""
        if len(self._ids) >= self._limit and text == self._sent:
            self._ids = self._ids[self._beginning() :]
            self._sent = self._text()
            self._limit = max(4 * WINDOW, 2 * len(self._ids))

    def _beginning(self) -> int:
        """Where the last ids begin that are decoded alike without those in front: behind a complete character."""
        start = 0 if self._traits.open_end else max(0, len(self._ids) - WINDOW)
        while start and not self._begins(self._ids[start]):
            start -= 1
        return start

    def _begins(self, token: int) -> bool:
        text = self._tokenizer.decode([token], skip_special_tokens=self._skip)
        return text != "" and not text.startswith(BROKEN) and not self._is_byte(token)


def _common(one: str, other: str) -> str:
    """What both texts begin with."""
    same = map(eq, one, other)
    return one[: next((i for i, equal in enumerate(same) if not equal), min(len(one), len(other)))]


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

    def ends(self, pending: str) -> bool:
        """Whether a stop text would be found in `pending`, which is not pushed."""
        return any(stop in self._held + pending for stop in self._stops)

    def flush(self) -> str:
        """The text held back because a stop text might have begun in it."""
        held, self._held = self._held, ""
        return held

"""Token ids to text as they arrive, and where a text stops.

A token may end within a character, and a stop text may begin in one token and end in another. So text is held back
until no later token can change it and until no stop text can begin in it; what is held back at the end is flushed.
"""

from collections.abc import Sequence
from operator import eq

from .byte_tokens import Characters
from .decoder_traits import ENDLESS, REPLACEMENT, Decodes, open_end

WINDOW = 8  # tokens that are decoded with new ones, because a token's text may depend on those in front of it


class TextStream:
    """The text of token ids, in pieces that no later token changes: pieces and flush joined are the text of all ids.

    It is what the tokenizer decodes, but that bytes which are no character spoil no others, see `byte_tokens`.

    before: ids in front, such as the prompt's. Their text, up to an incomplete character at its end, is not part of the
    pieces; a character that begins there and ends in a later token is.
    """

    def __init__(self, tokenizer: Decodes, before: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._open_end = open_end(tokenizer)
        self._characters = Characters(tokenizer, skip_special_tokens=skip_special_tokens)
        self._ids = list(before)  # a window: its text up to _sent has been returned
        self._ids = [complete for token in self._ids[self._beginning() :] for complete in self._characters.push(token)]
        self._limit = 4 * WINDOW
        self._sent = self._text().rstrip(REPLACEMENT)
        self._began = False  # whether any of _sent was returned

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def push(self, token: int) -> str:
        """The text that is final with this token; empty while a later token may change it."""
        complete = self._characters.push(token)
        if not complete:
            return ""
        self._ids += complete
        text = self._text()
        final = text.rstrip(REPLACEMENT)
        piece = self._unsent(final[: max(0, len(final) - self._open_end.size)])
        self._shrink(text)
        return piece

    def pending(self) -> str:
        """The text that `flush` would return, without an incomplete character at its end."""
        text = self._text().rstrip(REPLACEMENT)
        return text[self._sent_size(text) :]

    def flush(self) -> str:
        """The text that is held back: bytes that no token completed, decoded as the tokenizer does."""
        self._ids += self._characters.flush()
        return self._unsent(self._text())

    def _unsent(self, text: str) -> str:
        piece = text[self._sent_size(text) :]
        if piece:
            self._sent, self._began = text, True
        return piece

    def _sent_size(self, text: str) -> int:
        """The length of the window's text that was returned or is `before`'s, whose end a later token may replace."""
        alike = list(map(eq, text, self._sent))
        return len(self._sent) if self._began or all(alike) else alike.index(False)

    def _shrink(self, text: str) -> None:
        """Forgets ids whose text cannot matter any more, so that a token costs the same however long the text is."""
        if len(self._ids) < self._limit or not text.startswith(self._sent):
            return
        unsent, all_ids = text[len(self._sent) :], self._ids
        self._ids = all_ids[self._beginning() :]
        text = self._text()
        if text.endswith(unsent):
            self._sent = text[: len(text) - len(unsent)]
        else:
            self._ids = all_ids
        self._limit = max(4 * WINDOW, 2 * len(self._ids))

    def _beginning(self) -> int:
        """The index from which ids are decoded alike without those in front: behind a complete character."""
        size = self._open_end.size  # in characters, which have at most four tokens
        start = 0 if size >= ENDLESS else max(0, len(self._ids) - WINDOW - 4 * size)
        while start and not self._begins(start):
            start -= 1
        return start

    def _begins(self, index: int) -> bool:
        """Whether a character begins with ids[index], which may need the bytes of three more."""
        byte = self._characters.byte(self._ids[index])
        size = 4 if byte is None else 1 + sum(byte >= first for first in (0xC0, 0xE0, 0xF0))
        text = self._tokenizer.decode(self._ids[index : index + size], skip_special_tokens=self._skip)
        return text != "" and text[0] not in {REPLACEMENT, *self._open_end.characters}


def text_of(tokenizer: Decodes, ids: Sequence[int]) -> str:
    """The text of ids as `TextStream` shows it: bytes that are no character spoil no others."""
    stream = TextStream(tokenizer)
    return "".join(map(stream.push, ids)) + stream.flush()


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

"""Byte tokens, such as <0xE4>, as whole characters.

The decoder of a tokenizer with byte fallback (Llama 2, Gemma) reads neighbouring byte tokens as one run, and makes all
of it replacement characters where a byte is invalid: a last byte could take back a page of Thai. So a stream decodes
ids in which every run is valid: bytes are held until they are a character, and an invalid byte is written as the bytes
of a replacement character.
"""

from codecs import getincrementaldecoder

from .decoder_traits import REPLACEMENT, Decodes, byte_of, replacement_ids


class Characters:
    """Makes ids whose bytes are characters from any ids that arrive one by one. Other ids pass as they are."""

    def __init__(self, tokenizer: Decodes, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._replacement = replacement_ids(tokenizer)
        self._held, self._data = list[int](), b""  # an incomplete character: its ids and their bytes

    def byte(self, token: int) -> int | None:
        """The value of a byte token; None for other tokens, and where the decoder reads byte tokens as they are."""
        return byte_of(self._tokenizer, token) if self._replacement else None

    def push(self, token: int) -> list[int]:
        """The ids that are complete with this one."""
        byte = self.byte(token)
        if byte is None:
            return [token] if not self._held or self._is_passed_over(token) else [*self.flush(), token]
        before = self.flush() if _character(self._data + bytes([byte])) is None else []
        self._held.append(token)
        self._data += bytes([byte])
        character = _character(self._data)
        if character is None:
            return before + self.flush()
        if not character:
            return before
        complete, self._held, self._data = self._held, [], b""
        return before + complete

    def flush(self) -> list[int]:
        """A replacement character's ids for each byte that is held."""
        ids, self._held, self._data = self._replacement * len(self._held), [], b""
        return ids

    def _is_passed_over(self, token: int) -> bool:
        """Whether the decoder leaves the token out, such as a special one, so that the bytes around it are one run."""
        first, *others = self._replacement
        ids = [first, token, *others]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) == REPLACEMENT


def _character(data: bytes) -> str | None:
    """The character that bytes are; empty while bytes are missing; None where no bytes behind them make one."""
    try:
        return getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return None

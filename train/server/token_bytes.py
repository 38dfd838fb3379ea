"""The bytes that a token adds to a text.

Tokens may be parts of characters, and decoders drop a space that a text begins with, so the text of a token alone says
too little. Bytes of neighbouring tokens joined are the text.
"""

from functools import cached_property
from typing import Any

from train.generation.decoder_traits import byte_of, reads_bytes, replacement_ids

# GPT-2's alphabet: printable characters of Latin-1 stand for their own byte, others for the rest in order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_REST = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_REST)}


class TokenBytes:
    """The bytes of each token of a tokenizer.

    Args:
        tokenizer: Of the `tokenizers` library.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._known = tokenizer, dict[int, bytes]()

    @cached_property
    def _added(self) -> dict[int, str]:
        return {token: one.content for token, one in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _of_alphabet(self) -> bool:
        return reads_bytes(self._tokenizer)

    @cached_property
    def _of_names(self) -> bool:
        return bool(replacement_ids(self._tokenizer))

    def of(self, token: int) -> bytes:
        """The bytes of a token behind another one; empty for an id without a token."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.id_to_token(token) or ""
        if self._of_alphabet and all(character in ALPHABET for character in name):
            return bytes(ALPHABET[character] for character in name)
        if self._of_names and (byte := byte_of(self._tokenizer, token)) is not None:
            return bytes([byte])
        alone, twice = (self._tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2))
        behind: str = twice[len(alone) :] if twice.startswith(alone) else alone
        return behind.encode()

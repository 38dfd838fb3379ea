"""Properties of a tokenizer's decoder that decide how far later tokens may change the text of earlier ones."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\ufffd"  # what decoders make of bytes that are no character
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# transformers' clean_up_tokenization_spaces removes the space in each of these
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
CHARACTERWISE = ("Fuse", "Metaspace", "Strip")  # steps that never look beyond a character, but for ends of the text
ENDLESS = 1 << 62  # characters, where any of the text may still change


class Decodes(Protocol):
    """A tokenizer of the `tokenizers` library, or one that decodes as it does."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class OpenEnd:
    """The end of a text that later tokens may change, because the decoder replaces strings in the full text.

    size: how many characters they may still change, at most; ENDLESS: all. characters: those in what is replaced and in
    what replaces it. So a text that begins with another one is decoded alike without what is in front.
    """

    size: int = 0
    characters: frozenset[str] = frozenset()

    def after(self, pattern: str | None, content: str) -> "OpenEnd":
        """The open end of a text in which `pattern` (None: anything) has been replaced by `content`."""
        if pattern is None:
            return OpenEnd(ENDLESS)
        wider = max(1, -(-len(content) // len(pattern)))  # characters for each one, at most
        size = min(ENDLESS, (self.size + len(pattern) - 1) * wider)
        return OpenEnd(size, self.characters | {*pattern, *content})


def open_end(tokenizer: Any) -> OpenEnd:
    """The open end of a tokenizer's texts; none where the decoder is not shown."""
    end, fused = OpenEnd(), False
    for step in _steps(tokenizer):
        if fused and step["type"] not in CHARACTERWISE:  # it reads the whole text as one token
            pattern = step["pattern"].get("String") if step["type"] == "Replace" else None
            end = end.after(pattern, step.get("content", ""))
        elif step["type"] == "ByteFallback" and not replacement_ids(tokenizer) and _ids(tokenizer, BYTES):
            end = OpenEnd(ENDLESS)  # of runs that later bytes may spoil, with no way to write them otherwise
        fused = fused or step["type"] in ("Fuse", "ByteLevel")
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        for pattern in CLEANED:
            end = end.after(pattern, pattern[1:])
    return end


def _steps(tokenizer: Any) -> list[Mapping[str, Any]]:
    """The steps of a tokenizer's decoder; none where it is not shown."""
    state = getattr(getattr(tokenizer, "decoder", None), "__getstate__", lambda: None)()
    return list(_single(json.loads(state))) if isinstance(state, bytes) else []


def _single(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for step in decoder.get("decoders", ()):
        yield from _single(step)


def replacement_ids(tokenizer: Decodes) -> list[int]:
    """The byte tokens of U+FFFD, where the decoder makes it from them; empty where it reads no bytes in tokens."""
    if all(step["type"] != "ByteFallback" for step in _steps(tokenizer)):
        return []
    ids = _ids(tokenizer, [BYTES[byte] for byte in REPLACEMENT.encode()])
    return ids if tokenizer.decode(ids) == REPLACEMENT else []


def reads_bytes(tokenizer: Any) -> bool:
    """Whether each character of a token is a byte in GPT-2's alphabet."""
    return any(step["type"] == "ByteLevel" for step in _steps(tokenizer))


def byte_of(tokenizer: Any, token: int) -> int | None:
    """The value of a token that is written as a byte, such as <0xE4>; None for others."""
    written = BYTE.fullmatch(_name(tokenizer, token) or "")
    return None if written is None else int(written[1], 16)


def _name(tokenizer: Any, token: int) -> str | None:
    find = getattr(tokenizer, "id_to_token", None) or getattr(tokenizer, "convert_ids_to_tokens", None)
    return None if find is None else find(token)


def _ids(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """The ids of those tokens that there are."""
    find = getattr(tokenizer, "token_to_id", None) or getattr(tokenizer, "convert_tokens_to_ids", None)
    ids = [] if find is None else [(name, find(name)) for name in names]
    return [token for name, token in ids if token is not None and _name(tokenizer, token) == name]

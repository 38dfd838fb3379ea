"""How a tokenizer's decoder makes text from tokens, as far as later tokens may change the text of earlier ones."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# transformers' clean_up_tokenization_spaces removes the space in each of these
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
CHARACTERWISE = ("Fuse", "Metaspace", "Strip")  # steps that never look beyond a character, but for ends of the text
ENDLESS = 1 << 62  # characters, where any of the text may still change


class Decodes(Protocol):
    """A tokenizer of the `tokenizers` library, or one that decodes as it does."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class DecoderTraits:
    """byte_runs: whether tokens such as <0xE4> are bytes, whose run is a text only if all of it is valid UTF-8.

    open_end: how many characters at the end of a text later tokens may still replace.
    """

    byte_runs: bool = False
    open_end: int = 0


def decoder_traits(tokenizer: Any) -> DecoderTraits:
    """The traits of a tokenizer; the default ones where it does not show its decoder."""
    state = getattr(getattr(tokenizer, "decoder", None), "__getstate__", lambda: None)()
    steps = list(_steps(json.loads(state))) if isinstance(state, bytes) else []
    open_end, fused = 0, False
    for step in steps:
        if fused and step["type"] not in CHARACTERWISE:  # it reads the whole text as one token
            pattern = step["pattern"].get("String") if step["type"] == "Replace" else None
            open_end = _after_replacing(open_end, pattern, step.get("content", ""))
        fused = fused or step["type"] in ("Fuse", "ByteLevel")
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        for pattern in CLEANED:
            open_end = _after_replacing(open_end, pattern, pattern[1:])
    return DecoderTraits(any(step["type"] == "ByteFallback" for step in steps), open_end)


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


def _after_replacing(open_end: int, pattern: str | None, content: str) -> int:
    """The open end of a text in which `pattern` (None: anything) has been replaced by `content`."""
    if pattern is None:
        return ENDLESS
    wider = max(1, -(-len(content) // len(pattern)))  # characters for each one, at most
    return min(ENDLESS, (open_end + len(pattern) - 1) * wider)


def is_byte(tokenizer: Any, token: int) -> bool:
    """Whether a token is written as a byte, such as <0xE4>."""
    name = getattr(tokenizer, "id_to_token", None) or getattr(tokenizer, "convert_ids_to_tokens", None)
    return name is not None and BYTE.fullmatch(name(token) or "") is not None

"""Bounds of a text's growth by a tokenizer.json: sixty replacements of "a" by "aa" make 10^18 letters of one."""

import json
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GROWTH_LIMIT = 1000  # times; published tokenizers reach 8
_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def unbounded_part(tokenizer: "Tokenizer") -> str | None:
    """The part that could make a text more than GROWTH_LIMIT times as long, or None."""
    for part in _STEPS:
        state = getattr(tokenizer, part).__getstate__() if getattr(tokenizer, part) is not None else None
        if isinstance(state, bytes) and _growth(json.loads(state), _STEPS[part]) > GROWTH_LIMIT:
            return part
    return None


def _growth(step: Mapping[str, Any], steps: str) -> int:
    """The times by which a step, or a sequence of them, lengthens a text at most."""
    match step["type"]:
        case "Sequence":
            return prod(_growth(one, steps) for one in step[steps])
        case "Replace":
            # A regular expression may match nothing, between any two characters.
            matched = len(step["pattern"].get("String", ""))
            return max(1, -(-len(step["content"]) // matched)) if matched else 1 + len(step["content"])
        case "ByteLevel":
            return 2  # letters of two bytes for bytes
        case _:
            return 1

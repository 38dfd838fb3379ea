"""Where a rendered turn ends: what stands after the last text that it says, and whether a model can stop there."""

import re
from collections.abc import Iterable

from .proof import forms
from .said import Message, said

_STOPS = re.compile(r"</s?>|<[^<>/\s][^<>\s]*>|\[/?[A-Z_]+\]")  # what looks like a special token
_MARKER = re.compile(rf"\s*({_STOPS.pattern})")


def tail_of(message: Message, text: str) -> tuple[str, str]:
    """(the last text in which a rendered turn says something, what stands after it); ("", text) of a silent turn."""
    written = [form for piece in said(message) for form in forms(piece.text)]
    end, last = max(((text.rfind(form) + len(form), form) for form in written if form in text), default=(0, ""))
    return last, text[end:]


def has_token(text: str, special: Iterable[str] = ()) -> bool:
    """Whether a text has something that looks like a special token, or one of those that are known."""
    return bool(_STOPS.search(text)) or any(token and token in text for token in special)


def marker_at(text: str, start: int, special: Iterable[str] = ()) -> str | None:
    """The space and special token with which the text goes on, a role's marker for example; None without one.

    special: tokens that are known, whatever they look like.
    """
    marker = _MARKER.match(text, start)
    known = [token for token in special if token and text[start:].lstrip().startswith(token)]
    if marker is None and known:
        at = text.index(max(known, key=len), start)
        return text[start : at + len(max(known, key=len))]
    return marker.group() if marker else None


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in one piece where one begins as the last ends, without empty ones."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif stop > start:
            found.append((start, stop))
    return found

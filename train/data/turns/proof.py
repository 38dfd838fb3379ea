"""Whether a rendered conversation has all that its turns say, each at a place of its own.

The one check of training, evaluation and sampling. The longest text is looked for first, and the place where it stands
is used up: a text within another, or one that is said twice, proves nothing for the other.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from fnmodels.errors import UserError

from .marks import with_marks
from .said import Message, Piece, is_media, others, said, texts_in, tool_pieces

USED = "\ufdd2"  # a noncharacter, which occurs in no text
Render = Callable[[Sequence[Message]], str]
_JSON = (partial(json.dumps, ensure_ascii=False, default=str), partial(json.dumps, default=str))
Changed = Callable[[Message], tuple[str, str]]


def forms(piece: str) -> Iterator[str]:
    """The ways in which a template may write a text: as it is, in JSON, or true and false as Python does."""
    yield piece
    yield from (json.dumps(piece, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    yield from {"true": ("True",), "false": ("False",)}.get(piece, ())


def missing(pieces: Iterable[tuple[str, Piece]], text: str) -> tuple[str, Piece] | None:
    """The first of the (turn, piece) without a place of its own in the text; None where each has one."""
    without = None
    for where, piece in sorted(pieces, key=lambda pair: (-len(pair[1].text), not pair[1].needed)):
        form = next((form for form in forms(piece.text) if form in text), None)
        if form is not None:
            text = text.replace(form, USED, 1)
        elif piece.needed and without is None:
            without = where, piece
    return without


def check_target(messages: Sequence[Message], turns: Sequence[int], target: str) -> None:
    """UserError where something that these turns say, reasoning included, is not in the text trained for them."""
    found = [
        (_where(messages, index), replace(piece, needed=True))
        for index in turns
        for piece in said(messages[index], _where(messages, index))
        if not piece.label
    ]
    if without := missing(found, target):
        raise _left_out(*without, "the text that would be trained")


def check_context(
    messages: Sequence[Message], text: str, render: Render, tools: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """UserError where the text lacks something that a turn says, or a tool, or has a list or None in its place.

    The reasoning of the assistant's turns may be missing: published templates leave it out of the context of later
    turns by design, and where a turn is trained `check_target` wants it.

    Args:
        messages: the turns that the model reads.
        text: their rendered text, which may go on.
        render: renders other turns with the same template and tools.
        tools: the tools that the template was told of.
    """
    pieces = [("the conversation", piece) for piece in tool_pieces(tools, messages)]
    for index in range(len(messages)):
        where = _where(messages, index)
        pieces += [(where, piece) for piece in said(messages[index], where)]
    if without := missing(pieces, text):
        raise _left_out(*without, "the rendered text")
    _check_short(messages, render)
    whole = cache(lambda: render(messages))

    def changed(index: int, message: Message) -> tuple[str, str]:
        """The text of the turns, and that with another one in the place of a turn."""
        return whole(), render([*messages[:index], message, *messages[index + 1 :]])

    for index, message in enumerate(messages):
        where = _where(messages, index)
        _check_writing(message, where, text, partial(changed, index))
        _check_traces(message, where, partial(changed, index))


def _check_short(messages: Sequence[Message], render: Render) -> None:
    """UserError where a text that is too short to be looked for, such as A or 4, is not written.

    In its place a mark is, and the turns are rendered with it.
    """
    marked, marks = with_marks(messages)
    if not marks:
        return
    try:
        text = render(marked)
    except UserError:  # the template looks at the text itself
        return
    for mark, (index, piece) in marks.items():
        if not any(form in text for form in forms(mark)):
            raise _left_out(_where(messages, index), piece, "the rendered text")


def _check_writing(message: Message, where: str, text: str, changed: Changed) -> None:
    """UserError for a list of parts or null that is written as Python or JSON shows it."""
    content = message.get("content")
    if isinstance(content, (list, tuple)) and _shown_parts(content, text):
        raise UserError(f"the chat template writes the parts of {where} as a list: give its content as one text")
    if isinstance(content, Mapping) and content and str(dict(content)) in text:
        raise UserError(f"the chat template writes the result of {where} as Python shows it: give it as a text of JSON")
    if content is None and "content" in message:
        before, after = changed({**message, "content": ""})
        if before.count("None") > after.count("None"):
            raise UserError(f"the chat template writes None for {where}, whose content is null: give it an empty text")


def _shown_parts(parts: Sequence[Any], text: str) -> bool:
    """Whether the text has one of the parts, which are objects, as Python or JSON shows it: {"type": "text", ...}.

    Spaces, the order of keys and the form of the list around it are the template's choice.
    """
    shown = "".join(text.split())
    for part in parts:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part["text"].strip():
            values = {name: value for name, value in part.items() if value is not None}
            pairs = [
                {"".join(f"{write(name)}:{write(value)}".split()) for write in (repr, *_JSON)}
                for name, value in values.items()
            ]
            if all(any(pair in shown for pair in forms_of_one) for forms_of_one in pairs):
                return True
    return False


def _check_traces(message: Message, where: str, changed: Changed) -> None:
    """UserError where a picture or a switch, of which no text tells, makes no difference to the rendered text."""
    content = message.get("content")
    content = content if isinstance(content, (list, tuple)) else ()
    for number, part in enumerate(content):
        if (
            isinstance(part, Mapping)
            and not isinstance(part.get("text"), str)
            and (is_media(part) or not texts_in(part))
        ):
            before, after = changed({**message, "content": [*content[:number], *content[number + 1 :]]})
            if before == after:
                kind = part.get("type")
                raise UserError(f"the chat template leaves out part {number + 1} of {where}, of type {kind!r}")
    for name, value in others(message).items():
        if not texts_in(value):
            before, after = changed({key: message[key] for key in message if key != name})
            if before == after:
                raise UserError(f"the chat template leaves out {name!r} of {where}: {value!r:.40}")


def _where(messages: Sequence[Message], index: int) -> str:
    return f"turn {index + 1} of {len(messages)}"


def _left_out(where: str, piece: Piece, place: str) -> UserError:
    advice = f"; if it is nothing that the model should read, remove {piece.key!r} from the turns" if piece.key else ""
    return UserError(
        f"the chat template leaves out the {piece.what} of {where}: {piece.text[:40]!r} has no place of its own in "
        f"{place}{advice}"
    )

"""The texts in a turn of a conversation, each of which a chat template has to write.

Every key of a turn is one of four: a key of this file whose texts are read, bookkeeping, the switch that makes a turn
context, or another, all of whose texts count as said. So a key that nobody knows is written by the template, or the
conversation is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fnmodels.errors import UserError

Message = Mapping[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking")
TOOL_ROLES = ("tool", "function", "ipython")
TRAINED = ("weight", "train", "training", "trainable", "loss")  # 0 or false: the turn is context
_BOOKKEEPING = """id index type tool_call_id message_id parent_id turn_id turn_identifier conversation_id uuid object
    created created_at timestamp date time model source origin provider info meta metadata annotations usage tokens
    token_count num_tokens logprobs finish_reason stop_reason end_turn cache_control score rating rank quality language
    lang country state header hashed_ip toxic redacted"""
BOOKKEEPING = frozenset(_BOOKKEEPING.split())  # numbers, dates and origins of a turn, none of which it says
# What formats keep beside the turns of a conversation, and what to do with it here.
BESIDE = {
    "system": "make it the first turn",
    "functions": "give them as 'tools'",
    "tools": "write them into the first turn",
    "documents": "write them into a turn",
    "chat_template_kwargs": "set them in the chat template",
}
MEDIA = re.compile("image|picture|video|audio|file")
# Names that say no more than the role.
ROLES = frozenset(("user", "human", "assistant", "model", "bot", "gpt", "ai", "system", "developer"))
TAGGED = re.compile(r"<\|?/?\w[^<>]*\|?>|\[/?[A-Z_]+\]")  # what a template may take for the tags of a reasoning


@dataclass(frozen=True)
class Piece:
    """A text that a turn says. needed: whether the context of other turns must have it, too.

    label: whether it stands in the turn's header, as a name does, and not in what is said. key: the key of the turn
    that holds it, where templates mostly have no place for it.
    """

    what: str
    text: str
    needed: bool = True
    label: bool = False
    key: str = ""


def fault_beside(record: Mapping[str, Any], *read: str) -> str:
    """Why a record would lose a part of its conversation, "" where it would not. read: the keys that are read."""
    name = next((name for name in BESIDE if name not in read and record.get(name)), None)
    return "" if name is None else f"{name!r} stands beside the turns and would be left out: {BESIDE[name]}"


def is_trained(message: Message) -> bool:
    """Whether a turn is one of the assistant to train on. UserError for a weight that is neither 0 nor 1."""
    values = {name: message[name] for name in TRAINED if message.get(name) is not None}
    for name, value in values.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise UserError(f"{name!r} of a turn is {value!r:.40}: it must be 1 or true, or 0 or false for context")
    return message.get("role") == "assistant" and all(values.values())


def others(message: Message) -> dict[str, Any]:
    """The keys of a turn that this file does not know, and that hold something."""
    known = {"role", "content", "name", "tool_calls", "function_call", *REASONING, *TRAINED, *BOOKKEEPING}
    return {
        name: value for name, value in message.items() if name not in known and value not in (None, "", [], {}, False)
    }


def said(message: Message, where: str = "the turn") -> list[Piece]:
    """All that a turn says: texts, reasoning, the names and values of tool calls, and what other keys hold.

    A reasoning that a turn has several times, within its text and beside it, is said once.

    Raises:
        UserError: a content, a part or a tool call is none that a template can read; `where` names the turn.
    """
    pieces = list(_content(message, where))
    thoughts = {piece.text for piece in pieces if piece.what == "reasoning"}
    for name in REASONING:
        if (value := message.get(name)) and (text := str(value).strip()) not in thoughts:
            thoughts.add(text)
            pieces.append(Piece("reasoning", text, needed=False))
    pieces += [Piece("tool call", text) for text in _calls(message, where)]
    name = str(message.get("name") or "").strip()
    if message.get("role") not in TOOL_ROLES and name.lower() not in ROLES:
        pieces.append(Piece("name", name, label=True, key="name"))
    pieces += [Piece(repr(key), text, key=key) for key, value in others(message).items() for text in texts_in(value)]
    pieces = [piece for piece in pieces if piece.text]
    if not pieces and "content" not in message:
        raise UserError(f"{where} has no content: give it one, which may be an empty text")
    return pieces


def _content(message: Message, where: str) -> Iterator[Piece]:
    content, role = message.get("content"), message.get("role")
    if isinstance(content, Mapping) and role in TOOL_ROLES:  # what a tool gives back
        yield from (Piece("result", text) for text in values_of(content))
        return
    if not isinstance(content, (str, list, tuple, type(None))):
        raise UserError(f"the content of {where} is {content!r:.40}: it must be a text, a list of parts, or null")
    for number, part in enumerate([content or ""] if isinstance(content, (str, type(None))) else content, 1):
        if not isinstance(part, (str, Mapping)):
            raise UserError(f"part {number} of {where} is {part!r:.40}: it must be a text or an object")
        if isinstance(part, str) or isinstance(part.get("text"), str):
            yield from _spoken(part if isinstance(part, str) else part["text"], role)
        elif not is_media(part):
            keys = {name: value for name, value in part.items() if name not in BOOKKEEPING}
            yield from (Piece(f"part {number}", text) for text in texts_in(keys))


def _spoken(text: str, role: Any) -> Iterator[Piece]:
    """The pieces of a text; reasoning within tags may be moved, and be left out of the context of later turns."""
    pieces = re.split("(</?think>)", text)
    plain = role != "assistant" or not TAGGED.search("".join(pieces[::2]))
    for number in range(0, len(pieces), 2):
        thought = role == "assistant" and pieces[number + 1 : number + 2] == ["</think>"]
        yield Piece("reasoning" if thought else "text", pieces[number].strip(), needed=plain and not thought)


def is_media(part: Mapping[str, Any]) -> bool:
    """Whether a part is a picture or the like, for which a template writes a place and nothing of what it holds."""
    return any(MEDIA.search(str(name)) for name in (part.get("type"), *part))


def refuse_media(messages: Sequence[Message]) -> None:
    """UserError for a picture or a sound in a conversation that is to be trained on as text alone."""
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping) and not isinstance(part.get("text"), str) and is_media(part):
                raise UserError(
                    f"turn {number} of {len(messages)} has a part of type {part.get('type')!r}, and conversations are "
                    "trained on as text alone: the template would write a place for it, and nothing would fill it"
                )


def _calls(message: Message, where: str) -> Iterator[str]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise UserError(f"'tool_calls' of {where} is {calls!r:.40}: it must be a list of calls")
    for call in [*calls, *([message["function_call"]] if message.get("function_call") else [])]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"a tool call of {where} is {call!r:.60}: it must be a function with a name")
        yield function["name"]
        yield from values_of(function.get("arguments"))


def values_of(arguments: Any) -> list[str]:
    """The names and values in a tool call's arguments, which may be JSON in a text."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return [arguments.strip()]
        return [arguments.strip()] if isinstance(parsed, str) else values_of(parsed)
    if isinstance(arguments, Mapping):
        return [text for name, value in arguments.items() for text in (str(name), *_leaf(value))]
    return _leaf(arguments)


def _leaf(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return values_of(value)
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _leaf(item)]
    return [] if value is None else [value.strip() if isinstance(value, str) else json.dumps(value, default=str)]


def texts_in(value: Any) -> list[str]:
    """The texts in a value, without the names of fields."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in texts_in(item)]
    return [value.strip()] if isinstance(value, str) and value.strip() else []


def tool_pieces(tools: Sequence[Mapping[str, Any]] | None, messages: Sequence[Message]) -> list[Piece]:
    """The name of each tool, and those of its parameters, without tools that a system turn describes in its text."""
    pieces = []
    systems = [str(message.get("content")) for message in messages if message.get("role") in ("system", "developer")]
    for tool in tools or ():
        function = tool.get("function", tool)
        function = function if isinstance(function, Mapping) else tool
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        names = [function.get("name") or tool.get("type"), *(properties if isinstance(properties, Mapping) else ())]
        names = [str(name) for name in names if name]
        described = [*names, str(function.get("description") or "")]
        if not any(all(name in system for name in described) for system in systems):
            pieces += [Piece("tool", name) for name in names]
    return pieces

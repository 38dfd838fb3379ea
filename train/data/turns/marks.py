"""Turns with marks in the place of short texts.

A text of a few characters, such as an answer A or an argument 4, stands somewhere in every rendered conversation:
that it is there does not prove that the template wrote it. A mark stands nowhere else.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .said import TAGGED, TOOL_ROLES, Message, Piece

SHORT = 3  # characters of a text that is marked
END = "\ufdd3"  # of a mark; a noncharacter, which occurs in no text


def with_marks(messages: Sequence[Message]) -> tuple[list[Message], dict[str, tuple[int, Piece]]]:
    """(the turns, {mark: (index of a turn, the text in whose place it stands)}).

    Texts, what tools give back, and the names and values of arguments are marked; not what `said` does not need in the
    context of later turns.
    """
    marks: dict[str, tuple[int, Piece]] = {}
    return [_Marking(index, marks).message(message) for index, message in enumerate(messages)], marks


@dataclass
class _Marking:
    """Marks one turn, and notes the marks."""

    index: int
    marks: dict[str, tuple[int, Piece]]
    what: str = field(default="text", init=False)

    def message(self, message: Message) -> Message:
        marked, content = dict(message), message.get("content")
        if isinstance(content, str):
            marked["content"] = self.spoken(content, message)
        elif isinstance(content, (list, tuple)):
            marked["content"] = [self.part(part, message) for part in content]
        elif isinstance(content, Mapping) and message.get("role") in TOOL_ROLES:
            self.what = "result"
            marked["content"] = self.values(content)
        self.what = "tool call"
        if message.get("tool_calls"):
            marked["tool_calls"] = [self.call(call) for call in message["tool_calls"]]
        if message.get("function_call"):
            marked["function_call"] = self.call(message["function_call"])
        return marked

    def part(self, part: Any, message: Message) -> Any:
        if isinstance(part, str):
            return self.spoken(part, message)
        return {**part, "text": self.spoken(part["text"], message)} if isinstance(part.get("text"), str) else part

    def spoken(self, text: str, message: Message) -> str:
        if message.get("role") == "assistant" and TAGGED.search(text):
            return text
        return self.text(text)

    def call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        if "function" in call:
            return {**call, "function": self.call(call["function"])}
        return {**call, "arguments": self.arguments(call["arguments"])} if "arguments" in call else call

    def arguments(self, arguments: Any) -> Any:
        """The arguments, which may be JSON in a text."""
        if not isinstance(arguments, str):
            return self.values(arguments)
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return self.text(arguments)
        marked = self.values(parsed)
        return arguments if marked == parsed else json.dumps(marked, ensure_ascii=False)

    def values(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.values(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.values(one) for one in value]
        if isinstance(value, str):
            return self.text(value)
        marked = self.text(written) if (written := json.dumps(value, default=str)) and value is not None else written
        return value if marked == written else marked

    def text(self, text: str) -> str:
        """The mark of a short text, or else the text."""
        if not 0 < len(text.strip()) <= SHORT:
            return text
        mark = f"{END}{len(self.marks)}{END}"
        self.marks[mark] = self.index, Piece(self.what, text.strip())
        return mark

"""Tools of chats: what a request says of them, and the calls in an answer, <tool_call>JSON</tool_call>.

That form is Hermes' and Qwen's. Answers of models whose template writes calls otherwise are not read, so tools are
refused there.
"""

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from params.io.files import parse_line
from train.generation.stop import StopText

from .body import Body
from .errors import ApiError
from .model import Model

BEGIN, END = "<tool_call>", "</tool_call>"
TOOLS = 128  # of one request
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def tools_of(body: Body, model: Model) -> list[dict[str, Any]]:
    """The tools that the template of a chat is told of, as the request has them; none where none may be called.

    ApiError for tools of another form, for a choice that cannot be kept, and for a model that has no such calls.
    """
    given: Any = body.take("tools", [])
    if not isinstance(given, list) or len(given) > TOOLS or not all(isinstance(one, dict) for one in given):
        raise body.wrong("tools", f"a list of at most {TOOLS} objects")
    for number, one in enumerate(given):
        _check_tool(Body(one, f"tools[{number}]."))
    choice, several = body.take("tool_choice", "auto"), body.flag("parallel_tool_calls", True)
    if choice not in ("auto", "none"):
        raise body.wrong("tool_choice", '"auto" or "none": this server forces no call')
    if not given:
        return []
    if not several:
        raise body.wrong("parallel_tool_calls", "true, or left out: an answer may have several calls")
    if choice == "none":
        return []
    _check_form(model)
    return given


def _check_tool(tool: Body) -> None:
    if tool.take("type") != "function":
        raise tool.wrong("type", '"function"')
    function = tool.object("function")
    if function is None:
        raise tool.missing("function", "an object")
    tool.finish()
    if not _NAME.fullmatch(function.needed("name")):
        raise function.wrong("name", "a name of at most 64 letters, digits, dots, dashes and underscores")
    function.text("description"), function.object("parameters")
    if function.flag("strict"):
        raise function.wrong("strict", "false, or left out: arguments are not held to their schema")
    function.finish()


def _check_form(model: Model) -> None:
    source, tokenizer = model.template.source, model.tokenizer
    if BEGIN not in source or "arguments" not in source:
        raise ApiError(
            400,
            f"The chat template of {model.name} writes no calls of the form {BEGIN}{{...}}{END}, which alone are read "
            "here: leave tools out.",
            param="tools",
        )
    shown = tokenizer.decode(tokenizer.encode(BEGIN, add_special_tokens=False).ids, skip_special_tokens=True)
    if BEGIN not in shown:
        raise ApiError(
            400,
            f"{BEGIN} is a special token of {model.name}, which texts of answers are without: leave tools out.",
            param="tools",
        )


def parted(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(the text before the first call, the calls); all of the text and no calls where one of them is malformed."""
    before, *rest = text.split(BEGIN)
    calls = [_call(one) for one in rest]
    if any(one is None for one in calls):
        return text, []
    return before, [one for one in calls if one is not None]


def _call(text: str) -> dict[str, Any] | None:
    """The call that a text begins with, behind the marker."""
    written, closed, behind = text.partition(END)
    try:
        found = parse_line(written.strip())
    except ValueError:
        return None
    if not closed or behind.strip() or not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), found.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass
class CallStream:
    """A choice as it is streamed: text is sent until a call may begin, and calls when the choice has ended."""

    text: str = ""
    sent: int = 0
    stop: StopText = field(default_factory=lambda: StopText([BEGIN]))

    def push(self, piece: str, *, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """(text to send, calls to send)."""
        self.text += piece
        shown, calls = self.stop.push(piece), list[dict[str, Any]]()
        if ended:
            content, calls = parted(self.text)
            shown = content[self.sent :]
        self.sent += len(shown)
        return shown, calls

"""Arguments of tool calls in the form that a template reads: as objects, or as JSON in a text."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fnmodels.errors import UserError

from .said import Message, texts_in

Rendering = Callable[[Sequence[Message]], str]


def render_calls(messages: Sequence[Message], render: Rendering) -> str:
    """The rendered text of turns, whose calls have arguments in either form, as an API or as transformers has them.

    A template gets objects, which most of them write as JSON: a text would be JSON within JSON. One that puts texts
    together fails with an object, or writes it as Python shows it, and gets the text that is given, or JSON.

    Args:
        messages: the turns.
        render: renders turns.

    Returns:
        The text.

    Raises:
        UserError: the template fails with both forms.
    """
    objects = _with_arguments(messages, _parsed)
    arguments = [value for message in objects for value in _arguments(message) if isinstance(value, Mapping)]
    if not arguments:
        return render(messages)
    try:
        text = render(objects)
    except UserError as error:
        try:
            return render(_with_arguments(messages, _written))
        except UserError:
            raise error from None
    spoken = "\n".join(text for message in messages for text in texts_in(message.get("content")))
    shown = (str(dict(value)) for value in arguments if value)
    if any(text.count(value) > spoken.count(value) for value in shown):
        return render(_with_arguments(messages, _written))
    return text


def _functions(message: Message) -> Iterator[Any]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, (list, tuple)) else ():
        yield call.get("function", call) if isinstance(call, Mapping) else None
    yield message.get("function_call")


def _arguments(message: Message) -> Iterator[Any]:
    yield from (function.get("arguments") for function in _functions(message) if isinstance(function, Mapping))


def _with_arguments(messages: Sequence[Message], form: Callable[[Any], Any]) -> list[Message]:
    """The turns with the arguments of each call in another form."""

    def changed(function: Any) -> Any:
        has = isinstance(function, Mapping) and "arguments" in function
        return {**function, "arguments": form(function["arguments"])} if has else function

    def changed_call(call: Any) -> Any:
        wrapped = isinstance(call, Mapping) and "function" in call
        return {**call, "function": changed(call["function"])} if wrapped else changed(call)

    turns = []
    for message in messages:
        own: dict[str, Any] = {}
        if isinstance(calls := message.get("tool_calls"), (list, tuple)):
            own["tool_calls"] = [changed_call(call) for call in calls]
        if "function_call" in message:
            own["function_call"] = changed(message["function_call"])
        turns.append({**message, **own} if own else message)
    return turns


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _written(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments

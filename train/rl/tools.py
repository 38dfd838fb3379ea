"""Tools: an environment of plain Python functions, which the model calls between markers.

    <tool_call>{"name": "calculate", "arguments": {"expression": "17*3"}}</tool_call>

A call that cannot be run is refused in a sentence, which the model reads as its observation. It never ends the run.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from params.io.files import parse_line

from .environment import Message, Outcome
from .prompts import Checker

BEGIN, END = "<tool_call>", "</tool_call>"
Tool = Callable[..., Any]
KINDS: dict[Any, tuple[type, ...]] = {float: (int, float), **{kind: (kind,) for kind in (int, str, bool, list, dict)}}


@dataclass(frozen=True)
class Task:
    """A task with tools.

    Args:
        messages: What the model answers first.
        answer: What the checker compares the last turn with.
        tools: The functions that the model may call, by their names.
    """

    messages: Sequence[Message]
    answer: Any
    tools: Sequence[Tool]


class Tools:
    """An environment in which a turn either calls tools or is the answer, which ends the conversation.

    Args:
        task: The task of a seed.
        checker: (answer, record) -> reward of the answer, of `train.rl.prompts`.
    """

    def __init__(self, task: Callable[[int], Task], checker: Checker) -> None:
        self._task_of, self._checker = task, checker
        self._task = Task((), None, ())

    def reset(self, seed: int) -> Sequence[Message]:
        """Begins the task of a seed, see `Environment.reset`."""
        self._task = self._task_of(seed)
        return self._task.messages

    def step(self, text: str) -> Outcome:
        """Runs the calls of a turn in order, one line for each, or judges a turn that has none."""
        if BEGIN not in text:
            return Outcome("", float(self._checker(text, {"answer": self._task.answer})), done=True)
        tools = {tool.__name__: tool for tool in self._task.tools}
        found = [run_call(tools, call) for call in text.split(BEGIN)[1:]]
        return Outcome("\n".join(line for line, _ in found), mistakes=sum(refused for _, refused in found))


def run_call(tools: Mapping[str, Tool], text: str) -> tuple[str, bool]:
    """(what the tool returned, False), or (a sentence that refuses the call, True).

    Args:
        tools: {name: function}.
        text: What follows the marker that begins a call.

    Returns:
        The observation, and whether it is a refusal. What is no text is written as JSON.
    """
    written, closed, _ = text.partition(END)
    if not closed:
        return f"The call does not end with {END}.", True
    try:
        call = parse_line(written.strip())
    except ValueError:
        return 'The call is not JSON of the form {"name": ..., "arguments": {...}}.', True
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "The call has no name of a tool.", True
    name, arguments = call["name"], call.get("arguments", {})
    if name not in tools:
        return f"There is no tool {name!r:.40}; the tools are {', '.join(tools)}.", True
    if not isinstance(arguments, dict):
        return f"The arguments of {name} are no object.", True
    if fault := _mismatch(name, tools[name], arguments):
        return fault, True
    try:
        result = tools[name](**arguments)
    except Exception as error:  # of the arguments as a rule: the model reads it, and the metrics count it
        return f"{name} failed: {str(error) or type(error).__name__}.", True
    return (result if isinstance(result, str) else json.dumps(result, default=str)), False


def _mismatch(name: str, tool: Tool, arguments: Mapping[str, Any]) -> str:
    """A sentence where the function does not take these arguments; "": it does."""
    signature = inspect.signature(tool, eval_str=True)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return f"{name} cannot be called so: {error}."
    for key, value in arguments.items():
        parameter = signature.parameters.get(key)
        kinds = KINDS.get(parameter.annotation) if parameter is not None else None
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return f"The argument {key} of {name} is {json.dumps(value):.40}; it must be {kinds[-1].__name__}."
    return ""


def described(tools: Sequence[Tool]) -> str:
    """The tools as text for a system message: each function's signature and the first line of its docstring."""
    lines = [
        f"{tool.__name__}{inspect.signature(tool)}: {(tool.__doc__ or '').strip().partition(chr(10))[0]}"
        for tool in tools
    ]
    form = f'{BEGIN}{{"name": NAME, "arguments": {{...}}}}{END}'
    return "\n".join([f"A tool is called by writing {form}. The tools are:", *lines])

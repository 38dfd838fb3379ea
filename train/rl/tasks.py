"""Two tasks with tools that a tiny model learns in minutes, and demonstrations for its supervised warm start."""

import ast
import json
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

from .environment import MakeEnvironment
from .prompts import CHECKERS
from .tools import BEGIN, END, Task, Tools, run_call

MOST_LETTERS, MOST_DIGITS = 60, 12
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
SYLLABLES = ("ka", "lo", "mi", "nu", "pe", "ra", "su", "ti", "vo", "zu")
COLOURS = ("red", "blue", "green", "white", "black", "pink", "brown", "grey")
FACTS = 6  # in the table of a search task


def calculate(expression: str) -> int:
    """The value of an expression of whole numbers with +, - and *."""
    if len(expression) > MOST_LETTERS:
        raise ValueError(f"the expression has more than {MOST_LETTERS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("the expression cannot be read") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and len(str(node.value)) <= MOST_DIGITS:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"an expression has whole numbers of at most {MOST_DIGITS} digits, +, - and *")


def sums(seed: int) -> Task:
    """A product, a sum or a difference of two numbers, with a calculator."""
    draw = random.Random(seed)
    expression = f"{draw.randrange(2, 21)}{draw.choice('+-*')}{draw.randrange(2, 21)}"
    return Task([{"role": "user", "content": f"What is {expression}?"}], calculate(expression), [calculate])


def facts(seed: int) -> Task:
    """A question about a small table of facts that only a search finds: names and colours are drawn anew each time."""
    draw = random.Random(seed)
    names = ["".join(pair) for pair in draw.sample([(a, b) for a in SYLLABLES for b in SYLLABLES if a != b], FACTS)]
    table = {name: draw.choice(COLOURS) for name in names}

    def search(query: str) -> str:
        """The facts about a name."""
        found = [f"{name} is {colour}" for name, colour in table.items() if name in query.split()]
        return "; ".join(found) or "nothing was found"

    question = f"Which colour is {names[0]}?"
    return Task([{"role": "user", "content": question}], table[names[0]], [search])


def calculator_environment() -> Tools:
    """The task `sums`: the last number of the answer must be the value."""
    return Tools(sums, CHECKERS["number"])


def search_environment() -> Tools:
    """The task `facts`: the answer must be the colour."""
    return Tools(facts, CHECKERS["equal"])


ENVIRONMENTS: dict[str, MakeEnvironment] = {"calculator": calculator_environment, "search": search_environment}
_TASKS = {"calculator": sums, "search": facts}


def demonstrations(name: str, count: int, *, seed: int = 0, right: float = 0.4) -> Iterator[dict[str, Any]]:
    """Conversations for a warm start, of which a share solves its task: the rest is left to reinforcement learning.

    Args:
        name: The task, "calculator" or "search".
        count: The number of conversations.
        seed: Of all draws; demonstrations and reinforcement learning have no task seed in common.
        right: The share of conversations that call the tool and repeat what it returns. The others guess at once.

    Yields:
        Records with `messages`, as `fnmodels-train --data` reads them.
    """
    draw = random.Random(seed)
    for _ in range(count):
        task_seed = (1 << 40) + draw.randrange(1 << 31)
        task = _TASKS[name](task_seed)
        messages = [dict(message) for message in task.messages]
        if draw.random() < right:
            asked = str(messages[-1]["content"]).rstrip("?").split()[-1]
            arguments = {"expression" if name == "calculator" else "query": asked}
            call = json.dumps({"name": task.tools[0].__name__, "arguments": arguments}) + END
            observed, _ = run_call({tool.__name__: tool for tool in task.tools}, call)
            messages += [{"role": "assistant", "content": BEGIN + call}, {"role": "tool", "content": observed}]
            answer = str(task.answer)
        else:
            answer = str(draw.randrange(100) if name == "calculator" else draw.choice(COLOURS))
        yield {"messages": [*messages, {"role": "assistant", "content": answer}]}

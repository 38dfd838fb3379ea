"""Tools: calls between markers, and mistakes that the model reads as sentences."""

import json

import pytest

from tests.train.rl.scene import PARAMS, scene
from train.rl.conversation import Conversation
from train.rl.environment import Outcome, checked_messages, checked_outcome, environment_of
from train.rl.prompts import CHECKERS
from train.rl.rollouts import Draws, rollouts
from train.rl.tasks import ENVIRONMENTS, calculate, demonstrations
from train.rl.tools import BEGIN, END, Task, Tools, described


def add(a: int, b: float = 2) -> float:
    """The sum of two numbers."""
    return a + b


def divide(a: int, b: int) -> dict[str, float]:
    return {"quotient": a / b}


def names() -> str:
    return "add, divide"


def begun() -> Tools:
    tools = Tools(
        lambda seed: Task([{"role": "user", "content": str(seed)}], 7, [add, divide, names]), CHECKERS["number"]
    )
    tools.reset(0)
    return tools


def call(name: str, **arguments: object) -> str:
    return f"{BEGIN}{json.dumps({'name': name, 'arguments': arguments})}{END}"


CALLS = {
    call("add", a=2, b=0.5): ("2.5", 0),
    call("add", a=2): ("4", 0),
    call("divide", a=1, b=2): ('{"quotient": 0.5}', 0),
    f'{BEGIN}\n{{"name": "names"}}\n{END}': ("add, divide", 0),
    call("add", a=1, b=1) + " and " + call("add", a=2, b=2): ("2\n4", 0),
    call("subtract", a=1): ("There is no tool 'subtract'; the tools are add, divide, names.", 1),
    f"{BEGIN}add(1, 2){END}": ('The call is not JSON of the form {"name": ..., "arguments": {...}}.', 1),
    f"{BEGIN}[]{END}": ("The call has no name of a tool.", 1),
    f'{BEGIN}{{"name": "add"': (f"The call does not end with {END}.", 1),
    f'{BEGIN}{{"name": "add", "arguments": [1]}}{END}': ("The arguments of add are no object.", 1),
    call("add", a="1"): ('The argument a of add is "1"; it must be int.', 1),
    call("add", a=True): ("The argument a of add is true; it must be int.", 1),
    call("add", a=1, c=2): ("add cannot be called so: got an unexpected keyword argument 'c'.", 1),
    call("add"): ("add cannot be called so: missing a required argument: 'a'.", 1),
    call("divide", a=1, b=0): ("divide failed: division by zero.", 1),
    BEGIN + "[" * 5000 + END: ('The call is not JSON of the form {"name": ..., "arguments": {...}}.', 1),
    call("add", a=1) + call("none"): ("3\nThere is no tool 'none'; the tools are add, divide, names.", 1),
}


@pytest.mark.parametrize("text", CALLS)
def test_a_call_returns_its_result_or_a_sentence(text: str) -> None:
    observed, mistakes = CALLS[text]
    assert begun().step(f"Let me see. {text}") == Outcome(observed, 0.0, False, mistakes)


def test_a_turn_without_a_call_is_judged_and_ends_the_conversation() -> None:
    assert begun().step("It is 7.") == Outcome("", 1.0, True) and begun().step("8").reward == 0


def test_tools_are_described_by_their_signatures() -> None:
    assert "add(a: int, b: float = 2) -> float: The sum of two numbers." in described([add, divide])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_demonstrations_call_the_tool_or_guess(name: str) -> None:
    for one in demonstrations(name, 20, right=1.0):
        asked, called, observed, answer = (message["content"] for message in one["messages"])
        assert asked.endswith("?") and called.startswith(BEGIN) and called.endswith(END) and answer in observed
    guessed = [len(one["messages"]) for one in demonstrations(name, 200, right=0.4)]
    assert 50 < guessed.count(2) < 170 and guessed.count(2) + guessed.count(4) == 200


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_task_is_solved_by_its_tool_and_follows_from_its_seed(name: str) -> None:
    first, again, other = (ENVIRONMENTS[name]() for _ in range(3))
    asked = first.reset(5)
    assert asked == again.reset(5) != other.reset(6)
    argument = str(asked[0]["content"]).rstrip("?").split()[-1]
    call_of = {"calculator": call("calculate", expression=argument), "search": call("search", query=argument)}
    observed = first.step(call_of[name])
    assert again.step(call_of[name]) == observed and not observed.done and not observed.mistakes
    assert first.step(observed.text.split()[-1]) == Outcome("", 1.0, True)
    assert again.step("-1000").reward == 0


def test_a_calculator_computes_numbers_alone() -> None:
    assert calculate(" 2+3*4 ") == 14 and calculate("2-20") == -18
    for wrong in ("__import__('os')", "2**9999", "9" * 13, "1.5+1", "(" * 30, "2+", "1" * 61, "~1", "True+1"):
        with pytest.raises(ValueError, match="expression"):
            calculate(wrong)


def test_a_mistaken_call_is_what_the_model_reads_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random model's turns are replaced, on their way to the environment, by a call of a tool that is not there."""
    real = Conversation.push
    monkeypatch.setattr(Conversation, "push", lambda self, event: real(self, event) and call("nothing"))
    found, _ = rollouts(scene(begun, turns=2, context=400), PARAMS, Draws(0, [1]))
    text = scene().turns.tokenizer.decode(list(found[0].tokens))
    assert found[0].mistakes == 2 and found[0].ended == "turns"
    assert "\nTool: There is no tool 'nothing'; the tools are add, divide, names.\nAssistant:" in text


def test_another_kind_of_message_or_outcome_is_named() -> None:
    for messages in ([], "hello", [{"content": "x"}], None):
        with pytest.raises(TypeError, match="it must return a list of messages"):
            checked_messages(messages)
    for outcome in (None, ("text", 1.0, True), Outcome("x", float("nan")), Outcome(3)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must"):
            checked_outcome(outcome)
    assert environment_of("search", ENVIRONMENTS) is ENVIRONMENTS["search"]

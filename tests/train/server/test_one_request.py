"""A request that fails, or that asks for too much, costs the others nothing."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.served import Served, byte_tokenizer, serving, write_checkpoint
from train.generation import batching
from train.generation.batching import ContinuousBatch
from train.generation.requests import Answer, Request
from train.server import worker as worker_file
from train.server.body import Body
from train.server.errors import ApiError
from train.server.grammar import Grammars
from train.server.worker import Ticket

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "a", "max_tokens": 80, "ignore_eos": True, "seed": 1}
SHORT = {"prompt": "Hello", "max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder) as made:
        yield made


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 ms, so that requests are under way for a while."""
    draw = ContinuousBatch.draw

    def slowly(self: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return draw(self, **options)

    monkeypatch.setattr(ContinuousBatch, "draw", slowly)


def _beside(server: Served, bodies: list[tuple[str, Any]]) -> tuple[Any, list[Any]]:
    """(the answer to `LONG`, the answers to requests that come together while it runs)."""
    found: dict[int, Any] = {}

    def ask(number: int, path: str, body: Any) -> threading.Thread:
        def run() -> None:
            found[number] = server.send(path, body)

        made = threading.Thread(target=run)
        made.start()
        return made

    long = ask(-1, TEXT, LONG)
    while "fnmodels_running 1" not in server.send("/metrics")[1]:
        time.sleep(0.005)
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        free.wait()

    server.service.worker.submit(None, [Ticket(lambda item: None, job=hold)])
    held.wait()  # the worker takes the others together
    others = [ask(number, path, body) for number, (path, body) in enumerate(bodies)]
    end = time.monotonic() + 30
    while server.service.worker._queued() < len(bodies) and len(found) < len(bodies):
        assert time.monotonic() < end
        time.sleep(0.005)
    free.set()
    for one in [*others, long]:
        one.join()
    return found[-1], [found[number] for number in range(len(bodies))]


EXTREME = (
    {"presence_penalty": 10**400},
    {"presence_penalty": -(10**400)},
    {"frequency_penalty": 1e300},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300},
    {"temperature": 10**400},
    {"min_p": 10**400},
)
SMALL = ({"temperature": 1e-300}, {"temperature": 1e-45}, {"top_p": 1e-300}, {"min_p": 1e-300}, {"top_k": 2**31 - 1})


@pytest.mark.usefixtures("slow_steps")
def test_numbers_at_the_ends_of_their_range_are_refused_or_answered(folder: Path) -> None:
    """None of them ends the answer of another client."""
    with serving(folder) as server:
        alone = server.send(TEXT, LONG)[1]["choices"]
        for body in EXTREME:
            status, answer, _ = server.send(TEXT, SHORT | body)
            (name,) = body
            assert status == 400 and answer["error"]["message"].startswith(f"{name} is "), answer
        long, others = _beside(server, [(TEXT, SHORT | body) for body in SMALL])
    assert long[0] == 200 and long[1]["choices"] == alone
    assert [status for status, _, _ in others] == [200] * len(SMALL), others


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("place", ["take", "prompt", "admission"])
def test_a_request_that_cannot_begin_ends_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Three requests are taken at once, and the second one fails: before, while or after its prompt is computed."""
    begin, prefilled, stack = Answer.__init__, batching.prefilled, batching.stack_samplings

    def refused(self: Any, row: int, request: Any, *more: Any) -> None:
        if place == "take" and request.seed == 666:
            raise OverflowError("no such seed")
        begin(self, row, request, *more)

    def chunks(params: Any, config: Any, prompts: Any, *more: Any, **options: Any) -> Any:
        if place == "prompt" and any(len(prompt) == 7 for prompt in prompts):
            raise OverflowError("no such prompt")
        return (yield from prefilled(params, config, prompts, *more, **options))

    def stacked(samplings: Any, **options: Any) -> Any:
        if place == "admission" and any(one.presence == 1.5 for one in samplings):
            raise OverflowError("no such penalty")
        return stack(samplings, **options)

    monkeypatch.setattr(Answer, "__init__", refused)
    monkeypatch.setattr(batching, "prefilled", chunks)
    monkeypatch.setattr(batching, "stack_samplings", stacked)
    bad = {"prompt": "seven__", "max_tokens": 3, "seed": 666, "presence_penalty": 1.5}
    with serving(folder) as server:
        alone = [server.send(TEXT, body)[1]["choices"] for body in (LONG, SHORT)]
        long, others = _beside(server, [(TEXT, SHORT), (TEXT, bad), (TEXT, SHORT)])
        assert long[0] == 200 and long[1]["choices"] == alone[0]
        assert [status for status, _, _ in others] == [200, 500, 200], others
        assert "OverflowError: no such" in others[1][1]["error"]["message"]
        assert others[0][1]["choices"] == others[2][1]["choices"] == alone[1]
        assert "fnmodels_running 0" in server.send("/metrics")[1]


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_gives_up_ends_its_answer_with_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The matcher reads another token than the one that was drawn, as its third; the other client goes on."""
    llguidance = pytest.importorskip("llguidance")
    real = llguidance.LLMatcher

    class Matcher:
        grammar_from_json_schema, validate_grammar = real.grammar_from_json_schema, real.validate_grammar

        def __init__(self, *arguments: Any) -> None:
            self.real, self.seen = real(*arguments), 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def consume_token(self, token: int) -> bool:
            self.seen += 1
            return bool(self.real.consume_token(token if self.seen < 3 else 0))

    monkeypatch.setattr(llguidance, "LLMatcher", Matcher)
    schema = {"type": "object", "properties": {"age": {"type": "boolean"}}, "required": ["age"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    body = {"messages": [{"role": "user", "content": "Who?"}], "response_format": form, "stream": stream}
    with serving(folder) as server:
        alone = server.send(TEXT, LONG)[1]["choices"]
        long, ((status, answer, _),) = _beside(server, [(CHAT, body)])
        assert long[0] == 200 and long[1]["choices"] == alone
        if stream:
            assert '"finish_reason": "stop"' not in answer
            answer = json.loads(answer.split("\n\n")[-3].removeprefix("data: "))
        assert status == (200 if stream else 400)
        words = answer["error"]["message"]
        assert words.startswith("The grammar of response_format gave up after 3 tokens: Parser Error"), words
        assert "fnmodels_running 0" in server.send("/metrics")[1]


def test_a_hook_of_a_grammar_raises_where_a_token_does_not_fit() -> None:
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    make = Grammars(tokenizer, 260, (257,)).hook(Body({"type": "json_object"}))
    assert make is not None
    fits, breaks = make(), make()
    allowed = torch.isfinite(fits(torch.zeros(260), []))
    assert allowed.nonzero().flatten().tolist() == tokenizer.encode("{").ids
    with pytest.raises(ApiError, match="gave up after 1 tokens: Parser Error"):
        breaks(torch.zeros(260), tokenizer.encode("x").ids)


def test_a_prompt_that_cannot_be_scored_ends_alone(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = worker_file.score_prompts

    def refusing(params: Any, config: Any, prompts: Any, **how: Any) -> Any:
        if any(len(prompt.tokens) == 7 for prompt in prompts):
            raise RuntimeError("no such prompt")
        return scores(params, config, prompts, **how)

    monkeypatch.setattr(worker_file, "score_prompts", refusing)
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1}
    alone = server.send(TEXT, scored | {"prompt": "Hello"})[1]["choices"]
    _, others = _beside(server, [(TEXT, scored | {"prompt": prompt}) for prompt in ("Hello", "seven__", "Hello")])
    assert [status for status, _, _ in others] == [200, 500, 200]
    assert others[0][1]["choices"] == others[2][1]["choices"] == alone


def test_a_model_that_cannot_begin_answers_with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(folder) as server:
        monkeypatch.setattr(worker_file, "ContinuousBatch", lambda *a, **o: (_ for _ in ()).throw(MemoryError("full")))
        status, answer, _ = server.send(TEXT, SHORT)
        assert status == 500 and "MemoryError: full" in answer["error"]["message"]
        monkeypatch.undo()
        assert server.send(TEXT, SHORT)[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": ["a"] * 1024, "n": 128, "response_format": {"type": "json_object"}}),
        (TEXT, {"prompt": ["a"] * 1024, "max_tokens": 0, "echo": True, "logprobs": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 128}),
    ],
)
def test_more_answers_than_may_wait_are_refused_before_any_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    from train.server import model, sampled

    made: list[str] = []
    monkeypatch.setattr(sampled, "Request", lambda *arguments, **options: made.append("request"))
    monkeypatch.setattr(model.Model, "text_prompt", lambda *arguments: made.append("prompt"))
    monkeypatch.setattr(model.Model, "chat_prompt", lambda *arguments: made.append("prompt"))
    with serving(folder, queue=100) as server:
        status, answer, _ = server.send(path, body)
    assert status == 400 and "this server's queue has room for 100" in answer["error"]["message"]
    assert made == []


def test_large_bodies_are_read_beside_the_servers_thread(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.server import app

    parsed, names = app.parsed, list[str]()

    def noted(data: bytes) -> Any:
        names.append(threading.current_thread().name)
        return parsed(data)

    monkeypatch.setattr(app, "parsed", noted)
    for size in (1, 100_000):
        status, answer, _ = server.send(TEXT, SHORT | {"user": "x" * size})
        assert status == 200, answer
    assert [name.startswith("fnmodels-texts") for name in names] == [False, True]


def test_a_ticket_keeps_the_first_error_of_its_hook() -> None:
    """What the hook of one request raises is kept with its ticket, and the logits are those of the model."""

    def raising(logits: Tensor, tokens: list[int]) -> Tensor:
        raise KeyError("x")

    ticket = Ticket(lambda item: None, Request([1], 1, logits_fn=raising))
    logits = torch.zeros(3)
    edit = worker_file._guarded(ticket).logits_fn
    assert edit is not None and edit(logits, []) is logits and isinstance(ticket.error, KeyError)

"""Tools of chats: what templates are told, and calls that are read out of answers, at once and streamed."""

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import llama
from tests.support.served import Served, byte_tokenizer, serving, write_checkpoint
from train.engine import Engine
from train.server.calls import CallStream, parted

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TEMPLATE = (
    '{% if tools %}<sys>Write <tool_call>{"name": ..., "arguments": ...}</tool_call>:'
    "{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
ASKED = [{"role": "user", "content": "2+3?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": [3, "é"]}}</tool_call>'
FIRST, SECOND = f"I add.\n{CALL}\n{CALL}", "It is 5."
CHAT = "/v1/chat/completions"


def _documents(folder: Path) -> list[list[int]]:
    """What the model learns by heart: the first turn with tools, and the second one behind the results."""
    from train.data.chat import read_template, render_prompt

    template, tokenizer = read_template(folder), byte_tokenizer()
    turns = [(ASKED, FIRST), (_answered(parted(FIRST)[1]), SECOND)]
    texts = [render_prompt(template, messages, tools=TOOLS) + said for messages, said in turns]
    return [[*tokenizer.encode(text, add_special_tokens=False).ids, 257] for text in texts]


def _answered(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation behind the first turn, as clients send it."""
    said = {"role": "assistant", "content": "I add.\n", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in calls]
    return [*ASKED, said, *results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has learned two turns by heart."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    config = llama.Config(260, **sizes, **heads)
    made = write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint", config)
    settings = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    engine = Engine(config, P.init(config, seed=0), train.adamw(3e-3))
    loss = functools.partial(train.next_token_loss, config=config)
    batches = [fnmodels.pack([torch.tensor(ids)], len(ids)).batch() for ids in _documents(made)]
    for _ in range(120):
        engine.forward_backward(batches, loss)
        engine.optim_step()
    P.save_pretrained(made, config, engine.params)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, context=1024) as made:
        yield made


def _body(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "tools": TOOLS} | more


def _functions(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


WANTED = [("add", {"a": 2, "b": [3, "é"]})] * 2


def test_an_answer_has_its_calls_and_goes_on_behind_their_results(server: Served) -> None:
    status, answer, _ = server.send(CHAT, _body(ASKED))
    (choice,) = answer["choices"]
    message = choice["message"]
    assert status == 200 and choice["finish_reason"] == "tool_calls" and message["content"] == "I add.\n"
    assert _functions(message["tool_calls"]) == WANTED
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    _, further, _ = server.send(CHAT, _body(_answered(message["tool_calls"])))
    (choice,) = further["choices"]
    assert choice["message"]["content"] == SECOND and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


def test_a_stream_has_the_text_at_once_and_the_calls_at_its_end(server: Served) -> None:
    events = [event["choices"][0] for event in server.events(CHAT, _body(ASKED))]
    *text, last = events
    assert "".join(event["delta"]["content"] for event in events) == "I add.\n"
    assert any(event["delta"]["content"] for event in text)  # several at a time, where the client reads late
    assert len(text) < 12  # nothing is sent for the bytes of the calls
    assert last["finish_reason"] == "tool_calls" and [call["index"] for call in last["delta"]["tool_calls"]] == [0, 1]
    assert _functions(last["delta"]["tool_calls"]) == WANTED
    whole = "".join(event["choices"][0]["delta"]["content"] for event in server.events(CHAT, _body(_answered([]))))
    assert CALL not in whole


def test_calls_are_text_where_tools_are_not_there_or_the_answer_is_cut(server: Served) -> None:
    _, cut, _ = server.send(CHAT, _body(ASKED, max_tokens=40))
    (choice,) = cut["choices"]
    assert choice["message"]["content"] == FIRST[:40] and choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    streamed = server.events(CHAT, _body(ASKED, max_tokens=40))
    assert "".join(event["choices"][0]["delta"]["content"] for event in streamed) == FIRST[:40]
    prompt = server.send(CHAT, _body(ASKED, max_tokens=1))[1]["usage"]["prompt_tokens"]
    for more in ({"tool_choice": "none"}, {"tools": []}):
        found = server.send(CHAT, _body(ASKED, max_tokens=1) | more)[1]["usage"]["prompt_tokens"]
        assert found < prompt - 80  # the template is not told of them


def test_openais_client_calls_a_function(server: Served) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "tools": TOOLS}
        message = client.chat.completions.create(messages=ASKED, **asked).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls]
        again = client.chat.completions.create(messages=[*ASKED, message, *results], **asked)
        assert again.choices[0].message.content == SECOND
        with client.chat.completions.stream(messages=ASKED, **asked) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert [call.function.arguments for call in final.message.tool_calls] == [
            call.function.arguments for call in message.tool_calls
        ]


TEXTS = [
    FIRST,
    SECOND,
    CALL,
    "a < b <tool",
    "<tool_call>{}</tool_call>",
    CALL + " and more",
    CALL[:-1],
    f"x{CALL}<tool_call>not JSON</tool_call>",
    '<tool_call>{"name": 1}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    f"{'[' * 2000}{CALL}<tool_call>{'[' * 2000}</tool_call>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_choice_in_any_pieces_is_the_whole_one(text: str) -> None:
    content, calls = parted(text)
    assert bool(calls) == (text in (FIRST, CALL)) and (calls or content == text)
    draw = random.Random(0)
    for _ in range(50):
        stream, shown, found, rest = CallStream(), "", list[dict[str, Any]](), text
        while rest:
            size = draw.randrange(1, 9 if len(text) < 1000 else 900)
            piece, rest = rest[:size], rest[size:]
            more, found = stream.push(piece, ended=not rest)
            shown += more
        assert shown == content and _functions(found) == _functions(calls)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "it must be a list of at most 128 objects"),
    ({"tools": [{}]}, 'tools[0].type is null; it must be "function"'),
    ({"tools": [{"type": "function"}]}, "tools[0].function is missing"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": ADD | {"strict": True}}]}, "arguments are not held to their schema"),
    ({"tools": [{"type": "function", "function": ADD | {"more": 1}}]}, "tools[0].function.more is not supported"),
    ({"tool_choice": "required"}, "this server forces no call"),
    ({"parallel_tool_calls": False}, "an answer may have several calls"),
]


@pytest.mark.parametrize(("more", "words"), WRONG)
def test_what_cannot_be_kept_is_refused(server: Served, more: dict[str, Any], words: str) -> None:
    status, content, _ = server.send(CHAT, _body(ASKED) | more)
    assert status == 400 and words in content["error"]["message"], content


def test_tools_of_a_template_with_other_calls_are_refused(tmp_path: Path) -> None:
    with serving(write_checkpoint(tmp_path / "checkpoint")) as other:
        status, content, _ = other.send(CHAT, _body(ASKED))
    assert status == 400 and "writes no calls of the form <tool_call>{...}</tool_call>" in content["error"]["message"]

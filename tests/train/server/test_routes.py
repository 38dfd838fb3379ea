"""The server over a real socket, by the standard library alone: answers equal those of `train.generate`."""

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
import train
from fnmodels.errors import UserError
from tests.support.served import Served, byte_tokenizer, serving, write_checkpoint
from train.generation.batching import ContinuousBatch
from train.generation.sampling import Sampling
from train.server.worker import Ticket

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TOKENIZER = byte_tokenizer()
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# The byte of each token, read off characters of two to four bytes. Ten bytes occur in no text.
CHARACTERS = "".join(map(chr, [*range(0x800), *range(0x1000, 0xD000, 64), *range(0x10000, 0x110000, 4096)]))
BYTES = dict(zip(TOKENIZER.encode(CHARACTERS).ids, CHARACTERS.encode(), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder) as made:
        yield made


def _generated(folder: Path, prompts: list[str], **options: Any) -> Any:
    config, params = P.load_pretrained(folder)
    ids = [TOKENIZER.encode(prompt).ids for prompt in prompts]
    return train.generate(params, config, ids, stop_ids=[257], tokenizer=TOKENIZER, compile="none", **options)


def _written(token: int) -> str:
    """A token as completions write it; each is a byte, or a special one."""
    text = TOKENIZER.decode([token], skip_special_tokens=False)
    return text if "\ufffd" not in text else f"bytes:\\x{BYTES.get(token, 0):02x}"


def test_completions_are_those_of_generate(server: Served, folder: Path) -> None:
    """Choices of a request differ by their number, as equal prompts of `generate` do; logprobs are its own."""
    body = {"prompt": "Hello", "max_tokens": 6, "n": 3, "seed": 5, "temperature": 0.7, "top_p": 0.9, "logprobs": 2}
    status, answer, _ = server.send(TEXT, body)
    wanted = _generated(folder, ["Hello"] * 3, max_new=6, seeds=5, sampling=Sampling(temperature=0.7, top_p=0.9))
    assert status == 200 and [choice["text"] for choice in answer["choices"]] == wanted.texts
    for choice, logp, tokens in zip(answer["choices"], wanted.logp, wanted.tokens, strict=True):
        nats = choice["logprobs"]
        assert nats["token_logprobs"] == pytest.approx(logp.tolist(), abs=1e-5)
        assert nats["tokens"] == [_written(token) for token in tokens]
        assert all(len(best) == 2 for best in nats["top_logprobs"])  # parts of characters are not one text
        for text, own, best in zip(nats["tokens"], nats["token_logprobs"], nats["top_logprobs"], strict=True):
            assert max(best.values()) >= own and best.get(text, own) >= own
    used = sum(map(len, wanted.tokens))
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": used, "total_tokens": 5 + used}
    assert answer["choices"][0]["finish_reason"] == ("length" if wanted.reasons[0] == "max_new" else "stop")


def test_streams_are_the_whole_answer(server: Served) -> None:
    body = {"prompt": ["Hello", "abc"], "max_tokens": 8, "n": 2, "seed": 3, "stream_options": {"include_usage": True}}
    events = server.events(TEXT, body)
    texts, reasons = ["", "", "", ""], ["", "", "", ""]
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    body.pop("stream_options")
    answer = server.send(TEXT, body)[1]
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert reasons == [choice["finish_reason"] for choice in answer["choices"]]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == answer["usage"]


@pytest.mark.parametrize("new", [0, 3])
def test_echo_has_the_log_probabilities_of_the_prompt(server: Served, folder: Path, new: int) -> None:
    body = {"prompt": ["Hello world", "x"], "max_tokens": new, "logprobs": 1, "echo": True, "temperature": 0}
    answer = server.send(TEXT, body)[1]
    config, params = P.load_pretrained(folder)
    for text, choice in zip(body["prompt"], answer["choices"], strict=True):
        ids = torch.tensor([TOKENIZER.encode(text).ids])
        batch = {"tokens": ids, "labels": torch.roll(ids, -1, 1), "segment_ids": torch.ones_like(ids)}
        batch["positions"] = torch.arange(ids.shape[1])[None]
        wanted = train.token_logprobs(params, batch, config=config)[0][0, :-1].tolist()
        nats, size = choice["logprobs"], ids.shape[1]
        assert nats["token_logprobs"][0] is None and nats["top_logprobs"][0] is None
        assert nats["token_logprobs"][1:size] == pytest.approx(wanted, abs=1e-5)
        assert len(nats["tokens"]) == size + new and choice["text"].startswith(text)
        for own, best in zip(nats["token_logprobs"][1:], nats["top_logprobs"][1:], strict=True):
            assert own in best.values()  # greedy: a new token is the likeliest, to the bit
        assert nats["text_offset"] == list(range(size + new))
    echoed = server.send(TEXT, {"prompt": "Hello", "max_tokens": 2, "echo": True, "temperature": 0})[1]
    assert echoed["choices"][0]["text"].startswith("Hello")


def test_chats_are_rendered_by_the_template(server: Served, folder: Path) -> None:
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    body = {"messages": messages, "max_tokens": 6, "seed": 2, "logprobs": True, "top_logprobs": 2}
    answer = server.send(CHAT, body)[1]
    wanted = _generated(folder, ["<system>Be.<user>Hi<assistant>"], max_new=6, seeds=2)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.texts[0], "refusal": None}
    nats = choice["logprobs"]["content"]
    assert [one["logprob"] for one in nats] == pytest.approx(wanted.logp[0].tolist(), abs=1e-5)
    assert all(len(one["top_logprobs"]) == 2 for one in nats)
    assert all(one["bytes"] == [BYTES.get(token, 0)] for one, token in zip(nats, wanted.tokens[0], strict=True))
    events = server.events(CHAT, body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta["content"] for delta in deltas) == wanted.texts[0]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert [one for event in events for one in event["choices"][0]["logprobs"]["content"]] == nats


def test_stop_texts_end_an_answer_and_are_left_out(server: Served) -> None:
    body = {"prompt": "Hello", "max_tokens": 40, "seed": 1}
    text = server.send(TEXT, body)[1]["choices"][0]["text"]
    stop = text[3:5]
    for more in ({"stop": stop}, {"stop": ["never there", stop]}):
        (choice,) = server.send(TEXT, body | more)[1]["choices"]
        assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    events = server.events(TEXT, body | {"stop": stop})
    assert "".join(event["choices"][0]["text"] for event in events) == text[: text.index(stop)]


def test_answers_follow_a_json_schema(server: Served) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
    messages = [{"role": "user", "content": "Who?"}]
    body = {"messages": messages, "n": 3, "max_tokens": 40, "seed": 4, "response_format": form}
    for choice in server.send(CHAT, body)[1]["choices"]:
        assert re.fullmatch(r'\{"age":\d{1,3}\}', choice["message"]["content"]) and choice["finish_reason"] == "stop"
        assert 0 <= json.loads(choice["message"]["content"])["age"] <= 120


HELLO = [{"role": "user", "content": "Hello"}]


def _parts(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


WRONG: list[tuple[str, Any, int, str]] = [
    (TEXT, b"{", 400, "The body is not JSON"),
    (TEXT, b"[1]", 400, "must be a JSON object"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "NaN is no number of JSON"),
    (TEXT, b'{"prompt": "\\ud800"}', 400, "The body is not JSON"),
    (TEXT, b"[" * 100_000, 400, "The body is not JSON"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens is -1; it must be an integer of at least 0."),
    (TEXT, {"prompt": "a", "max_tokens": True}, 400, "max_tokens is true"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, 400, 'temperature is "hot"; it must be a number'),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p is 0"),
    (TEXT, {"prompt": "a", "n": 1000}, 400, "n is 1000; it must be an integer from 1 to 128."),
    (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop is"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs is 21"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": 2}}, 400, "logit_bias is not supported"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "which needs echo"),
    (TEXT, {"prompt": []}, 400, "prompt is []"),
    (TEXT, {"prompt": ""}, 400, "The prompt is empty"),
    (TEXT, {"prompt": [[1, 260]]}, 400, "of token ids from 0 to 259"),
    (TEXT, {"prompt": "a" * 300}, 400, "the capacity is 256 tokens"),
    (TEXT, {"prompt": "a" * 300, "max_tokens": 0, "echo": True, "logprobs": 1}, 400, "the context is 256 tokens"),
    (TEXT, {"prompt": "a", "model": "other"}, 404, "There is no model 'other'"),
    (CHAT, {"messages": []}, 400, "messages is []"),
    (CHAT, {"messages": [{"content": "a"}]}, 400, "messages[0] has no role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "messages[0].content[0] must be"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
        400,
        'tools[0].type is null; it must be "function"',
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}},
        400,
        'response_format.type is "xml"',
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        400,
        "reads no images",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"template": 1}},
        400,
        "chat_template_kwargs is",
    ),
    (TEXT, {"prompt": "a", "presence_penalty": 10**400}, 400, "presence_penalty is 1000"),
    (TEXT, b'{"prompt": "a", "temperature": 1e400}', 400, "temperature is Infinity; it must be a number"),
    (TEXT, {"prompt": "a", "response_format": {"type": "text", "x": 1}}, 400, "response_format.x is not supported"),
    (
        TEXT,
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
        400,
        "response_format.json_schema.x is not supported",
    ),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"user": 1}}, 400, "stream_options.user is not supported"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "this server forces no call"),
    (CHAT, {"messages": HELLO, "tool_choice": 17}, 400, "tool_choice is 17"),
    (
        CHAT,
        {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4},
        400,
        "left out, or max_tokens, which is 3",
    ),
    (CHAT, {"messages": [HELLO[0] | {"foo": "bar"}]}, 400, "'foo' of turn 1 of 1"),
    (CHAT, {"messages": [_parts({"type": "text", "text": "a", "foo": 1})]}, 400, "messages[0].content[0].foo is not"),
    (CHAT, {"messages": [_parts({"type": "text", "text": "a", "image_url": ""})]}, 400, "content[0].image_url is not"),
    (
        CHAT,
        {"messages": [_parts({"type": "image_url", "image_url": {"url": "data:", "size": 3}})]},
        400,
        "messages[0].content[0].image_url.size is not supported",
    ),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        400,
        "response_format.json_schema is not supported",
    ),
    ("/v1/nothing", {}, 404, "Not Found"),
    ("/v1/models/other", None, 404, "There is no model 'other'"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), WRONG)
def test_a_wrong_request_gets_a_sentence(server: Served, path: str, body: Any, status: int, words: str) -> None:
    found, answer, _ = server.send(path, body)
    assert found == status and words in answer["error"]["message"], answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}


def test_no_request_is_answered_in_a_thread_of_its_own(server: Served) -> None:
    short = {"prompt": "a", "max_tokens": 1}
    for path, body in ((TEXT, b"{"), (TEXT, short), ("/v1/nothing", None), ("/health", None)):
        server.send(path, body)
    assert not [thread.name for thread in threading.enumerate() if "AnyIO" in thread.name]


def test_models_health_and_metrics(server: Served) -> None:
    assert server.send("/v1/models")[1]["data"][0]["id"] == "tiny"
    assert server.send("/v1/models/tiny")[1]["max_model_len"] == 256
    assert server.send("/health")[1] == {"status": "ok"}
    server.send(TEXT, {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    text = server.send("/metrics")[1]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["fnmodels_generated_tokens_total"]) >= 3
    assert float(values['fnmodels_requests_total{route="health",status="200"}']) >= 1
    assert values["fnmodels_step_seconds_count"] == values['fnmodels_step_seconds_bucket{le="+Inf"}']
    assert "fnmodels_running 0" in text and "fnmodels_queue 0" in text


def test_pages_of_other_sites_are_refused_without_a_token(server: Served) -> None:
    for name, value in (("Host", "evil.example"), ("Origin", "https://evil.example")):
        status, answer, _ = server.send(TEXT, {"prompt": "a"}, headers={name: value})
        assert status == 403 and "only this machine may ask" in answer["error"]["message"]
    assert server.send("/v1/models", headers={"Origin": "http://localhost:3000"})[0] == 200


def test_a_token_is_needed_where_there_is_one(folder: Path) -> None:
    from train.server.command import checked_token

    with serving(folder, token="secret") as server:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            status, answer, _ = server.send("/v1/models", headers=headers)
            assert status == 401 and answer["error"]["type"] == "authentication_error"
        assert server.send("/v1/models", headers={"Authorization": "Bearer secret"})[0] == 200
        assert server.send("/v1/models", headers={"X-API-Key": "secret"})[0] == 200
        assert server.send("/health")[0] == 200
    with pytest.raises(UserError, match="set a token with --token"):
        checked_token("0.0.0.0", None)
    assert checked_token("0.0.0.0", "secret") == "secret" and checked_token("127.0.0.1", None) is None


def _until(true: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def _count(server: Served, name: str) -> float:
    lines = server.send("/metrics")[1].splitlines()
    return float(next((line.split()[1] for line in lines if line.startswith(f"{name} ")), "0"))


def _open_request(server: Served, body: dict[str, Any]) -> socket.socket:
    """A socket on which a request was sent, and nothing read."""
    data = json.dumps(body).encode()
    made = socket.create_connection((server.host, server.port))
    made.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return made


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 30 ms, so that requests are under way for a while."""
    draw = ContinuousBatch.draw

    def slowly(self: Any, **options: Any) -> Any:
        time.sleep(0.03)
        return draw(self, **options)

    monkeypatch.setattr(ContinuousBatch, "draw", slowly)


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_clients_that_leave_end_and_the_others_are_answered(folder: Path, stream: bool) -> None:
    long = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": stream}
    short = {"prompt": "Hello", "max_tokens": 4, "seed": 1}
    with serving(folder, slots=2) as server:
        alone = server.send(TEXT, short)[1]["choices"]
        sockets = [_open_request(server, long) for _ in range(4)]  # two run, two wait
        _until(lambda: _count(server, "fnmodels_running") == 2 and _count(server, "fnmodels_queue") == 2)
        for one in sockets:
            one.close()
        assert server.send(TEXT, short)[1]["choices"] == alone
        _until(lambda: _count(server, "fnmodels_running") == 0 and _count(server, "fnmodels_queue") == 0)
        assert _count(server, "fnmodels_cancelled_total") == 2
        assert _count(server, "fnmodels_generated_tokens_total") < 2 * 250


def test_steps_leave_out_idle_slots_once_they_have_cost_a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight are idle: the third step would make six idle rows, as many as are copied."""
    draw, widths = ContinuousBatch.draw, list[int]()

    def noted(self: Any, **options: Any) -> Any:
        time.sleep(0.02)
        events = draw(self, **options)
        widths.append(self.allocated)
        return events

    monkeypatch.setattr(ContinuousBatch, "draw", noted)
    with serving(folder, slots=8) as server:
        long = _open_request(server, {"prompt": list("abcdef"), "max_tokens": 100, "ignore_eos": True})
        _until(lambda: _count(server, "fnmodels_running") == 6)
        assert server.send(TEXT, {"prompt": ["g", "h"], "max_tokens": 2, "ignore_eos": True})[0] == 200
        _until(lambda: _count(server, "fnmodels_running") == 0)
        long.close()
    assert widths.count(8) == 2 + 2 and widths[-1] == 6


def test_bodies_and_queues_have_bounds(folder: Path) -> None:
    with serving(folder, slots=1, queue=2, body=1000) as server:
        status, answer, _ = server.send(TEXT, {"prompt": "a" * 2000})
        assert status == 413 and "1,000 bytes" in answer["error"]["message"]
        chunked = iter([b'{"prompt": "', b"a" * 2000, b'"}'])
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        connection.request("POST", TEXT, chunked)  # without a length
        assert connection.getresponse().status == 413
        connection.close()
        free = threading.Event()
        server.service.worker.submit(None, [Ticket(lambda item: None, job=free.wait)])  # the worker does nothing else
        sockets = [_open_request(server, {"prompt": "a"}) for _ in range(2)]
        _until(lambda: _count(server, "fnmodels_queue") == 2)
        status, answer, headers = server.send(TEXT, {"prompt": "a"})
        assert status == 429 and int(headers["retry-after"]) >= 1 and answer["error"]["type"] == "rate_limit_error"
        for one in sockets:
            one.close()
        free.set()
        _until(lambda: _count(server, "fnmodels_queue") == 0)
        assert server.send(TEXT, {"prompt": "a", "max_tokens": 2})[0] == 200


@pytest.mark.usefixtures("slow_steps")
def test_a_stopped_server_answers_what_runs(folder: Path) -> None:
    """New connections are refused, the request that runs gets its answer, and the worker ends."""
    found: list[Any] = []
    with serving(folder) as server:
        body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True}
        asking = threading.Thread(target=lambda: found.append(server.send(TEXT, body)))
        asking.start()
        _until(lambda: _count(server, "fnmodels_running") == 1)
    asking.join()
    assert found[0][0] == 200 and found[0][1]["usage"]["completion_tokens"] == 40
    with pytest.raises(ConnectionError):
        server.send("/health")

"""Image chunks over HTTP: answers, log-probabilities and passes have the numbers of the client in this process."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.pictured import picture, write_reader
from tests.support.served import Served, serving
from tests.train.server.tinker.test_protocol import _field, _model, _post, _result
from train.integrations import tinker
from train.integrations.tinker import images, types
from train.server.tinker.wire import _fields, _last_bytes, _messages, _text

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

DATA = picture(2, 3)
TARGETS = [2, 58, *[60] * 6, 57, 3, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reader(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, saves=folder.parent / "saves", context=64) as made:
        yield made


def _datum(chunk: bytes) -> bytes:
    def entry(name: str, values: Any, kind: int) -> bytes:
        tensor = _field(1, values.tobytes()) + _field(3, kind) + _field(4, bytes([len(values)]))
        return _field(2, _field(1, name.encode()) + _field(2, tensor))

    def text(*ids: int) -> bytes:
        return _field(1, _field(1, _field(1, np.array(ids, np.int32).tobytes())))

    found = text(1, 2, 58) + _field(1, chunk) + text(57, 3)
    found += entry("target_tokens", np.array(TARGETS, np.int64), 2)
    return found + entry("weights", np.ones(len(TARGETS), np.float32), 1)


def _image(data: bytes = DATA, expected: int = 6, more: bytes = b"") -> bytes:
    return _field(2, _field(1, data) + _field(2, b"png") + _field(3, expected) + more)


def _pass(model: str, number: int, chunk: bytes) -> bytes:
    message = _field(1, model.encode()) + _field(2, number) + _field(3, _datum(chunk))
    return message + _field(4, b"cross_entropy")


def _message(content: str) -> Any:
    return _fields(content.encode(errors="surrogateescape"), None)


def _local(folder: Path) -> tuple[tinker.TrainingClient, types.ModelInput, types.Datum]:
    made = tinker.ServiceClient(folder=folder.parent / "local").create_lora_training_client(folder, rank=4, seed=1)
    begin, end = types.EncodedTextChunk([1, 2, 58]), types.EncodedTextChunk([57, 3])
    given = types.ModelInput([begin, types.ImageChunk(DATA, "png", 6), end])
    return made, given, types.Datum(given, {"target_tokens": TARGETS, "weights": [1.0] * len(TARGETS)})


def test_a_training_loop_has_the_numbers_of_this_process(server: Served, folder: Path) -> None:
    model, (local, _, datum) = _model(server), _local(folder)
    for number in (1, 3):
        body = server.send("/api/v1/forward_backward", _pass(model, number, _image()))[1]
        here = local.forward_backward([datum], "cross_entropy").result()
        message = _message(_result(server, body["request_id"]))
        (pair,) = _messages(_messages(message, 2, None)[0], 2, None)
        nats = np.frombuffer(_last_bytes(_fields(_last_bytes(pair, 2), None), 1), np.float32)
        assert _text(pair, 1) == "logprobs" and nats.tolist() == here.loss_fn_outputs[0]["logprobs"].data
        step = {"model_id": model, "seq_id": number + 1, "adam_params": {"learning_rate": 0.01}}
        norm = _result(server, _post(server, "optim_step", step)["request_id"])["metrics"]["grad_norm"]
        wanted = local.optim_step(types.AdamParams(learning_rate=0.01)).result().metrics
        assert wanted is not None and norm == wanted["grad_norm"] > 0


def _sample(server: Served, *chunks: Any, **more: Any) -> tuple[int, Any]:
    session = _post(server, "create_session", {})["session_id"]
    place = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = _post(server, "create_sampling_session", place)["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": {"chunks": list(chunks)}, "num_samples": 2}
    params = {"max_tokens": 5, "temperature": 0.0, "stop": [0]}
    status, content, _ = server.send("/api/v1/asample", body | {"sampling_params": params, **more})
    return status, _result(server, content["request_id"]) if status == 200 else content["error"]["message"]


def _text_chunk(*ids: int) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": list(ids)}


def _json_image(**more: Any) -> dict[str, Any]:
    return {"type": "image", "format": "png", "data": base64.b64encode(DATA).decode(), **more}


def test_answers_and_scores_of_a_prompt_are_those_of_this_process(server: Served, folder: Path) -> None:
    local = tinker.ServiceClient(folder=folder.parent / "local").create_sampling_client(base_model=folder)
    _, given, _ = _local(folder)
    chunks = _text_chunk(1, 2, 58), _json_image(expected_tokens=6), _text_chunk(57, 3)
    status, content = _sample(server, *chunks, prompt_logprobs=True)
    assert status == 200
    message = _message(content)
    params = types.SamplingParams(max_tokens=5, temperature=0, stop=[0])
    here = local.sample(given, 2, params, include_prompt_logprobs=True).result()
    answers = [np.frombuffer(_last_bytes(one, 2), np.int32).tolist() for one in _messages(message, 1, None)]
    assert answers == [one.tokens for one in here.sequences]
    nats = np.frombuffer(_last_bytes(message, 2), np.float32)[1:]
    np.testing.assert_allclose(nats, here.prompt_logprobs[1:], rtol=1e-5, atol=1e-6)  # type: ignore[index]


def test_pictures_that_are_not_read_are_refused_in_a_sentence(server: Served, folder: Path) -> None:
    secret = folder / "config.json"
    pointer = {"type": "image_asset_pointer", "format": "png", "location": str(secret)}
    for chunk, words in (
        (pointer, "Chunk 1 of the prompt names a file or an address, and this server fetches none: send its data."),
        (_json_image(expected_tokens=5), "Chunk 1 of the prompt has an image of 6 tokens; its expected_tokens are 5."),
        (_json_image() | {"data": "*"}, "The data of an image are not base64"),
        (_json_image() | {"data": "AAAA"}, "Chunk 1 of the prompt: the picture is no picture that can be read"),
        (_json_image() | {"format": "gif"}, "has the format 'gif'; it must be one of png, jpeg."),
        ({"type": "dmel", "dmel": ""}, "prompt.chunks[1].type is"),
        (_json_image() | {"data": "\u00e9AAA"}, "The data of an image are not base64"),
        (_text_chunk(60), "The prompt of request 0 has 1 image tokens"),
    ):
        status, message = _sample(server, _text_chunk(1), chunk)
        assert status == 400 and words in message, message
        assert str(folder) not in message
    model = _model(server)
    for number, (chunk, words) in enumerate(
        (
            (_image(expected=7), "Chunk 1 of datum 0 has an image of 6 tokens; its expected_tokens are 7."),
            (_image(more=_field(4, _field(1, 8))), "An image of a datum has override_dimensions"),
            (_field(3, b""), "A chunk of a datum is neither encoded text nor an image"),
        ),
        1,
    ):
        status, content, _ = server.send("/api/v1/forward_backward", _pass(model, number, chunk))
        assert status == 400 and words in content["error"]["message"], content


def _pictures(count: int) -> list[bytes]:
    """Files of one picture, each with other bytes behind it."""
    return [DATA + bytes([number]) for number in range(count)]


def test_the_pictures_of_a_call_are_bounded(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are decoded: by their number, by the context, and by a model that is not there."""
    read: list[bytes] = []

    def counted(pictures: Any, data: bytes) -> Any:
        read.append(data)
        return [60] * 6, (torch.zeros(3, 16, 24),)

    monkeypatch.setattr(images, "_tokens_and_images", counted)
    model = _model(server)

    def refused(message: bytes) -> str:
        status, content, _ = server.send("/api/v1/forward_backward", message)
        assert status in (400, 404)
        return str(content["error"]["message"])

    def passes(name: str, number: int, *data: bytes) -> bytes:
        message = _field(1, name.encode()) + _field(2, number) + _field(4, b"cross_entropy")
        return message + b"".join(_field(3, one) for one in data)

    many = [_datum(_image(data)) for data in _pictures(17)]
    assert "There is no model 'none'" in refused(passes("none", 1, *many)) and not read
    words = "Chunk 1 of datum 16 is one picture too many: a call has at most 16 different ones."
    assert words in refused(passes(model, 1, *many)) and len(read) == 16
    read.clear()
    long = b"".join(_field(1, _image(data)) for data in _pictures(14))
    words = "Chunk 11 of datum 0 begins after 66 tokens, and the context is 64 tokens."
    assert words in refused(passes(model, 2, long)) and len(read) == 11
    read.clear()
    chunks = [_json_image() | {"data": base64.b64encode(data).decode()} for data in _pictures(14)]
    status, message = _sample(server, *chunks)
    assert status == 400 and "Chunk 11 of the prompt begins after 66 tokens" in message and len(read) == 11

"""Tinker's protocol by hand: order, repeated requests, wrong bytes, and what was saved."""

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.served import Served, serving, write_checkpoint
from train.server.worker import Ticket

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(write_checkpoint(folder / "checkpoint"), saves=folder / "saves", context=64) as made:
        yield made


def _field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protobuf message; numbers and lengths below 16,384."""

    def varint(size: int) -> bytes:
        return bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])

    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    return varint(number << 3) + varint(value)


def _training_pass(model_id: str, seq_id: int, tokens: list[int], *, weight: float = 1.0) -> bytes:
    def entry(name: str, values: Any, kind: int) -> bytes:
        tensor = _field(1, values.tobytes()) + _field(3, kind) + _field(4, bytes([len(values)]))
        return _field(2, _field(1, name.encode()) + _field(2, tensor))

    size = len(tokens) - 1
    datum = _field(1, _field(1, _field(1, np.array(tokens[:-1], np.int32).tobytes())))
    datum += entry("target_tokens", np.array(tokens[1:], np.int64), 2)
    datum += entry("weights", np.full(size, weight, np.float32), 1)
    message = _field(1, model_id.encode()) + _field(2, seq_id) + _field(3, datum)
    return message + _field(4, b"cross_entropy")


def _post(server: Served, path: str, body: Any) -> Any:
    status, content, _ = server.send(f"/api/v1/{path}", body)
    assert status == 200, content
    return content


def _result(server: Served, request_id: str) -> Any:
    for _ in range(100):
        status, content, _ = server.send("/api/v1/retrieve_future", {"request_id": request_id})
        if status != 408:
            return content
    raise AssertionError


def _model(server: Served, number: int = 0) -> str:
    session = _post(server, "create_session", {"tags": [], "sdk_version": "0"})["session_id"]
    lora = {"rank": 4, "seed": 1}
    asked = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": lora}
    future = _post(server, "create_model", asked)
    assert _post(server, "create_model", asked)["request_id"] == future["request_id"]  # sent again
    made = _result(server, future["request_id"])
    assert made == {"type": "create_model", "model_id": f"{session}:train:{number}"}
    return str(made["model_id"])


def test_requests_run_in_the_order_of_their_numbers(server: Served) -> None:
    """An update that arrives before its gradients waits for them; a request that is sent again is not run again."""
    model = _model(server)
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    late = _post(server, "optim_step", step)["request_id"]
    time.sleep(0.2)
    assert "fnmodels_queue 0" in server.send("/metrics")[1]  # the worker was not asked yet
    first = _training_pass(model, 1, [72, 101, 108])
    for _ in range(2):
        _post(server, "forward_backward", first)
    assert _post(server, "optim_step", step)["request_id"] == late
    assert _result(server, late)["metrics"]["grad_norm"] > 0
    saved = _post(server, "save_weights", {"model_id": model, "seq_id": 3, "path": "one"})["request_id"]
    path = _result(server, saved)["path"]
    info = _post(server, "weights_info", {"tinker_path": path})
    assert info["lora_rank"] == 4 and info["is_lora"] and info["base_model"] == "tiny"
    status, content, _ = server.send("/api/v1/optim_step", step | {"seq_id": 0})
    assert status == 400 and "4 is the next one" in content["error"]["message"]


def test_what_goes_wrong_is_said_in_the_result_or_at_once(server: Served) -> None:
    model = _model(server)
    found = _result(
        server, _post(server, "optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})["request_id"]
    )
    assert found.keys() == {"error", "category"} and found["category"] == "user"
    cut = _training_pass(model, 2, [72, 101, 108])[:-5]
    for body, words in ((cut, "goes beyond its end"), (b"\xff" * 12, "does not end"), (b"\x0a", "does not end")):
        status, content, _ = server.send("/api/v1/forward_backward", body)
        assert status == 400 and words in content["error"]["message"]
    for kind, words in (
        (2, "Chunk 0 of datum 0 is an image, and the model of 'checkpoint' reads no images here."),
        (3, "neither encoded text nor an image; sounds are not supported"),
    ):
        message = _field(1, model.encode()) + _field(3, _field(1, _field(kind, _field(1, b"png"))))
        status, content, _ = server.send("/api/v1/forward_backward", message)
        assert status == 400 and words in content["error"]["message"]
    for path in (
        "tinker://0123456789ab/weights/../../x",
        "tinker://x/weights/a",
        "/etc",
        "tinker://0123456789ab/other/a",
    ):
        status, content, _ = server.send("/api/v1/weights_info", {"tinker_path": path})
        assert status == 404, content
    for path, body in (
        ("get_info", {"model_id": "x"}),
        ("session_heartbeat", {"session_id": "x"}),
        ("asample", {"sampling_session_id": "x", "seq_id": 0}),
    ):
        assert server.send(f"/api/v1/{path}", body)[0] == 404
    assert server.send("/api/v1/retrieve_future", {"request_id": "x"})[0] == 410


def test_saves_stay_in_their_folder(server: Served) -> None:
    model = _model(server)
    for number, (name, words) in enumerate((("../out", "leads out"), ("a/../../out", "leads out")), 1):
        future = _post(server, "save_weights", {"model_id": model, "seq_id": number, "path": name})
        assert words in _result(server, future["request_id"])["error"]


def test_a_cancelled_sample_ends(server: Served) -> None:
    session = _post(server, "create_session", {"tags": [], "sdk_version": "0"})["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = _post(server, "create_sampling_session", asked)["sampling_session_id"]
    assert server.send(f"/api/v1/samplers/{sampler}")[1]["base_model"] == "tiny"
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "num_samples": 2}
    free = threading.Event()
    server.service.worker.submit(None, [Ticket(lambda item: None, job=free.wait)])  # the sample cannot end before
    try:
        future = _post(server, "asample", body | {"sampling_params": {"max_tokens": 60, "stop": []}})
        assert len(future["sample_sequence_ids"]) == 2
        assert server.send("/api/v1/cancel_future", {"request_id": future["request_id"]})[0] == 204
    finally:
        free.set()
    found = _result(server, future["request_id"])
    assert found == {"error": "The request was cancelled by its client.", "category": "user"}


def test_fields_of_a_message_are_read_in_every_form() -> None:
    """Shapes packed or not, bf16 and integers of both widths; numbers of a loss in both maps."""
    from train.server.tinker.wire import training_pass

    halves = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensor = _field(1, halves.tobytes()) + _field(3, 4) + _field(4, 2) + _field(4, 1)
    integers = _field(1, np.array([3, 4], np.int32).tobytes()) + _field(3, 3)
    datum = _field(2, _field(1, b"a") + _field(2, tensor)) + _field(2, _field(1, b"b") + _field(2, integers))
    message = _field(3, datum) + _field(5, _field(1, b"low") + _field(2, 0.5)) + _field(6, 1)
    found = training_pass(message)
    assert found.config == {"low": 0.5} and found.forward_only
    inputs = found.data[0].loss_fn_inputs
    assert inputs["a"].to_torch().tolist() == [[1.5], [-2.0]] and inputs["b"].to_torch().tolist() == [3, 4]
    text = _field(7, _field(1, b"kind") + _field(2, _field(2, b"x")))
    assert training_pass(text).texts == {"kind": "x"}  # which a loss by name refuses, see test_custom.py

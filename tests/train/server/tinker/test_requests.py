"""Requests of Tinker's protocol that are wrong, too many, or of models and sessions that are gone."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.served import Served, serving, write_checkpoint
from tests.train.server.tinker.test_protocol import _field, _model, _post, _result, _training_pass
from train.server.errors import ApiError
from train.server.tinker import futures as futures_file
from train.server.tinker import trainer as trainer_file
from train.server.tinker.futures import Futures
from train.server.tinker.wire import dense
from train.server.worker import Ticket

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TOKENS = [72, 101, 108, 108]
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, saves=folder.parent / "saves", context=64, queue=8) as made:
        yield made


@pytest.fixture(scope="module")
def model(server: Served) -> str:
    return _model(server)


def _refused(server: Served, path: str, body: Any) -> tuple[int, str]:
    status, content, _ = server.send(f"/api/v1/{path}", body)
    return status, content["error"]["message"] if isinstance(content, dict) else content


def _names(model: str) -> dict[str, str]:
    return {"MODEL": model, "SESSION": model.partition(":")[0]}


def _filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(one, names) for name, one in value.items()}
    return names.get(value, value) if isinstance(value, str) else value


LORA = {"session_id": "SESSION", "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 4}}
SAMPLE = {"base_model": "tiny", "prompt": PROMPT, "sampling_params": {"max_tokens": 2}}
STEP = {"model_id": "MODEL", "seq_id": 1}
UNKNOWN: list[tuple[str, Any, str]] = [
    ("create_session", {"nonsense": 2}, "nonsense"),
    ("session_heartbeat", {"session_id": "SESSION", "nonsense": 2}, "nonsense"),
    ("retrieve_future", {"request_id": "x", "nonsense": 2}, "nonsense"),
    ("cancel_future", {"request_id": "x", "nonsense": 2}, "nonsense"),
    ("create_model", LORA | {"nonsense": 2}, "nonsense"),
    ("create_model", LORA | {"lora_config": {"rank": 4, "alpha": 1}}, "lora_config.alpha"),
    ("create_model", LORA | {"optimizer_config": {"type": "adamw", "beta1": 1}}, "optimizer_config.beta1"),
    ("create_model", LORA | {"type": "other"}, "type"),
    ("get_info", {"model_id": "MODEL", "nonsense": 2}, "nonsense"),
    ("optim_step", STEP | {"nonsense": 2}, "nonsense"),
    ("optim_step", STEP | {"adam_params": {"learning_rate": 1, "momentum": 1}}, "adam_params.momentum"),
    ("save_weights", STEP | {"nonsense": 2}, "nonsense"),
    ("load_weights", STEP | {"path": "x", "nonsense": 2}, "nonsense"),
    ("load_weights", STEP | {"path": "x", "session_id": "SESSION"}, "session_id"),
    ("save_weights_for_sampler", STEP | {"path": "x", "nonsense": 2}, "nonsense"),
    ("unload_model", {"model_id": "MODEL", "nonsense": 2}, "nonsense"),
    ("weights_info", {"tinker_path": "x", "nonsense": 2}, "nonsense"),
    (
        "create_sampling_session",
        {"session_id": "SESSION", "sampling_session_seq_id": 0, "base_model": "tiny", "nonsense": 2},
        "nonsense",
    ),
    ("join_sampling_session", {"sampling_session_id": "x", "nonsense": 2}, "nonsense"),
    ("asample", SAMPLE | {"nonsense": 2}, "nonsense"),
    ("asample", SAMPLE | {"user": "x"}, "user"),
    ("asample", SAMPLE | {"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
    ("asample", SAMPLE | {"prompt": PROMPT | {"nonsense": 2}}, "prompt.nonsense"),
    (
        "asample",
        SAMPLE | {"prompt": {"chunks": [PROMPT["chunks"][0] | {"nonsense": 2}]}},
        "prompt.chunks[0].nonsense",
    ),
]


@pytest.mark.parametrize(("path", "body", "name"), UNKNOWN)
def test_a_field_that_is_not_read_is_refused(server: Served, model: str, path: str, body: Any, name: str) -> None:
    found = _refused(server, path, _filled(body, _names(model)))
    assert found == (400, f"{name} is not supported by this server: leave it out.")


def test_an_unknown_field_of_weights_in_flight_is_refused(server: Served, model: str) -> None:
    body = {"model_id": model, "seq_id": 1, "kind": "inflight", "sampling_session_seq_id": 0}
    status, words = _refused(server, "save_weights_for_sampler", body)
    assert status == 400 and words.startswith('kind is "inflight"; it must be "snapshot"')


MISSING: list[tuple[str, Any, str]] = [
    ("load_weights", {"model_id": "MODEL", "seq_id": 1, "optimizer": False}, "path"),
    ("load_weights", {"path": "tinker://0123456789ab/weights/a", "model_seq_id": 1}, "session_id"),
    ("load_weights", {"path": "tinker://0123456789ab/weights/a", "session_id": "SESSION"}, "model_seq_id"),
    ("load_weights", {"path": "tinker://0123456789ab/weights/a", "model_id": "MODEL"}, "seq_id"),
    ("create_model", {name: value for name, value in LORA.items() if name != "model_seq_id"}, "model_seq_id"),
    ("create_model", {name: value for name, value in LORA.items() if name != "session_id"}, "session_id"),
    ("create_model", {name: value for name, value in LORA.items() if name != "base_model"}, "base_model"),
    ("create_sampling_session", {"session_id": "SESSION", "base_model": "tiny"}, "sampling_session_seq_id"),
    ("create_sampling_session", {"sampling_session_seq_id": 0, "base_model": "tiny"}, "session_id"),
    ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0}, "base_model"),
    ("save_weights_for_sampler", {"model_id": "MODEL", "seq_id": 1}, "sampling_session_seq_id"),
    ("optim_step", {"model_id": "MODEL"}, "seq_id"),
    ("optim_step", {"seq_id": 1}, "model_id"),
    ("get_info", {}, "model_id"),
    ("unload_model", {}, "model_id"),
    ("session_heartbeat", {}, "session_id"),
    ("retrieve_future", {}, "request_id"),
    ("cancel_future", {}, "request_id"),
    ("weights_info", {}, "tinker_path"),
    ("join_sampling_session", {}, "sampling_session_id"),
    ("asample", {"prompt": PROMPT}, "base_model"),
]


@pytest.mark.parametrize(("path", "body", "name"), MISSING)
def test_a_field_that_must_be_there_is_named(server: Served, model: str, path: str, body: Any, name: str) -> None:
    status, words = _refused(server, path, _filled(body, _names(model)))
    assert status == 400 and words.startswith(f"{name} is missing; it must be "), words


def test_a_sample_of_a_session_needs_its_number(server: Served, model: str) -> None:
    place = {"session_id": _names(model)["SESSION"], "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = _post(server, "create_sampling_session", place)["sampling_session_id"]
    status, words = _refused(server, "asample", {"sampling_session_id": sampler, "prompt": PROMPT})
    assert status == 400 and words.startswith("seq_id is missing")


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "y/" * 600 + "z"])
def test_a_name_that_no_folder_can_have_gets_a_sentence(server: Served, name: str) -> None:
    model = _model(server)
    for number, (path, body) in enumerate(
        (
            ("save_weights", {"path": name}),
            ("save_weights_for_sampler", {"path": name}),
            ("load_weights", {"path": f"tinker://0123456789ab/weights/{name}"}),
        ),
        1,
    ):
        future = _post(server, path, {"model_id": model, "seq_id": number} | body)
        found = _result(server, future["request_id"])
        assert "must be that of a folder: without NUL" in found["error"] and found["category"] == "user"
    status, words = _refused(server, "weights_info", {"tinker_path": f"tinker://0123456789ab/weights/{name}"})
    assert status == 404 and "must be that of a folder" in words


def test_a_save_does_not_tell_which_files_there_are(server: Served, tmp_path: Path) -> None:
    """An absolute name leads out of the folder, whether there is such a file or not."""
    model = _model(server)
    (tmp_path / "there").write_text("")
    for number, name in enumerate(("there", "absent"), 1):
        body = {"model_id": model, "seq_id": number, "path": str(tmp_path / name)}
        found = _result(server, _post(server, "save_weights", body)["request_id"])
        assert "leads out of the client's folder" in found["error"]


def test_a_datum_is_no_longer_than_the_context_and_of_known_ids(server: Served, model: str) -> None:
    for tokens, words in (
        ([1] * 66, "Datum 0 has 65 tokens; the context is 64 tokens."),
        ([1, 2, 260], "Datum 0 has the id 260; token ids are from 0 to 259."),
        ([1, 2, -5], "Datum 0 has the id -5; token ids are from 0 to 259."),
        ([-1, 2, 3], "Datum 0 has the id -1; token ids are from 0 to 259."),
    ):
        assert _refused(server, "forward_backward", _training_pass(model, 1, tokens)) == (400, words)


@pytest.mark.parametrize("entry", [_field(4, 5), _field(4, 2)])
def test_a_wrong_shape_is_the_clients_mistake(server: Served, model: str, entry: bytes) -> None:
    tensor = _field(1, np.zeros(3, np.float32).tobytes()) + _field(3, 1) + entry
    message = _field(1, model.encode()) + _field(2, 1) + _field(3, _field(2, _field(1, b"a") + _field(2, tensor)))
    status, words = _refused(server, "forward_backward", message)
    assert status == 400 and "has 3 numbers, which are none of the shape" in words


@pytest.mark.parametrize(
    ("rows", "columns", "shape", "words"),
    [
        ([0, 1, 3], [0, 1, 2], [2], "it needs two sizes"),
        ([0, 1, 3], [0, 1, 2], [3, 3], "it needs two sizes"),
        ([0, 1, 3], [0, 1, 2], [2, 1 << 30], "16,777,216 cells at most"),
        ([0, 1, 2], [0, 1, 2], [2, 3], "that are none of them"),
        ([0, 4, 3], [0, 1, 2], [2, 3], "that are none of them"),
        ([0, 1, 3], [0, 1, 3], [2, 3], "that are none of them"),
        ([0, 1, 3], [0, 1, -1], [2, 3], "that are none of them"),
        ([0, 1, 3], [0, 1], [2, 3], "that are none of them"),
    ],
)
def test_a_wrong_sparse_entry_is_the_clients_mistake(rows: Any, columns: Any, shape: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dense(torch.ones(3), torch.tensor(rows), torch.tensor(columns), shape)
    assert dense(torch.arange(1, 4), torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2]), [2, 3]).tolist() == [
        [0, 1, 0],
        [2, 0, 3],
    ]


@pytest.fixture
def full(server: Served) -> Iterator[threading.Event]:
    """As many requests wait as may; set: the worker goes on."""
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        free.wait()

    worker = server.service.worker
    worker.submit(None, [Ticket(lambda item: None, job=hold)])
    held.wait()
    worker.submit(None, [Ticket(lambda item: None, job=int) for _ in range(8)])
    yield free
    free.set()


def test_a_pass_that_finds_no_room_is_not_left_out(server: Served, folder: Path, full: threading.Event) -> None:
    """It gets 429 and may come again; the update after it waits for it. A later result is that of both."""
    free, trained = full, threading.Event()
    session = _post(server, "create_session", {})["session_id"]
    create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    status, words = _refused(server, "create_model", create)
    assert status == 429 and words.startswith("8 requests wait already, and 1 more would be above the limit of 8")
    free.set()
    _until(lambda: "fnmodels_queue 0" in server.send("/metrics")[1])
    model = _result(server, _post(server, "create_model", create)["request_id"])["model_id"]
    worker, held = server.service.worker, threading.Event()

    def hold() -> None:
        held.set()
        trained.wait()

    worker.submit(None, [Ticket(lambda item: None, job=hold)])
    held.wait()
    worker.submit(None, [Ticket(lambda item: None, job=int) for _ in range(8)])
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    first = _training_pass(model, 1, TOKENS)
    assert _refused(server, "forward_backward", first)[0] == 429
    assert _refused(server, "optim_step", step)[0] == 429
    trained.set()
    _until(lambda: "fnmodels_queue 0" in server.send("/metrics")[1])
    update = _post(server, "optim_step", step)["request_id"]
    time.sleep(0.1)
    assert "fnmodels_queue 0" in server.send("/metrics")[1]  # it waits for the pass
    _post(server, "forward_backward", first)
    assert _result(server, update)["metrics"]["grad_norm"] > 0


@pytest.mark.parametrize("late", [False, True])
def test_a_refused_request_has_had_its_turn(server: Served, late: bool) -> None:
    """The requests after it run, whether they come after it or before; those before it have lost no gradient."""
    model, adam = _model(server), {"adam_params": {"learning_rate": 0.01}}
    _post(server, "forward_backward", _training_pass(model, 1, TOKENS))
    step = {"model_id": model, "seq_id": 4} | adam
    waiting = _post(server, "optim_step", step)["request_id"] if late else ""
    assert _refused(server, "forward_backward", _training_pass(model, 2, [1, 2, 260]))[0] == 400
    assert _refused(server, "optim_step", {"model_id": model, "seq_id": 3, "adam_params": {"beta1": "x"}})[0] == 400
    waiting = waiting or _post(server, "optim_step", step)["request_id"]
    assert _result(server, waiting)["metrics"]["grad_norm"] > 0
    assert _result(server, f"{model}:2")["error"] == "Datum 0 has the id 260; token ids are from 0 to 259."
    again = _post(server, "optim_step", step | {"seq_id": 5})["request_id"]
    assert "comes after forward_backward" in _result(server, again)["error"]


def test_a_pass_that_fails_keeps_the_gradients_before_it(server: Served) -> None:
    model = _model(server)
    _post(server, "forward_backward", _training_pass(model, 1, TOKENS))
    message = _training_pass(model, 2, TOKENS).replace(b"cross_entropy", b"crossentropy!")
    assert "There is no loss" in _result(server, _post(server, "forward_backward", message)["request_id"])["error"]
    step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.01}}
    assert _result(server, _post(server, "optim_step", step)["request_id"])["metrics"]["grad_norm"] > 0


def _until(true: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_requests_that_wait_for_an_earlier_one_have_a_bound(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(server)
    monkeypatch.setattr(trainer_file, "HELD", 3)
    step = {"model_id": model, "adam_params": {"learning_rate": 0.01}}
    late = [_post(server, "optim_step", step | {"seq_id": number})["request_id"] for number in (2, 3, 4)]
    status, words = _refused(server, "optim_step", step | {"seq_id": 5})
    assert status == 429 and words == "3 requests wait for that with seq_id 1: try again later."
    _post(server, "forward_backward", _training_pass(model, 1, TOKENS))  # the one that they wait for has room
    assert _result(server, late[0])["metrics"]["grad_norm"] > 0
    assert _post(server, "optim_step", step | {"seq_id": 5})["request_id"]


def test_requests_under_way_have_a_bound_and_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_file, "UNFINISHED", 3)
    monkeypatch.setattr(futures_file, "KEPT", 10)
    made = Futures(1 << 20)
    for name in "abc":
        made.begin(name)
    with pytest.raises(ApiError, match="3 requests are under way: try again later"):
        made.begin("d")
    made.end("b", 1)
    made.begin("d")
    for name in "acd":
        made.end(name, 1)
    for number in range(20):
        made.begin(str(number))
        made.end(str(number), number)
        assert asyncio.run(made.value(str(number), 0.01)) == number
        kept = [str(n) for n in range(20) if str(n) in made]
        assert kept == [str(n) for n in range(max(0, number - 10), number + 1)]  # all, until there are ten before it
    assert all(name in made for name in "abcd")  # which nobody has fetched


def test_a_model_that_is_unloaded_ends_what_waits(server: Served) -> None:
    model = _model(server)
    late = _post(server, "optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})["request_id"]
    _post(server, "unload_model", {"model_id": model})
    assert _result(server, late) == {"error": f"The model {model!r} was unloaded.", "category": "user"}


def test_a_silent_session_is_forgotten_without_another_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its models and samplers; a heartbeat keeps it."""
    with serving(folder, saves=folder.parent / "other", context=64) as server:
        monkeypatch.setattr(trainer_file, "SESSION", 2.0)
        model = _model(server)
        session = model.partition(":")[0]
        place = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = _post(server, "create_sampling_session", place)["sampling_session_id"]
        begin = time.monotonic()
        while time.monotonic() - begin < 3:
            _post(server, "session_heartbeat", {"session_id": session})
            time.sleep(0.05)
        assert server.send(f"/api/v1/samplers/{sampler}")[0] == 200
        _until(lambda: server.send(f"/api/v1/samplers/{sampler}")[0] == 404)
        assert server.send("/api/v1/get_info", {"model_id": model})[0] == 404
        assert server.send("/api/v1/session_heartbeat", {"session_id": session})[0] == 404


def test_samplers_are_added_in_the_servers_thread(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sessions are forgotten too, so that none is lost between the two."""
    names = list[str]()
    add = trainer_file.Trainer.add_sampler

    def noted(self: Any, sampler_id: str, model_id: str, sampling: Any) -> None:
        asyncio.get_running_loop()  # RuntimeError in another thread
        names.append(threading.current_thread().name)
        add(self, sampler_id, model_id, sampling)

    monkeypatch.setattr(trainer_file.Trainer, "add_sampler", noted)
    model = _model(server)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3}
    found = _result(server, _post(server, "save_weights_for_sampler", body)["request_id"])
    assert found["sampling_session_id"] == f"{model.partition(':')[0]}:sample:3"
    assert len(names) == 1 and names[0] != "fnmodels-server"
    assert server.send(f"/api/v1/samplers/{found['sampling_session_id']}")[0] == 200


def test_more_samples_than_may_wait_are_refused_before_any_is_made(server: Served) -> None:
    status, words = _refused(server, "asample", SAMPLE | {"num_samples": 9})
    assert status == 400 and words == "The request has 9 parts to answer; this server's queue has room for 8."

"""What a server of Tinker's protocol keeps: samplers and their weights, bytes of results, sessions, models, losses."""

import asyncio
import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import params as P
from fnmodels import tree
from tests.support.served import Served, serving, write_checkpoint
from tests.train.server.tinker.test_custom import _asked
from tests.train.server.tinker.test_protocol import _model, _post, _result, _training_pass
from train.server.errors import ApiError
from train.server.tinker import futures as futures_file
from train.server.tinker import kept as kept_file
from train.server.tinker import trainer as trainer_file
from train.server.tinker.futures import SMALL, Futures
from train.server.tinker.kept import Bounds
from train.server.worker import Ticket

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TOKENS = [72, 101, 108, 108]
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
BOUNDS = Bounds(samplers=3, named=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, saves=folder.parent / "saves", context=64, bounds=BOUNDS) as made:
        yield made


class Client:
    """A session with a model, whose requests are numbered."""

    def __init__(self, server: Served) -> None:
        self.server, self.model = server, _model(server)
        self.session = self.model.partition(":")[0]
        self._seq, self._samplers, self._samples = 0, 0, 0

    def _next(self) -> dict[str, Any]:
        self._seq += 1
        return {"model_id": self.model, "seq_id": self._seq}

    def update(self) -> None:
        place = self._next()
        _post(self.server, "forward_backward", _training_pass(self.model, place["seq_id"], TOKENS))
        step = self._next() | {"adam_params": {"learning_rate": 0.02}}
        assert _result(self.server, _post(self.server, "optim_step", step)["request_id"])["metrics"]["grad_norm"] > 0

    def momentary(self) -> str:
        self._samplers += 1
        body = self._next() | {"sampling_session_seq_id": self._samplers}
        found = _result(self.server, _post(self.server, "save_weights_for_sampler", body)["request_id"])
        return str(found["sampling_session_id"])

    def saved(self, name: str) -> str:
        body = self._next() | {"path": name}
        return str(_result(self.server, _post(self.server, "save_weights_for_sampler", body)["request_id"])["path"])

    def named(self, path: str) -> str:
        self._samplers += 1
        body = {"session_id": self.session, "sampling_session_seq_id": self._samplers, "model_path": path}
        return str(_post(self.server, "create_sampling_session", body)["sampling_session_id"])

    def asked(self, sampler: str, **how: Any) -> tuple[int, Any]:
        """(status, content) of a request for an answer."""
        self._samples += 1
        params = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "stop": []}
        body = {"sampling_session_id": sampler, "seq_id": self._samples, "prompt": PROMPT, "sampling_params": params}
        return self.server.send("/api/v1/asample", body | how)[:2]

    def sample(self, sampler: str) -> str:
        """The message with an answer and its log-probabilities."""
        status, content = self.asked(sampler)
        assert status == 200, content
        found = _result(self.server, content["request_id"])
        assert isinstance(found, str), found
        return found

    def status(self, sampler: str) -> int:
        return self.server.send(f"/api/v1/samplers/{sampler}")[0]


class Alive:
    """The models of samplers that are alive, of those that were made since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[weakref.ref[Any]] = []
        self._models, self._leaves, self.each = made, list[weakref.ref[Any]](), 0

        def noted(*args: Any) -> Any:
            found = trainer_served(*args)
            self._models.append(weakref.ref(found))
            leaves = _adapters(found.params)
            self.each = len(leaves)
            self._leaves += map(weakref.ref, leaves)
            return found

        trainer_served = trainer_file.Served
        monkeypatch.setattr(trainer_file, "Served", noted)

    def models(self) -> int:
        return sum(one() is not None for one in self._models)

    def leaves(self) -> int:
        return sum(one() is not None for one in self._leaves)


def _adapters(params: Any) -> list[Any]:
    return list(tree.leaves(P.lora.adapters(params)))


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    return Alive(monkeypatch)


def _settled(true: Callable[[], bool]) -> bool:
    """Whether something becomes true, such as that the worker has let go of a model after its last step."""
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_fifty_updates_keep_as_many_samplers_as_may_be(server: Served, alive: Alive) -> None:
    """Each samples from its newest weights. Without a garbage collection, which would come late."""
    client, answers = Client(server), set()
    gc.disable()
    try:
        for number in range(50):
            client.update()
            answers.add(client.sample(client.momentary()))
            assert _settled(lambda: alive.models() <= 3), (number, alive.models())
        leaves = alive.leaves()
    finally:
        gc.enable()
    assert len(answers) > 20  # they are different weights
    assert alive.models() == 3
    assert leaves == 3 * alive.each > 0


def test_the_sampler_that_was_not_used_for_longest_goes_and_says_so(server: Served) -> None:
    client = Client(server)
    first = client.momentary()
    wanted, others = client.sample(first), []
    for _ in range(6):  # the first one is a reference, which each step uses
        client.update()
        others.append(client.momentary())
        assert client.sample(first) == wanted  # to the bit
    assert [client.status(one) for one in (first, *others)] == [200, *([410] * 4), 200, 200]
    status, content = client.asked(others[0])
    assert status == 410 and content["error"]["message"] == (
        f"The weights of the sampler {others[0]!r} are no longer kept: of each model the 3 momentary ones that were "
        "used last are. Weights that save_weights_for_sampler saves under a name stay on disk, and "
        "create_sampling_client loads them again."
    )
    assert client.server.send("/api/v1/join_sampling_session", {"sampling_session_id": others[0]})[0] == 410
    assert client.asked(f"{client.session}:sample:99")[0] == 404


def test_models_have_samplers_of_their_own(server: Served) -> None:
    first, second = Client(server), Client(server)
    kept = [first.momentary() for _ in range(3)]
    for _ in range(5):
        second.momentary()
    assert [first.status(one) for one in kept] == [200] * 3


def test_a_request_under_way_keeps_its_weights(server: Served) -> None:
    client, free = Client(server), threading.Event()
    client.update()
    sampler = client.momentary()
    wanted = client.sample(sampler)
    server.service.worker.submit(None, [Ticket(lambda item: None, job=free.wait)])
    try:
        _, waiting = client.asked(sampler)
        _post(server, "unload_model", {"model_id": client.model})
        assert client.status(sampler) == 410
    finally:
        free.set()
    assert _result(server, waiting["request_id"]) == wanted


def test_the_samplers_of_an_unloaded_model_go_with_it(server: Served, alive: Alive) -> None:
    client = Client(server)
    path, momentary = client.saved("final"), [client.momentary() for _ in range(2)]
    named = client.named(path)
    for one in momentary:
        client.sample(one)
    assert alive.models() == 3
    _post(server, "unload_model", {"model_id": client.model})
    assert _settled(lambda: alive.models() == 1), alive.models()
    status, content = client.asked(momentary[1])
    assert status == 410 and content["error"]["message"].startswith(
        f"The weights of the sampler {momentary[1]!r} are no longer kept: its model {client.model!r} was unloaded, and "
    )
    assert client.sample(named)


def test_a_sampler_of_a_model_that_is_unloaded_meanwhile_is_not_made(server: Served, alive: Alive) -> None:
    client, free = Client(server), threading.Event()
    server.service.worker.submit(None, [Ticket(lambda item: None, job=free.wait)])
    try:
        body = {"model_id": client.model, "seq_id": 1, "sampling_session_seq_id": 1}
        request = _post(server, "save_weights_for_sampler", body)["request_id"]
        _post(server, "unload_model", {"model_id": client.model})
    finally:
        free.set()
    assert f"There is no model {client.model!r}" in _result(server, request)["error"]
    assert alive.models() == 0


def test_named_samplers_are_read_again_to_the_bit(server: Served, alive: Alive) -> None:
    client, samplers = Client(server), []
    for name in ("one", "two", "three"):
        client.update()
        samplers.append(client.named(client.saved(name)))
    assert _settled(lambda: alive.models() == 2)
    answers = [client.sample(one) for one in samplers]
    assert len(set(answers)) == 3
    for _ in range(2):
        assert [client.sample(one) for one in samplers] == answers
        assert _settled(lambda: alive.models() == 2), alive.models()


def test_a_named_sampler_has_no_other_weights_than_its_own(server: Served) -> None:
    client, saves = Client(server), Path(server.service.model.folder).parent / "saves"
    path = client.saved("same")
    old = client.named(path)
    answer = client.sample(old)
    client.update()
    assert client.saved("same") == path  # in place of the first ones
    assert client.sample(old) == answer  # which are in memory
    others = [client.named(client.saved(name)) for name in ("a", "b")]
    status, content = client.asked(old)
    assert status == 410 and f"others were saved at {path!r}" in content["error"]["message"]
    assert client.sample(client.named(path)) != answer
    shutil.rmtree(next(saves.glob("*/sampler_weights/a")))
    client.named(client.saved("c"))
    status, content = client.asked(others[0])
    assert status == 404 and "There is nothing saved" in content["error"]["message"]


def test_the_ids_of_samplers_have_a_bound(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without weights are forgotten first."""
    monkeypatch.setattr(kept_file, "IDS", 5)
    client = Client(server)
    made = [client.momentary() for _ in range(5)]
    assert [client.status(one) for one in made] == [410, 410, 200, 200, 200]
    body = {"session_id": client.session, "base_model": "tiny"}
    for number in (50, 51):
        _post(server, "create_sampling_session", body | {"sampling_session_seq_id": number})
    assert [client.status(one) for one in made] == [404, 404, 200, 200, 200]


def _fetched(made: Futures, name: str) -> Any:
    return asyncio.run(made.value(name, 0.01))


def test_results_have_a_bound_in_bytes() -> None:
    """Those that were fetched go, those that were not do not, and new requests wait for that."""
    made = Futures(100 * SMALL)
    for name in "abc":
        made.begin(name, 40 * SMALL if name != "c" else 20 * SMALL)
        made.end(name, bytes(30 * SMALL if name != "c" else 20 * SMALL))
    assert made.size == 80 * SMALL
    with pytest.raises(ApiError, match="above the limit of 409,600: try again later") as refused:
        made.begin("d", 30 * SMALL)
    assert refused.value.status == 429 and refused.value.retry_after == 1 and "d" not in made
    assert len(_fetched(made, "b")) == 30 * SMALL == len(_fetched(made, "b"))  # it may be fetched again
    made.begin("d", 30 * SMALL)
    assert "b" not in made and "a" in made and "c" in made and made.size == 80 * SMALL
    with pytest.raises(ApiError, match="There is no result"):
        _fetched(made, "b")
    with pytest.raises(ApiError, match=r"may have 409,601 bytes, and this server keeps 409,600 bytes") as never:
        made.begin("e", 100 * SMALL + 1)
    assert never.value.status == 400
    made.end("d", ApiError(400, "x"))
    for name in "acd":
        made.forget(name)
    assert made.size == 0


def test_a_request_that_others_wait_for_has_room() -> None:
    """Else they would wait for each other for ever."""
    made = Futures(10 * SMALL)
    made.begin("later", 8 * SMALL)
    with pytest.raises(ApiError, match="try again later"):
        made.begin("first", 8 * SMALL)
    made.begin("first", 8 * SMALL, awaited=True)


def test_results_that_nobody_fetches_make_room_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Futures(10 * SMALL)
    made.begin("left", 8 * SMALL)
    made.end("left", bytes(8 * SMALL))
    with pytest.raises(ApiError, match="try again later"):
        made.begin("next", 8 * SMALL)
    monkeypatch.setattr(futures_file, "ABANDONED", -1.0)
    made.begin("next", 8 * SMALL)
    assert "left" not in made and "next" in made  # which is under way, however long it takes


def test_a_server_with_full_results_asks_to_wait_and_goes_on(folder: Path) -> None:
    """A result counts as what it may have until it is there; 64 likeliest tokens at 4 places have some 2 KiB."""
    with serving(folder, saves=folder.parent / "full", context=64, bounds=Bounds(results=64 << 10)) as server:
        client = Client(server)
        sampler, asked = client.momentary(), []
        more = {"topk_prompt_logprobs": 64, "topk_sample_logprobs": 64, "num_samples": 4}
        for _ in range(50):
            status, content = client.asked(sampler, **more)
            if status != 200:
                break
            asked.append(content["request_id"])
        assert status == 429 and content["error"]["message"].endswith("the limit of 65,536: try again later.")
        assert 1 <= len(asked) < 8
        for one in asked:
            assert len(_result(server, one)) > 4000
        assert client.asked(sampler, **more)[0] == 200  # those that were fetched make room
        status, content = client.asked(sampler, topk_sample_logprobs=64, num_samples=40)
        assert status == 400 and "this server keeps 65,536 bytes of results" in content["error"]["message"]


def test_a_pass_that_an_update_waits_for_runs_where_results_are_full(folder: Path) -> None:
    with serving(folder, saves=folder.parent / "waits", context=64, bounds=Bounds(results=64 << 10)) as server:
        client = Client(server)
        sampler = client.momentary()
        step = {"model_id": client.model, "seq_id": 3, "adam_params": {"learning_rate": 0.02}}
        update = _post(server, "optim_step", step)["request_id"]
        while client.asked(sampler)[0] == 200:
            pass
        assert server.send("/api/v1/optim_step", step | {"seq_id": 4})[0] == 429
        _post(server, "forward_backward", _training_pass(client.model, 2, TOKENS))
        assert _result(server, update)["metrics"]["grad_norm"] > 0


def test_the_bound_of_a_result_holds(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of answers with all that can be asked, and of passes: no result is larger than what it was counted as."""
    counted: dict[str, int] = {}
    begin, end, large = Futures.begin, Futures.end, list[tuple[int, int]]()

    def begun(self: Futures, request_id: str, size: int = SMALL, **how: Any) -> None:
        counted[request_id] = size
        begin(self, request_id, size, **how)

    def ended(self: Futures, request_id: str, value: Any) -> None:
        if isinstance(value, bytes):
            large.append((len(value), counted[request_id]))
        end(self, request_id, value)

    monkeypatch.setattr(Futures, "begin", begun)
    monkeypatch.setattr(Futures, "end", ended)
    client = Client(server)
    client.update()
    sampler, places = client.momentary(), len(TOKENS) - 1
    targets = {"dtype": "int64", "shape": [places, 5], "data": [1] * (5 * places)}
    sparse = {"dtype": "int64", "shape": [places, 9], "data": [1, 2], "sparse_col_indices": [3, 8]}
    for extra in (
        {"topk_prompt_logprobs": 64, "topk_sample_logprobs": 64, "num_samples": 5},
        {"prompt_logprobs": True, "prompt_alt_tokens_k": 60, "target_prompt_logprobs": targets},
        {"target_prompt_logprobs": sparse | {"sparse_crow_indices": [0, 0, 1, 2]}},
        {},
    ):
        status, content = client.asked(sampler, **extra)
        assert status == 200, content
        assert isinstance(_result(server, content["request_id"]), str)
    assert len(large) == 5 and all(size <= most <= size + SMALL + 1600 for size, most in large), large


def _refused(server: Served, path: str, body: Any) -> tuple[int, str]:
    status, content, headers = server.send(f"/api/v1/{path}", body)
    assert headers.get("Retry-After", headers.get("retry-after")) == "30"
    return status, content["error"]["message"]


def test_sessions_models_and_losses_have_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = Bounds(sessions=3, models=2, losses=2)
    with serving(folder, saves=folder.parent / "few", context=64, bounds=bounds) as server:
        first, second = Client(server), Client(server)
        third = _post(server, "create_session", {})["session_id"]
        words = "which is all that it keeps; those of a session go when its client was silent for 10 minutes: try again"
        assert _refused(server, "create_session", {}) == (429, f"This server has 3 sessions, {words} later.")
        lora = {"base_model": "tiny", "lora_config": {"rank": 4}, "model_seq_id": 0}
        create = lora | {"session_id": third}
        assert _refused(server, "create_model", create) == (429, f"This server has 2 models, {words} later.")
        for number in range(2):
            _post(server, "create_custom_loss", _asked(first.session, custom_loss_seq_id=number))
        body = _asked(second.session)
        assert _refused(server, "create_custom_loss", body) == (429, f"This server has 2 custom losses, {words} later.")
        _post(server, "unload_model", {"model_id": first.model})
        assert _result(server, _post(server, "create_model", create)["request_id"])["type"] == "create_model"
        _post(server, "session_heartbeat", {"session_id": first.session})  # after the last one of the second
        monkeypatch.setattr(trainer_file, "STALE", 0.5)
        time.sleep(0.6)
        second.update()  # a sign of life, as each request is
        _post(server, "session_heartbeat", {"session_id": third})
        _post(server, "create_session", {})  # in place of the one that is silent
        alive = [server.send("/api/v1/session_heartbeat", {"session_id": one})[0] for one in (first.session, third)]
        assert alive == [404, 200]
        second.update()
        _post(server, "create_custom_loss", body)  # those of the first session went with it


def test_a_model_is_not_made_again_where_its_result_was_forgotten(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lose what was trained."""
    client = Client(server)
    client.update()
    trained = client.sample(client.momentary())
    monkeypatch.setattr(futures_file, "KEPT", 0)
    assert client.sample(client.momentary()) == trained  # and the results before it are forgotten
    lora = {"base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}, "model_seq_id": 0}
    found = _post(server, "create_model", lora | {"session_id": client.session})
    assert server.send("/api/v1/retrieve_future", {"request_id": found["request_id"]})[0] == 410
    assert found["model_id"] == client.model and client.sample(client.momentary()) == trained

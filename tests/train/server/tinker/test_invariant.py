"""kernel="invariant" through HTTP: the log-probabilities of sampled tokens are the trainer's, to the bit."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.cases import cases
from tests.support.served import CONFIG, Served, serving, write_checkpoint
from tests.train.server.tinker.test_messages import field
from tests.train.server.tinker.test_protocol import _model, _post, _result
from train.integrations import tinker
from train.integrations.tinker import types
from train.server.tinker.wire import _fields, _last_bytes, _messages

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

ROUTED = dataclasses.replace(next(case.config for case in cases() if case.name == "qwen3_moe"), vocab_size=260)
CONFIGS = {"llama": CONFIG, "qwen3_moe": ROUTED}
PROMPTS = [[72, 101, 108, 108, 111], [104], [32, *range(97, 120)]]


@pytest.fixture(params=CONFIGS)
def folder(request: Any, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", CONFIGS[request.param])


@pytest.fixture
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, saves=folder.parent / "saves", context=96, kernel="invariant") as made:
        yield made


def _bytes(server: Served, path: str, body: Any) -> bytes:
    """The protobuf message that a request ends with."""
    content: str = _result(server, _post(server, path, body)["request_id"])
    return content.encode(errors="surrogateescape")


def _entry(name: str, values: Any, kind: int) -> bytes:
    tensor = field(1, values.tobytes()) + field(3, kind) + field(4, bytes([len(values)]))
    return field(2, field(1, name.encode()) + field(2, tensor))


def _pass(model: str, seq_id: int, sequences: list[list[int]], *, forward: bool = False) -> bytes:
    """Cross-entropy of sequences, all in one request, so that they share a packed row."""
    message = field(1, model.encode()) + field(2, seq_id)
    for tokens in sequences:
        datum = field(1, field(1, field(1, np.array(tokens[:-1], np.int32).tobytes())))
        datum += _entry("target_tokens", np.array(tokens[1:], np.int64), 2)
        message += field(3, datum + _entry("weights", np.ones(len(tokens) - 1, np.float32), 1))
    return message + field(4, b"cross_entropy") + field(6, int(forward))


def _logprobs(output: bytes, sequences: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    """The log-probabilities of each sequence's targets, from a message ForwardBackwardOutput."""
    (record,) = _messages(_fields(output, None), 2, None)
    (named,) = _messages(record, 2, None)
    flat = np.frombuffer(_last_bytes(_fields(_last_bytes(named, 2), None), 1), np.float32)
    return np.split(flat, np.cumsum([len(tokens) - 1 for tokens in sequences])[:-1])


def _sampled(server: Served, sampler: str) -> list[tuple[list[int], list[int], np.ndarray[Any, Any]]]:
    """(prompt, answer, log-probabilities) of requests that are drawn side by side."""
    futures = []
    for number, prompt in enumerate(PROMPTS):
        drawn = {"max_tokens": 11 + 7 * number, "seed": number, "stop": []}
        chunks = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
        asked = {"sampling_session_id": sampler, "seq_id": number, "prompt": chunks, "num_samples": 2}
        futures.append(_post(server, "asample", asked | {"sampling_params": drawn})["request_id"])
    found = []
    for prompt, future in zip(PROMPTS, futures, strict=True):
        message = _result(server, future).encode(errors="surrogateescape")
        for sequence in _messages(_fields(message, None), 1, None):
            tokens = np.frombuffer(_last_bytes(sequence, 2), np.int32).tolist()
            found.append((prompt, tokens, np.frombuffer(_last_bytes(sequence, 3), np.float32)))
    return found


def test_sampled_log_probabilities_are_the_trainers_to_the_bit(server: Served) -> None:
    model = _model(server)
    for step in range(3):  # after which the adapters are not 0
        _post(server, "forward_backward", _pass(model, 2 * step + 1, PROMPTS[::2]))
        update = {"model_id": model, "seq_id": 2 * step + 2, "adam_params": {"learning_rate": 0.02}}
        assert _result(server, _post(server, "optim_step", update)["request_id"])["metrics"]["grad_norm"] > 0
    saved = _post(server, "save_weights_for_sampler", {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 0})
    sampler = _result(server, saved["request_id"])["sampling_session_id"]
    drawn = _sampled(server, sampler)
    sequences = [prompt + answer for prompt, answer, _ in drawn]
    for forward in (True, False):
        message = _pass(model, 8 + (not forward), sequences, forward=forward)
        scored = _logprobs(_bytes(server, "forward_backward", message), sequences)
        for (prompt, answer, logp), found in zip(drawn, scored, strict=True):
            assert len(logp) == len(answer) and (logp < 0).all()
            assert np.array_equal(found[len(prompt) - 1 :], logp)  # to the bit


def test_in_this_process_they_are_the_same_too(folder: Path) -> None:
    client = tinker.Client(folder=folder.parent / "runs", kernel="invariant")
    training = client.create_lora_training_client(folder, rank=4, seed=1)
    data = []
    for one in PROMPTS[::2]:
        entries: dict[str, Any] = {"target_tokens": one[1:], "weights": [1.0] * (len(one) - 1)}
        data.append(types.Datum(types.ModelInput.from_ints(one[:-1]), entries))
    for _ in range(3):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.02))
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True)
    drawn = types.SamplingParams(max_tokens=20, seed=1, stop=[])
    prompt = types.ModelInput.from_ints(PROMPTS[0])
    sequences = sampler.sample(prompt, 5, drawn).result().sequences
    scored = []
    for replay in (True, False):
        rows = []
        for one in sequences:
            tokens = PROMPTS[0] + one.tokens
            entries = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            entries |= {"routing": one.routing} if replay and one.routing is not None else {}
            rows.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), entries))
        scored.append(training.forward_backward(rows, "cross_entropy").result())
    assert scored[0] == scored[1]  # the sampler's experts are the trainer's own
    for one, found in zip(sequences, scored[0].loss_fn_outputs, strict=True):
        assert torch.equal(found["logprobs"].to_torch()[len(PROMPTS[0]) - 1 :], torch.tensor(one.logprobs))
    full = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPTS[0] + sequences[0].tokens)).result()
    assert full[len(PROMPTS[0]) :] == sequences[0].logprobs

"""Recorded sequences: data that name them replay the experts of their tokens, and nothing else."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.cases import cases
from tests.support.served import Served, serving, write_checkpoint
from tests.train.server.tinker.test_messages import field
from tests.train.server.tinker.test_protocol import _model, _post, _result
from train.integrations.tinker import types
from train.server.tinker.sequences import Recorded, Sequences
from train.server.tinker.wire import Span

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CONFIG = dataclasses.replace(next(case.config for case in cases() if case.name == "qwen3_moe"), vocab_size=260)
PROMPT = [72, 101, 108]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(write_checkpoint(folder / "checkpoint", CONFIG), saves=folder / "saves", context=64) as made:
        yield made


def _recorded(tokens: int = 5) -> Recorded:
    routing = torch.arange(tokens * 4, dtype=torch.int16).reshape(tokens, 2, 2)
    return Recorded([1, 2, 3], [4, 5, 6], routing)


def _datum(tokens: list[int]) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens})


WHOLE = [Span(False, "a:1", 0, 3), Span(True, "a:1", 0, 2)]


def test_spans_put_the_experts_of_a_sequence_together() -> None:
    kept = Sequences()
    kept.keep("a:1", _recorded())
    kept.keep("a:2", dataclasses.replace(_recorded(), routing=_recorded().routing + 100))
    (plain, named), count = kept.replayed([_datum([7]), _datum([1, 2, 3, 4, 5])], [[], WHOLE], "a")
    assert count == 5 and "routing" not in plain.loss_fn_inputs
    assert torch.equal(named.loss_fn_inputs["routing"].to_torch(), _recorded().routing.long())
    mixed = [Span(False, "a:2", 1, 2), Span(True, "a:1", 1, 1)]
    (found,), count = kept.replayed([_datum([2, 3, 5])], [mixed], "a")
    rows = torch.cat((_recorded().routing[1:3] + 100, _recorded().routing[4:5]))
    assert count == 3 and torch.equal(found.loss_fn_inputs["routing"].to_torch(), rows.long())
    ends = [Span(False, "a:1", 0, 3), Span(True, "a:1", 0, 3)]  # with the last token, which was never computed
    last = types.Datum(_datum([1, 2, 3, 4, 5, 6]).model_input, {"target_tokens": [2, 3, 4, 5, 6, -100]})
    (found,), count = kept.replayed([last], [ends], "a")
    assert count == 5 and found.loss_fn_inputs["routing"].to_torch()[5].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("tokens", "spans", "session", "words"),
    [
        ([1, 2, 3, 4, 5], WHOLE, "b", "'a:1', which is not recorded"),
        ([1], [Span(False, "a:9", 0, 1)], "a", "'a:9', which is not recorded"),
        ([1, 2, 3, 4, 9], WHOLE, "a", "Tokens of datum 0 are not those of the sequence"),
        ([1, 2, 3, 4, 5, 6], WHOLE, "a", "have 5 tokens; it has 6"),
        ([1, 2, 3, 4], [Span(False, "a:1", 0, 4)], "a", "names more tokens than the sequence"),
        ([4, 5, 6, 4], [Span(True, "a:1", 0, 4)], "a", "names more tokens than the sequence"),
        ([6, 1], [Span(True, "a:1", 2, 1), Span(False, "a:1", 0, 1)], "a", "goes on behind the last token"),
    ],
)
def test_spans_that_do_not_fit_are_refused(tokens: list[int], spans: list[Span], session: str, words: str) -> None:
    kept = Sequences()
    kept.keep("a:1", _recorded())
    with pytest.raises(ValueError, match=words):
        kept.replayed([_datum(tokens)], [spans], session)


def test_the_oldest_sequences_and_those_of_a_session_are_forgotten() -> None:
    kept = Sequences(limit=2 * _recorded().routing.nbytes)
    for name in ("a:1", "a:2", "b:1"):
        kept.keep(name, _recorded())
    with pytest.raises(ValueError, match="not recorded"):
        kept.replayed([_datum([1, 2, 3, 4, 5])], [WHOLE], "a")
    kept.forget("a")
    kept.keep("a:1", _recorded())
    for session, name in (("b", "b:1"), ("a", "a:1")):
        spans = [dataclasses.replace(span, sequence_id=name) for span in WHOLE]
        assert kept.replayed([_datum([1, 2, 3, 4, 5])], [spans], session)[1] == 5


def _sampled(server: Served, session: str, number: int, *, record: bool) -> str:
    """The id of a sequence that a sampler of the base model has drawn."""
    asked = {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"}
    sampler = _post(server, "create_sampling_session", asked)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "record_stability_info": record}
    future = _post(server, "asample", body | {"sampling_params": {"max_tokens": 6, "stop": [], "temperature": 0.0}})
    _result(server, future["request_id"])
    return str(future["sample_sequence_ids"][0])


def _entry(name: str, values: Any, kind: int) -> bytes:
    tensor = field(1, values.tobytes()) + field(3, kind) + field(4, bytes([len(values)]))
    return field(2, field(1, name.encode()) + field(2, tensor))


def _pass(model: str, seq_id: int, tokens: list[int], spans: list[Span]) -> bytes:
    datum = field(1, field(1, field(1, np.array(tokens, np.int32).tobytes())))
    datum += _entry("target_tokens", np.array(tokens, np.int64), 2) + _entry("weights", np.ones(len(tokens), "f4"), 1)
    for span in spans:
        inner = field(1, span.sequence_id.encode()) + field(2, span.offset) + field(3, span.length)
        datum += field(3, field(2 if span.sampled else 1, inner))
    return field(1, model.encode()) + field(2, seq_id) + field(3, datum) + field(4, b"cross_entropy")


def _norm(server: Served, model: str, seq_id: int, spans: list[Span]) -> float:
    future = _post(server, "forward_backward", _pass(model, seq_id, PROMPT, spans))
    assert ("routing/replayed:sum" in _result(server, future["request_id"])) == bool(spans)
    step = {"model_id": model, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.05}}
    return float(_result(server, _post(server, "optim_step", step)["request_id"])["metrics"]["grad_norm"])


def test_the_server_replays_the_sequences_of_its_session(server: Served) -> None:
    models = [_model(server) for _ in range(2)]
    norms: list[list[float]] = []
    for model in models:
        sequence = _sampled(server, model.partition(":")[0], 0, record=True)
        spans = [Span(False, sequence, 0, len(PROMPT))] if model == models[0] else []
        norms.append([_norm(server, model, 2 * step + 1, spans) for step in range(8)])
    # the same adapters and at first the same experts; then those of the other are chosen anew
    assert norms[0][0] == norms[1][0] and norms[0][-1] != norms[1][-1]
    session = models[1].partition(":")[0]
    unrecorded = _sampled(server, session, 1, record=False)
    for name in (unrecorded, "x:sample:0:1:0"):
        body = _pass(models[1], 17, PROMPT, [Span(False, name, 0, len(PROMPT))])
        status, content, _ = server.send("/api/v1/forward_backward", body)
        assert status == 400 and "is not recorded" in content["error"]["message"]


def test_a_target_behind_the_last_token_is_refused_unless_it_does_not_count() -> None:
    kept, ends = Sequences(), [Span(False, "a:1", 0, 3), Span(True, "a:1", 0, 3)]
    kept.keep("a:1", _recorded())
    inputs = types.ModelInput.from_ints([1, 2, 3, 4, 5, 6])
    for name in ("weights", "advantages", "mask"):
        counted = {"target_tokens": [2, 3, 4, 5, 6, 7], name: [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]}
        with pytest.raises(ValueError, match="Datum 0 has a target behind the last token of a sequence"):
            kept.replayed([types.Datum(inputs, counted)], [ends], "a")
        kept.replayed([types.Datum(inputs, counted | {name: [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]})], [ends], "a")


def test_a_sequence_that_is_recorded_again_counts_once() -> None:
    size = _recorded().routing.nbytes
    kept = Sequences(2 * size)
    for name in ("a:1", "a:2", "a:2", "a:2"):
        kept.keep(name, _recorded())
    assert kept.replayed([_datum([1, 2, 3, 4, 5])], [WHOLE], "a")[1] == 5  # a:1 is there

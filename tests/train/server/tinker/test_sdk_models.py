"""Tinker's published package with servers of a model that reads pictures, and of one with experts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import cases
from tests.support.pictured import picture, write_reader
from tests.support.served import write_checkpoint
from train.integrations import tinker as inside

pytest.importorskip("starlette")
tinker = pytest.importorskip("tinker")

from tinker import types  # noqa: E402

from tests.train.server.tinker.test_sdk import TOKENS, _supervised  # noqa: E402

ROUTED = dataclasses.replace(next(case.config for case in cases() if case.name == "qwen3_moe"), vocab_size=260)


def test_pictures_have_the_numbers_of_this_process(tmp_path: Path) -> None:
    """Supervised passes, updates, answers and prompt log-probabilities with image chunks beside text alone."""
    from train.server.app import Limits
    from train.server.background import background

    folder, data = write_reader(tmp_path / "checkpoint"), picture(2, 3)
    limits = Limits(slots=16, context=64)
    found: list[Any] = []
    with background(folder, "reader", limits=limits, token="tml-secret", saves=tmp_path / "saves") as running:
        service = tinker.ServiceClient(base_url=running.url.removesuffix("/v1"), api_key="tml-secret")
        local = inside.ServiceClient(folder=tmp_path / "local")
        for training, kind in (
            (service.create_lora_training_client(base_model="reader", rank=4, seed=7).result(), types),
            (local.create_lora_training_client(base_model=str(folder), rank=4, seed=7).result(), inside.types),
        ):
            chunks = [
                kind.EncodedTextChunk(tokens=[1, 2, 58]),
                kind.ImageChunk(data=data, format="png", expected_tokens=6),
                kind.EncodedTextChunk(tokens=[57, 3]),
            ]
            given, plain = kind.ModelInput(chunks=chunks), kind.ModelInput.from_ints([4, 5, 6])
            targets = [[2, 58, *[60] * 6, 57, 3, 4], [5, 6, 7]]
            batch = []
            for one, labels in zip((given, plain), targets, strict=True):
                inputs = {"target_tokens": torch.tensor(labels), "weights": torch.ones(len(labels))}
                own = {name: kind.TensorData.from_torch(values) for name, values in inputs.items()}
                batch.append(kind.Datum(model_input=one, loss_fn_inputs=own))
            losses = []
            for _ in range(3):
                output = training.forward_backward(batch, "cross_entropy").result()
                training.optim_step(kind.AdamParams(learning_rate=0.02)).result()
                logps = [one["logprobs"].to_torch().tolist() for one in output.loss_fn_outputs]
                losses.append((output.metrics["loss:sum"], logps))
            sampler = training.save_weights_and_get_sampling_client()
            sampler = sampler.result() if hasattr(sampler, "result") else sampler
            params = kind.SamplingParams(max_tokens=5, temperature=0.0, stop=[0])
            answer = sampler.sample(given, 1, params, include_prompt_logprobs=True).result()
            found.append((losses, [one.tokens for one in answer.sequences], answer.prompt_logprobs))
    (there, tokens, nats), (here, wanted, local_nats) = found
    assert there == here and here[-1][0] < here[0][0] and tokens == wanted
    assert nats[1:] == pytest.approx(local_nats[1:], rel=1e-5, abs=1e-6)


def test_data_that_name_sampled_sequences_replay_their_experts(tmp_path: Path) -> None:
    from train.server.app import Limits
    from train.server.background import background

    folder, prompt = write_checkpoint(tmp_path / "checkpoint", ROUTED), TOKENS[0][:4]
    drawn: dict[str, Any] = {"max_tokens": 8, "seed": 1, "temperature": 1.0}
    limits = Limits(slots=16, context=64)
    with background(folder, "routed", limits=limits, token="tml-secret", saves=tmp_path / "saves") as running:
        service = tinker.ServiceClient(base_url=running.url.removesuffix("/v1"), api_key="tml-secret")
        local = inside.ServiceClient(folder=tmp_path / "local")
        found = []
        for training, kind in (
            (service.create_lora_training_client(base_model="routed", rank=4, seed=7).result(), types),
            (local.create_lora_training_client(base_model=str(folder), rank=4, seed=7).result(), inside.types),
        ):
            sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
            asked = kind.SamplingParams(**drawn)
            sequences = sampler.sample(kind.ModelInput.from_ints(prompt), 4, asked).result().sequences
            _supervised(training, kind, 8)  # after which other experts would be chosen
            losses = []
            for replay in (True, False):
                data = [_of_sequence(kind, prompt, sequence, replay) for sequence in sequences]
                output = training.forward_backward(data, "importance_sampling").result()
                norm = training.optim_step(kind.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
                losses.append((output.metrics["loss:sum"], norm))
                if kind is types:
                    tokens = sum(len(prompt) + len(sequence.tokens) - 1 for sequence in sequences)
                    assert output.metrics.get("routing/replayed:sum", 0) == (tokens if replay else 0)
            found.append(losses)
    (replayed, own), here = found
    assert [replayed, own] == here  # to the bit
    assert abs(replayed[1] - own[1]) > 1e-4 * own[1]


def _of_sequence(kind: Any, prompt: list[int], sequence: Any, replay: bool) -> Any:
    """The datum of a sequence; replay: with its experts here, and by name to the server."""
    tokens, size = prompt + list(sequence.tokens), len(prompt) - 1
    inputs = {
        "target_tokens": torch.tensor(tokens[1:]),
        "logprobs": torch.tensor([0.0] * size + list(sequence.logprobs)),
        "advantages": torch.tensor([0.0] * size + [1.0] * len(sequence.tokens)),
    }
    own = {name: kind.TensorData.from_torch(values) for name, values in inputs.items()}
    if replay and kind is inside.types:
        own["routing"] = sequence.routing
    datum = kind.Datum(model_input=kind.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=own)
    if not replay or kind is inside.types:
        return datum
    name, drawn = sequence.sequence_id, len(sequence.tokens)
    whole = types.PromptProvenanceSpan(sequence_id=name, length=len(prompt))
    spans = [whole, types.SampledProvenanceSpan(sequence_id=name, length=drawn - 1)]
    targets = [types.PromptProvenanceSpan(sequence_id=name, offset=1, length=size)]
    return datum.with_provenance(spans, [*targets, types.SampledProvenanceSpan(sequence_id=name, length=drawn)])


def test_a_loop_runs_within_the_bounds_of_a_server(tmp_path: Path) -> None:
    """A reference that each step uses stays, an older sampler is refused at once, one with a name is there again; and
    where results are full the package waits, so that each of many answers is that of a request alone."""
    from train.server.app import Limits
    from train.server.background import background
    from train.server.tinker.kept import Bounds

    how: Any = {"limits": Limits(slots=16, context=64), "bounds": Bounds(samplers=2, named=1, results=40 << 10)}
    folder = write_checkpoint(tmp_path / "checkpoint")
    with background(folder, "tiny", token="tml-secret", saves=tmp_path / "saves", kernel="invariant", **how) as running:
        service = tinker.ServiceClient(base_url=running.url.removesuffix("/v1"), api_key="tml-secret")
        training = service.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
        prompt, params = types.ModelInput.from_ints(TOKENS[0]), types.SamplingParams(max_tokens=4, seed=5, stop=[])

        def drawn(sampler: Any) -> list[float]:
            found: list[float] = sampler.sample(prompt, 1, params).result().sequences[0].logprobs
            return found

        reference = training.save_weights_and_get_sampling_client().result()
        wanted, older, named = drawn(reference), [], []
        for step in range(4):
            _supervised(training, types, 1)
            older.append(training.save_weights_and_get_sampling_client().result())
            path = training.save_weights_for_sampler(f"step-{step}").result().path
            named.append(service.create_sampling_client(model_path=path).result())
            assert drawn(older[-1]) == drawn(named[-1]) != wanted == drawn(reference)
        with pytest.raises(tinker.APIStatusError, match="the 2 momentary ones that were used last are") as refused:
            drawn(older[0])
        assert refused.value.status_code == 410
        answers = [drawn(one) for one in named]
        assert answers[-1] == drawn(older[-1]) and len({tuple(one) for one in answers}) == 4
        futures = [reference.sample(prompt, 4, params, topk_sample_logprobs=32) for _ in range(20)]
        assert {tuple(one.result().sequences[0].logprobs) for one in futures} == {tuple(wanted)}

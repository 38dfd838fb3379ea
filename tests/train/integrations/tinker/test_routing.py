"""Routing replay: a pass over a sampled sequence has the gradient of the sampler's experts, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
import train.integrations.tinker as tinker
from fnmodels import tree
from tests.support.cases import cases, generic_params, routing_of
from train.data.token_budget import token_budget
from train.integrations.tinker import types
from train.losses.output_loss import logprob_loss

CONFIG = next(case.config for case in cases() if case.name == "qwen3_moe")
PROMPT = [5, 3, 9, 1]


@pytest.fixture
def training(tmp_path: Path) -> tinker.TrainingClient:
    P.save_pretrained(tmp_path / "base", CONFIG, generic_params(CONFIG))
    client = tinker.Client(folder=tmp_path / "runs").create_lora_training_client(tmp_path / "base", rank=4, seed=0)
    _move(client, 0.05)
    return client


def _move(training: tinker.TrainingClient, rate: float) -> None:
    entries = {"target_tokens": [3, 9, 1, 7], "weights": [1.0] * 4}
    training.forward_backward([types.Datum(types.ModelInput.from_ints(PROMPT), entries)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=rate))


def _sampled(training: tinker.TrainingClient) -> tuple[list[types.SampledSequence], Any]:
    """(sequences, the parameters that drew them), before updates that change the routing."""
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True)
    drawn = types.SamplingParams(max_tokens=12, seed=2, stop=[])
    sequences = sampler.sample(types.ModelInput.from_ints(PROMPT), 6, drawn).result().sequences
    for _ in range(8):
        _move(training, 0.05)
    return sequences, sampler.params


def _data(sequences: list[types.SampledSequence], *, replay: bool = True) -> list[types.Datum]:
    data = []
    for number, sequence in enumerate(sequences):
        tokens, before = PROMPT + sequence.tokens, len(PROMPT) - 1
        entries: dict[str, Any] = {"target_tokens": tokens[1:], "logprobs": [0.0] * before + sequence.logprobs}
        entries["advantages"] = [0.0] * before + [1.0 - number / 2] * len(sequence.tokens)
        entries |= {"routing": sequence.routing} if replay else {}
        data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), entries))
    return data


def _gradients(training: tinker.TrainingClient) -> list[Tensor]:
    found = [gradient.clone() for gradient in tree.leaves(training.engine.gradients())]
    training.engine.zero_grad()
    return found


def test_the_gradient_is_that_of_the_samplers_experts_to_the_bit(training: tinker.TrainingClient) -> None:
    sequences, params = _sampled(training)
    entries: dict[str, list[Tensor]] = {name: [] for name in ("tokens", "labels", "logprobs", "advantages", "routing")}
    for datum in _data(sequences):
        tokens = torch.tensor(datum.model_input.to_ints())
        given = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        wanted = routing_of(params, fnmodels.prepare(CONFIG, tokens[None]), CONFIG)[0]  # of one forward of the sampler
        assert torch.equal(given["routing"], wanted)
        given |= {"tokens": tokens, "labels": given["target_tokens"], "routing": wanted}
        for name, values in entries.items():
            values.append(given[name])

    def loss(logp: Tensor, entropy: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return -((logp - batch["logprobs"]).exp() * batch["advantages"]).sum(), (batch["labels"] >= 0).sum()

    ((row,),) = token_budget(entries, 4096)
    total = training.engine.forward_backward([row.batch], logprob_loss(loss, config=CONFIG))["total"]
    wanted_gradients = _gradients(training)
    found = training.forward_backward(_data(sequences), "importance_sampling").result()
    assert found.metrics["loss:sum"] == float(total)
    replayed = _gradients(training)
    assert all(torch.equal(a, b) for a, b in zip(replayed, wanted_gradients, strict=True))
    training.forward_backward(_data(sequences, replay=False), "importance_sampling")
    own = _gradients(training)
    assert any((a - b).abs().max() > 1e-3 * b.abs().max() for a, b in zip(replayed, own, strict=True))
    assert (
        training.forward(_data(sequences), "ppo").result().metrics["loss:sum"]
        != (training.forward(_data(sequences, replay=False), "ppo").result().metrics["loss:sum"])
    )


def test_the_same_weights_and_their_own_experts_give_the_same_bits(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True)
    drawn = types.SamplingParams(max_tokens=12, seed=2, stop=[])
    sequences = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, drawn).result().sequences
    outputs = [
        training.forward_backward(_data(sequences, replay=replay), "importance_sampling").result()
        for replay in (True, False)
    ]
    assert outputs[0] == outputs[1]


def test_a_custom_loss_replays_too(training: tinker.TrainingClient) -> None:
    sequences, _ = _sampled(training)

    def loss(logprobs: Tensor, advantages: Tensor) -> Any:
        return -(logprobs * advantages).sum(), {}

    made = tinker.Client().create_custom_loss(loss, {"logprobs": 1, "advantages": 1}).result()

    def own(data: list[types.Datum], logps: list[Tensor]) -> Any:
        gains = [datum.loss_fn_inputs["advantages"].to_torch() for datum in data]
        return torch.stack([-(a * b).sum() for a, b in zip(logps, gains, strict=True)]).sum(), {}

    training.forward_backward_custom(_data(sequences), made)
    traced = _gradients(training)
    training.forward_backward_custom(_data(sequences), own)
    called = _gradients(training)
    training.forward_backward_custom(_data(sequences, replay=False), own)
    plain = _gradients(training)
    for a, b in zip(traced, called, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert any((a - c).abs().max() > 1e-3 * c.abs().max() for a, c in zip(called, plain, strict=True))


def test_routing_of_another_form_is_refused(training: tinker.TrainingClient) -> None:
    sequences, _ = _sampled(training)
    routing = sequences[0].routing
    assert routing is not None
    for changed, words in (
        (routing.experts[1:], "it needs integers"),
        (routing.experts.float(), "it needs integers"),
        (routing.experts[:, 1:], "routing must be int64"),
        (torch.full_like(routing.experts, 99), "routing holds 99"),
    ):
        (datum,) = _data(sequences[:1], replay=False)
        entries = {**datum.loss_fn_inputs, "routing": types.Routing(changed)}
        with pytest.raises(ValueError, match=words):
            training.forward_backward([types.Datum(datum.model_input, entries)], "ppo")
    with pytest.raises(ValueError, match="Datum 1 has no 'routing', which other data have"):
        training.forward_backward(_data(sequences[:1]) + _data(sequences[1:2], replay=False), "ppo")


def test_a_model_without_experts_records_nothing(tmp_path: Path) -> None:
    config = next(case.config for case in cases() if case.name == "llama")
    P.save_pretrained(tmp_path / "base", config, generic_params(config))
    sampler = tinker.Client().create_sampling_client(base_model=tmp_path / "base", record_stability_info=True)
    drawn = types.SamplingParams(max_tokens=2, stop=[])
    assert sampler.sample(types.ModelInput.from_ints(PROMPT), 1, drawn).result().sequences[0].routing is None

"""Tinker's published package, unchanged, with this server as its base URL: the numbers are those of the same loop in
this process, and a policy learns."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.served import write_checkpoint
from train.integrations import tinker as inside

pytest.importorskip("starlette")
tinker = pytest.importorskip("tinker")

from tinker import types  # noqa: E402

TOKENS = [[72, 101, 108, 108, 111, 44, 32], [104, 101, 32, 115, 97, 105], [100, 46, 32, 72, 101, 108, 108]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    from train.server.app import Limits
    from train.server.background import background

    os.environ["TINKER_TELEMETRY"] = "0"
    saves = folder.parent / "saves"
    with background(folder, "tiny", limits=Limits(slots=16, context=64), token="tml-secret", saves=saves) as running:
        yield running.url.removesuffix("/v1")


@pytest.fixture(scope="module")
def service(url: str) -> Any:
    return tinker.ServiceClient(base_url=url, api_key="tml-secret")


def _data(kind: Any) -> list[Any]:
    found = []
    for row, tokens in enumerate(TOKENS):
        weights = torch.ones(len(tokens) - 1)
        weights[:row] = 0
        inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": weights}
        own = {name: kind.TensorData.from_torch(values) for name, values in inputs.items()}
        found.append(kind.Datum(model_input=kind.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=own))
    return found


def _supervised(training: Any, kind: Any, steps: int = 5) -> list[tuple[float, list[list[float]]]]:
    """Loss and log-probabilities of each step."""
    found = []
    for _ in range(steps):
        passed = training.forward_backward(_data(kind), "cross_entropy")
        stepped = training.optim_step(kind.AdamParams(learning_rate=0.02, grad_clip_norm=1.0))
        output = passed.result()
        assert stepped.result().metrics["grad_norm"] > 0
        logps = [one["logprobs"].to_torch().tolist() for one in output.loss_fn_outputs]
        found.append((output.metrics["loss:sum"], logps))
    return found


def test_a_supervised_loop_has_the_numbers_of_the_one_in_this_process(service: Any, folder: Path) -> None:
    capabilities = service.get_server_capabilities()
    assert [model.model_name for model in capabilities.supported_models] == ["tiny"]
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    local = inside.ServiceClient(folder=folder.parent / "local")
    other = local.create_lora_training_client(base_model=str(folder), rank=4, seed=7).result()
    here, there = _supervised(other, inside.types), _supervised(training, types)
    assert there == here  # to the bit
    assert here[-1][0] < 0.8 * here[0][0]
    info = training.get_info()
    assert info.is_lora and info.lora_rank == 4 and info.model_data.model_name == "tiny"
    forward = training.forward(_data(types), "cross_entropy").result()
    assert forward.metrics == other.forward(_data(inside.types), "cross_entropy").result().metrics


def _several(kind: Any) -> list[Any]:
    """Data with 3, 2 and 8 targets at a token; of the last ones most have no weight, so that they travel sparse."""
    generator, found = torch.Generator().manual_seed(2), []
    for tokens, columns in zip(TOKENS, (3, 2, 8), strict=True):
        targets = torch.randint(1, 250, (len(tokens), columns), generator=generator)
        weights = torch.rand(targets.shape, generator=generator)
        if columns == 8:
            targets[:, 1:], weights[:, 1:] = 0, 0
        model_input = kind.ModelInput.from_ints(tokens)
        found.append(kind.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": targets, "weights": weights}))
    return found


def _reverse(data: list[Any], logps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
    return sum((logp.exp() * (logp - own)).sum() for logp, own in zip(logps, weights, strict=True)), {}  # type: ignore


def test_several_targets_have_the_numbers_of_this_process(service: Any, folder: Path) -> None:
    assert _several(types)[2].loss_fn_inputs["weights"].sparse_crow_indices is not None
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    local = inside.ServiceClient(folder=folder.parent / "local")
    other = local.create_lora_training_client(base_model=str(folder), rank=4, seed=7).result()
    found = []
    for own, kind in ((training, types), (other, inside.types)):
        outputs = []
        for call, loss in ((own.forward_backward, "cross_entropy"), (own.forward_backward_custom, _reverse)):
            output = call(_several(kind), loss).result()
            own.optim_step(kind.AdamParams(learning_rate=0.02)).result()
            logps = [one["logprobs"].to_torch() for one in output.loss_fn_outputs]
            assert [list(logp.shape) for logp in logps] == [[7, 3], [6, 2], [7, 8]]
            outputs.append((output.metrics["loss:sum"], torch.cat([logp.flatten() for logp in logps])))
        found.append(outputs)
    for (there, nats), (here, wanted) in zip(*found, strict=True):
        assert there == pytest.approx(here, rel=1e-5)
        torch.testing.assert_close(nats, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0][0][1], found[0][1][1])  # the update moved them


POLICY = ("logprobs", "advantages")
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, float] | None]] = {
    "cross_entropy": (("weights",), None),
    "importance_sampling": (POLICY, None),
    "ppo": ((*POLICY, "clip_low_threshold", "clip_high_threshold"), None),
    "cispo": (POLICY, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
    "dro": (POLICY, {"beta": 0.05}),
    "gspo": ((*POLICY, "sequence_ratio_mask"), {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
}


def _drawn(kind: Any, names: tuple[str, ...]) -> list[Any]:
    """Data with entries of these names, drawn from a seed."""
    draws, found = torch.Generator().manual_seed(1), []
    for tokens in TOKENS:
        inputs = {"target_tokens": torch.tensor(tokens[1:])}
        for name in names:
            values = torch.randn(len(tokens) - 1, generator=draws)
            ranges = {"logprobs": values - 5, "sequence_ratio_mask": torch.ones_like(values)}
            ranges |= {"clip_low_threshold": 1 - values.abs(), "clip_high_threshold": 1 + values.abs()}
            inputs[name] = ranges.get(name, values)
        own = {name: kind.TensorData.from_torch(values) for name, values in inputs.items()}
        found.append(kind.Datum(model_input=kind.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=own))
    return found


def _clients(service: Any, folder: Path) -> list[tuple[Any, Any]]:
    """(a client, its types): of the server, and of this process, with the same adapters after an update."""
    local = inside.ServiceClient(folder=folder.parent / "local")
    clients = [
        (service.create_lora_training_client(base_model="tiny", rank=4, seed=7).result(), types),
        (local.create_lora_training_client(base_model=str(folder), rank=4, seed=7).result(), inside.types),
    ]
    for training, kind in clients:
        _supervised(training, kind, 1)
    return clients


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_numbers_and_gradients_of_the_one_in_this_process(service: Any, folder: Path, name: str) -> None:
    entries, numbers = LOSSES[name]
    found = []
    for training, kind in _clients(service, folder):
        output = training.forward_backward(_drawn(kind, entries), name, numbers).result()
        norm = training.optim_step(kind.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
        found.append((output.metrics["loss:sum"], norm))
        assert norm > 0.01
    assert found[0] == found[1]  # to the bit


def _own_loss(logprobs: Any, advantages: Any, scale: Any) -> Any:
    ratio = (logprobs + 5).clamp(max=20.0).exp()
    loss = -scale * torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages).mean()
    return loss + torch.nn.functional.softplus(logprobs)[1:].sum(), {"custom/ratio:mean": ratio.mean()}


def test_a_custom_loss_runs_on_the_server_in_one_pass(service: Any, folder: Path) -> None:
    def data(kind: Any) -> list[Any]:
        found = _drawn(kind, POLICY)
        for number, datum in enumerate(found):
            datum.loss_fn_inputs["scale"] = kind.TensorData.from_torch(torch.tensor(0.5 + number))
        return found

    handle = service.create_custom_loss(_own_loss, {"logprobs": 1, "advantages": 1, "scale": 0}).result()
    assert handle.loss_id is not None  # else the package computes it
    local = inside.ServiceClient().create_custom_loss(_own_loss, {"logprobs": 1, "advantages": 1, "scale": 0}).result()
    found = []
    for (training, kind), loss in zip(_clients(service, folder), (handle, local), strict=True):
        output = training.forward_backward_custom(data(kind), loss).result()
        norm = training.optim_step(kind.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
        found.append((output.metrics["loss:sum"], output.metrics["custom/ratio:mean"], norm))
    assert found[0] == found[1] and found[0][2] > 0.01


def test_states_are_saved_loaded_and_gone_on_from(service: Any) -> None:
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    _supervised(training, types, 2)
    path = training.save_state("two").result().path
    wanted = _supervised(training, types, 2)
    assert path.startswith("tinker://") and path.endswith("/weights/two")
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert _supervised(resumed, types, 2) == wanted
    fresh = service.create_training_client_from_state(path).result()
    first, second = _supervised(fresh, types, 2)
    assert first == wanted[0] and second != wanted[1]  # the moments of Adam start anew
    with pytest.raises(tinker.RequestFailedError, match="was saved before"):
        training.save_state("two").result()
    with pytest.raises(tinker.RequestFailedError, match="There is nothing saved"):
        service.create_training_client_from_state(path + "-three").result()


def test_samplers_draw_from_the_weights_of_their_moment(service: Any) -> None:
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    prompt = types.ModelInput.from_ints(TOKENS[0][:3])
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    base = service.create_sampling_client(base_model="tiny").result()
    before = base.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    _supervised(training, types, 20)
    sampler = training.save_weights_and_get_sampling_client().result()
    after = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    assert after.sequences[0].tokens == TOKENS[0][3:] != before.sequences[0].tokens  # it was learned by heart
    named = service.create_sampling_client(model_path=training.save_weights_for_sampler("named").result().path).result()
    again = named.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    assert again.sequences[0].tokens == after.sequences[0].tokens
    assert base.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens == (
        before.sequences[0].tokens
    )
    full = types.ModelInput.from_ints(TOKENS[0])
    logps = sampler.compute_logprobs(full).result()
    scored = training.forward(_data(types)[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    assert logps[0] is None and logps[1:] == pytest.approx(scored.tolist(), abs=1e-5)
    found = sampler.sample(
        prompt=full,
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=3, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
    ).result()
    assert found.prompt_logprobs[1:] == pytest.approx(logps[1:], abs=1e-5)
    assert found.topk_prompt_logprobs[0] is None and all(len(row) == 2 for row in found.topk_prompt_logprobs[1:])
    assert all(
        max(nats for _, nats in row) >= own for row, own in zip(found.topk_prompt_logprobs[1:], logps[1:], strict=True)
    )
    for sequence in found.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.topk_logprobs)
    assert found.sequences[0].tokens != found.sequences[1].tokens


def test_further_tokens_of_a_prompt_draws_and_a_suffix(service: Any) -> None:
    """Fields of the package's newest sampling client, whose checks of the answers pass; numbers: test_asked.py."""
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    _supervised(training, types, 3)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(TOKENS[0]), types.SamplingParams(max_tokens=1, seed=1)
    places = len(TOKENS[0]) - 1
    own = torch.tensor(TOKENS[0][1:])[:, None]
    dense = torch.cat((own, own.where(torch.arange(places)[:, None] > 2, -1)), 1)
    wide = torch.full((places, 12), -1)
    wide[3, 2], wide[5, 7] = TOKENS[0][4], TOKENS[0][6]
    logps = torch.tensor(sampler.compute_logprobs(prompt).result()[1:])
    for ids in (types.TensorData.from_torch(dense), types.TensorData.from_torch_sparse(wide, pad_value=-1)):
        found = sampler.sample(prompt, 1, params, target_prompt_logprobs=ids).result().target_prompt_logprobs
        assert (found.sparse_crow_indices is None) == (ids.sparse_crow_indices is None) and found.shape == ids.shape
        asked = wide if found.sparse_crow_indices else dense
        wanted = torch.where(asked == -1, 0.0, logps[:, None].expand(asked.shape))
        torch.testing.assert_close(found.to_torch().to_dense().float(), wanted, rtol=1e-5, atol=1e-5)
    scored = sampler.sample(
        prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2, prompt_alt_tokens_k=3
    ).result()
    assert scored.prompt_logprobs[:-2] == [None] * (places - 1)
    assert scored.prompt_logprobs[-2:] == pytest.approx(logps[-2:].tolist(), abs=1e-5)
    drawn = scored.prompt_alt_tokens
    assert drawn.tokens.shape == drawn.logprobs.shape == [places, 3] and drawn.tokens.dtype == "int64"
    again = sampler.sample(prompt, 1, params, target_prompt_logprobs=drawn.tokens).result().target_prompt_logprobs
    assert again.to_torch().flatten().tolist() == pytest.approx(drawn.logprobs.to_torch().flatten().tolist(), abs=1e-5)
    with pytest.raises(tinker.BadRequestError, match="an integer from 1 to 6"):
        sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=7).result()


def _is_small_letter(token: int) -> float:
    return float(97 <= token <= 122)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_a_policy_learns(service: Any, loss: str) -> None:
    """The reward of a token is 1 for a small letter, which are 0.1 of the vocabulary.

    With these numbers twelve seeds of adapters and draws end between 0.86 and 0.93, so that rounding cannot decide.
    One advantage for all tokens of an answer, at a larger rate, ended between 0.69 and 0.87: some places of an answer
    settled on another token, which nothing moves any more.
    """
    training = service.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
    rewards, prompt = [], TOKENS[0][:4]
    for step in range(30):
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=step)
        found = sampler.sample(prompt=types.ModelInput.from_ints(prompt), num_samples=64, sampling_params=params)
        sequences, data = found.result().sequences, []
        mean = sum(sum(map(_is_small_letter, one.tokens)) / len(one.tokens) for one in sequences) / len(sequences)
        for sequence in sequences:
            tokens, size = prompt + sequence.tokens, len(prompt) - 1
            inputs = {
                "target_tokens": torch.tensor(tokens[1:]),
                "logprobs": torch.tensor([0.0] * size + list(sequence.logprobs)),
                "advantages": torch.tensor([0.0] * size + [_is_small_letter(one) - mean for one in sequence.tokens]),
            }
            own = {name: types.TensorData.from_torch(values) for name, values in inputs.items()}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=own))
        training.forward_backward(data, loss)
        training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        rewards.append(mean)
    assert rewards[0] < 0.3 and sum(rewards[-3:]) / 3 > 0.8, rewards


def test_errors_are_sentences_of_the_client(service: Any, url: str) -> None:
    with pytest.raises(tinker.NotFoundError, match="There is no base model 'other'"):
        service.create_lora_training_client(base_model="other").result()
    training = service.create_lora_training_client(base_model="tiny", rank=4).result()
    datum = _data(types)[0]
    datum.loss_fn_inputs.pop("weights")
    with pytest.raises(tinker.RequestFailedError, match="Datum 0 has no 'weights'"):
        training.forward_backward([datum], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="There is no loss 'stable_reinforce'"):
        training.forward_backward(_data(types), "stable_reinforce").result()
    assert training.optim_step(types.AdamParams(learning_rate=0.0)) is not None
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=url, api_key="tml-other").get_server_capabilities()

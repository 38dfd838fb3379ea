"""Tinker's interface: losses equal loops, clients of a base are independent, what is saved is what runs."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from torch import Tensor

import fnmodels
import params as P
import train.integrations.tinker as tinker
from fnmodels import tree
from fnmodels.errors import UserError
from tests.support.cases import cases, generic_params, off
from train.integrations.tinker import types

CONFIG = next(case.config for case in cases() if case.name == "llama")
TOKENS = ([5, 3, 9, 1, 7], [2, 8, 2], [4])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("tinker") / "base"
    P.save_pretrained(folder, CONFIG, generic_params(CONFIG))
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"[: CONFIG.vocab_size]
    Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [])).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def client(tmp_path: Path) -> tinker.ServiceClient:
    return tinker.ServiceClient(folder=tmp_path / "runs")


def _data(**entries: Callable[[int], Any]) -> list[types.Datum]:
    """A datum for each of TOKENS, whose targets are the next tokens; entries: functions of its length."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens=tokens),
            loss_fn_inputs={"target_tokens": [*tokens[1:], 6]}
            | {name: make(len(tokens)) for name, make in entries.items()},
        )
        for tokens in TOKENS
    ]


def _draws(seed: int) -> Callable[[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda length: torch.randn(length, generator=generator)


def _policy_data() -> list[types.Datum]:
    old = _draws(1)
    return _data(logprobs=lambda length: old(length) - 4, advantages=_draws(2))


def _loop(training: tinker.TrainingClient, data: list[types.Datum], of: Callable[..., Tensor]) -> tuple[float, Any]:
    """(total, gradients of the adapters) of the sum of of(logp, entries) over documents that each run alone."""
    params = training.engine.params
    adapters = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), P.lora.adapters(params))
    total = torch.zeros(())
    for datum in data:
        tokens = torch.tensor([datum.model_input.to_ints()])
        logits = fnmodels.forward(P.lora.attach(params, adapters), *fnmodels.prepare(CONFIG, tokens), config=CONFIG)
        given = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        logp = F.log_softmax(logits[0].float(), -1).gather(1, given["target_tokens"][:, None])[:, 0]
        total = total + of(logp, given)
    return float(total.detach()), torch.autograd.grad(total, tree.leaves(adapters))


def _ratio(logp: Tensor, given: dict[str, Tensor]) -> Tensor:
    return (logp - given["logprobs"]).exp()


def _sequence_ratio(logp: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The geometric mean of the marked tokens' ratios, with the gradient of each token's own log-probability."""
    marked = given["sequence_ratio_mask"] != 0
    mean = (logp.detach() - given["logprobs"])[marked].mean()
    return (mean + logp - logp.detach()).exp()


def _clipped(ratio: Tensor, given: dict[str, Tensor], low: Any, high: Any) -> Tensor:
    bounded = torch.minimum(torch.maximum(ratio, torch.as_tensor(low)), torch.as_tensor(high))
    return torch.minimum(ratio * given["advantages"], bounded * given["advantages"])


def _bounded(ratio: Tensor, given: dict[str, Tensor]) -> Tensor:
    return _clipped(ratio, given, given["clip_low_threshold"], given["clip_high_threshold"])


def _with(data: list[types.Datum], name: str, make: Callable[[int], Any]) -> list[types.Datum]:
    """The data with one more entry, a function of their lengths."""
    return [
        types.Datum(datum.model_input, {**datum.loss_fn_inputs, name: make(datum.model_input.length)}) for datum in data
    ]


def _bounded_data() -> list[types.Datum]:
    """Policy data with a clip of its own for each token."""
    low = _with(_policy_data(), "clip_low_threshold", lambda length: torch.linspace(0.2, 0.9, length))
    return _with(low, "clip_high_threshold", lambda length: torch.linspace(1.1, 3.0, length))


LOSSES: dict[str, tuple[Callable[[], list[types.Datum]], Callable[..., Tensor], dict[str, float] | None]] = {
    "cross_entropy": (
        lambda: _data(weights=lambda length: np.linspace(0, 1, length)),
        lambda logp, given: -(logp * given["weights"]).sum(),
        None,
    ),
    "importance_sampling": (
        _policy_data,
        lambda logp, given: -(_ratio(logp, given) * given["advantages"]).sum(),
        None,
    ),
    "ppo": (
        _policy_data,
        lambda logp, given: (
            -torch.minimum(
                _ratio(logp, given) * given["advantages"], _ratio(logp, given).clamp(0.8, 1.2) * given["advantages"]
            ).sum()
        ),
        None,
    ),
    "cispo": (
        _policy_data,
        lambda logp, given: -(_ratio(logp, given).clamp(0.5, 1.1).detach() * logp * given["advantages"]).sum(),
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
    ),
    "dro": (
        _policy_data,
        lambda logp, given: -(logp * given["advantages"]).sum() + 0.5 * 0.05 * ((logp - given["logprobs"]) ** 2).sum(),
        None,
    ),
    "dro of another beta": (
        _policy_data,
        lambda logp, given: -(logp * given["advantages"]).sum() + 0.5 * 0.4 * ((logp - given["logprobs"]) ** 2).sum(),
        {"beta": 0.4},
    ),
    "gspo": (
        lambda: _with(
            _policy_data(), "sequence_ratio_mask", lambda length: [float(i > 0 or length < 3) for i in range(length)]
        ),
        lambda logp, given: -_clipped(_sequence_ratio(logp, given), given, 0.6, 1.3).sum(),
        {"clip_low_threshold": 0.6, "clip_high_threshold": 1.3},
    ),
    "gspo of its paper's clips": (
        lambda: _with(_policy_data(), "sequence_ratio_mask", torch.ones),
        lambda logp, given: -_clipped(_sequence_ratio(logp, given), given, 0.9997, 1.0004).sum(),
        None,
    ),
    "ppo of each token and a number": (
        lambda: _with(_policy_data(), "clip_low_threshold", lambda length: torch.linspace(0.2, 0.9, length)),
        lambda logp, given: -_clipped(_ratio(logp, given), given, given["clip_low_threshold"], 1.2).sum(),
        None,
    ),
    "cispo of a number and each token": (
        lambda: _with(_policy_data(), "clip_high_threshold", lambda length: torch.linspace(1.1, 3.0, length)),
        lambda logp, given: (
            -(
                torch.minimum(_ratio(logp, given).clamp(min=0.5), given["clip_high_threshold"]).detach()
                * logp
                * given["advantages"]
            ).sum()
        ),
        {"clip_low_threshold": 0.5},
    ),
    "ppo of each token": (_bounded_data, lambda logp, given: -_bounded(_ratio(logp, given), given).sum(), None),
    "gspo of each token": (
        lambda: _with(_bounded_data(), "sequence_ratio_mask", torch.ones),
        lambda logp, given: -_bounded(_sequence_ratio(logp, given), given).sum(),
        None,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_loop_over_documents(client: tinker.Client, base: Path, name: str) -> None:
    training = client.create_lora_training_client(base_model=base, rank=2, seed=0)
    _move(training)
    make, of, numbers = LOSSES[name]
    name, data = name.partition(" ")[0], make()
    total, wanted = _loop(training, data, of)
    first = training.forward_backward(data[:2], loss_fn=name, loss_fn_config=numbers).result()
    second = training.forward_backward(data[2:], loss_fn=name, loss_fn_config=numbers).result()
    assert first.metrics["loss:sum"] + second.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for found, gradient in zip(tree.leaves(training.engine.gradients()), wanted, strict=True):
        assert off(found, gradient) < 2e-5 and gradient.abs().max() > 1e-4
    plain = training.forward(data, name, numbers).result()
    assert plain.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for found, tokens in zip((*first.loss_fn_outputs, *second.loss_fn_outputs), TOKENS, strict=True):
        assert len(found["logprobs"].tolist()) == len(tokens)
    assert plain.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(
        first.loss_fn_outputs[0]["logprobs"].tolist(), 1e-5
    )


def _move(training: tinker.TrainingClient) -> None:
    """One update that makes all adapters differ from 0."""
    training.forward_backward(_data(weights=torch.ones), "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.02)).result()


def test_a_loss_of_ones_own_has_the_gradients_of_the_named_one(client: tinker.Client, base: Path) -> None:
    training = client.create_lora_training_client(base, rank=2, seed=0)
    data = _policy_data()

    def importance_sampling(data: list[types.Datum], logps: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        each = [
            -(_ratio(logp, d := {n: v.to_torch() for n, v in datum.loss_fn_inputs.items()}) * d["advantages"]).sum()
            for datum, logp in zip(data, logps, strict=True)
        ]
        return torch.stack(each).sum(), {"documents": float(len(logps))}

    training.forward_backward(data, "importance_sampling").result()
    wanted = [gradient.clone() for gradient in tree.leaves(training.engine.gradients())]
    training.engine.zero_grad()
    found = training.forward_backward_custom(data, importance_sampling).result()
    assert found.metrics["documents"] == 3
    for ours, theirs in zip(tree.leaves(training.engine.gradients()), wanted, strict=True):
        assert off(ours, theirs) < 1e-6


def test_an_update_is_adamw_of_the_clipped_sum(client: tinker.Client, base: Path) -> None:
    training = client.create_lora_training_client(base, rank=2, seed=0)
    training.forward_backward(_data(weights=torch.ones), "cross_entropy").result()
    gradients = [gradient.clone() for gradient in tree.leaves(training.engine.gradients())]
    norm = torch.nn.utils.get_total_norm(gradients)
    before = [leaf.clone() for leaf in tree.leaves(P.lora.adapters(training.engine.params))]
    adam = types.AdamParams(
        learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=float(norm) / 4
    )
    for wrong in ({"learning_rate": -1.0}, {"grad_clip_norm": -1.0}):
        with pytest.raises(ValueError, match=r"is -1\.0; it must be a number"):  # and the gradients are not clipped
            training.optim_step(dataclasses.replace(adam, **wrong))
    metrics = training.optim_step(adam).result().metrics
    assert metrics is not None and metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    clipped = [gradient / 4 for gradient in gradients]
    wanted = [leaf.clone().requires_grad_() for leaf in before]
    optimizer = torch.optim.AdamW(wanted, lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    for leaf, gradient in zip(wanted, clipped, strict=True):
        leaf.grad = gradient
    optimizer.step()
    for found, leaf in zip(tree.leaves(P.lora.adapters(training.engine.params)), wanted, strict=True):
        assert (found - leaf).abs().max() < 1e-6


def test_clients_over_one_base_do_not_disturb_each_other(client: tinker.Client, base: Path) -> None:
    weights = client.base(base).params
    kept = [leaf.clone() for leaf in tree.leaves(weights)]
    alone = tinker.Client(folder=client.folder).create_lora_training_client(base, rank=2, seed=1)
    _move(alone)
    first, second = (client.create_lora_training_client(base, rank=rank, seed=1) for rank in (2, 4))
    _move(second)
    _move(first)
    same = zip(
        tree.leaves(P.lora.adapters(first.engine.params)),
        tree.leaves(P.lora.adapters(alone.engine.params)),
        strict=True,
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in same)
    assert all(torch.equal(leaf, before) for leaf, before in zip(tree.leaves(weights), kept, strict=True))
    assert client.base(base).params is weights


def test_a_saved_state_resumes_to_the_bit(client: tinker.Client, base: Path) -> None:
    training = client.create_lora_training_client(base, rank=2, train_attn=False)
    _move(training)
    saved = training.save_state("one").result().path
    _move(training)
    wanted = tree.leaves(training._own_state())
    other = tinker.Client(folder=client.folder)
    resumed = other.create_training_client_from_state_with_optimizer(saved)
    assert resumed.lora == training.lora
    _move(resumed)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(resumed._own_state()), wanted, strict=True))
    anew = other.create_training_client_from_state(saved)
    assert int(anew.engine.state.step) == 0
    _move(anew)  # its moments began at 0, so this update differs
    adapters = tree.leaves(P.lora.adapters(anew.engine.params))
    assert not all(torch.equal(a, b) for a, b in zip(adapters, tree.leaves(wanted), strict=False))
    assert training.save_state("one").result().path == saved
    training.load_state(saved)  # its step is 0, before that of the saved one
    for _ in range(2):
        assert training.save_state("one").result().path == saved
    training.load_state_with_optimizer(saved)
    assert int(training.engine.state.step) == 0
    with pytest.raises(FileNotFoundError, match="holds no saved state"):
        training.load_state(client.folder / "none")


def test_a_sampler_keeps_the_weights_it_was_made_of(client: tinker.Client, base: Path) -> None:
    training = client.create_lora_training_client(base, rank=2, seed=0)
    _move(training)
    prompt, drawn = types.ModelInput.from_ints([5, 3, 9]), types.SamplingParams(max_tokens=6, seed=3, stop=[])
    live = training.save_weights_and_get_sampling_client("first")
    saved = training.save_weights_for_sampler("second").result().path
    wanted = live.sample(prompt=prompt, num_samples=3, sampling_params=drawn).result()
    _move(training)
    assert live.sample(prompt, 3, drawn).result() == wanted
    from_disk = client.create_sampling_client(model_path=saved).sample(prompt, 3, drawn).result()
    assert [one.tokens for one in from_disk.sequences] == [one.tokens for one in wanted.sequences]
    moved = training.save_weights_and_get_sampling_client().sample(prompt, 3, drawn).result()
    assert [one.logprobs for one in moved.sequences] != [one.logprobs for one in wanted.sequences]
    assert len({tuple(one.tokens) for one in wanted.sequences}) == 3
    for one in wanted.sequences:
        assert one.stop_reason == "length" and len(one.tokens) == len(one.logprobs) == 6
        full = live.compute_logprobs(types.ModelInput.from_ints([*prompt.to_ints(), *one.tokens])).result()
        assert full[0] is None and one.logprobs == pytest.approx(full[3:], abs=2e-5)
    with_prompt = live.sample(prompt, 1, drawn, include_prompt_logprobs=True).result()
    assert with_prompt.prompt_logprobs == live.compute_logprobs(prompt).result()


def _base_sampler(training: tinker.TrainingClient, client: tinker.Client) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model=training.base.folder)


def test_answers_end_at_stops(client: tinker.Client, base: Path) -> None:
    sampler = client.create_sampling_client(base_model=base)
    prompt = types.ModelInput.from_ints([5, 3, 9])
    plain = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, seed=1, stop=[])).result().sequences[0].tokens
    at = next(i for i, token in enumerate(plain) if i > 1 and token not in plain[:i])
    text = sampler.get_tokenizer().decode(plain[at])
    for stop in (plain[at : at + 1], text, [text]):
        drawn = types.SamplingParams(max_tokens=8, seed=1, stop=stop)
        found = sampler.sample(prompt, 1, drawn).result().sequences[0]
        assert found.stop_reason == "stop" and found.tokens == plain[: at + 1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda t, c: t.forward_backward(_data(weights=torch.ones), "dpo"),
            "There is no loss 'dpo'; there are cross_entropy",
        ),
        (lambda t, c: t.forward_backward([], "ppo"), "data is empty"),
        (
            lambda t, c: t.forward_backward(_data(weights=torch.ones), "ppo"),
            "Datum 0 has no 'logprobs', which the loss 'ppo'",
        ),
        (
            lambda t, c: t.forward_backward(_data(weights=lambda n: torch.ones(n + 1)), "cross_entropy"),
            "one number for each of",
        ),
        (
            lambda t, c: t.forward_backward(_policy_data(), "ppo", {"clip": 1.0}),
            "The loss 'ppo' has no 'clip'; its numbers",
        ),
        (
            lambda t, c: t.forward_backward(_with(_bounded_data(), "sequence_ratio_mask", torch.zeros), "gspo"),
            "'sequence_ratio_mask' of datum 0 marks no token",
        ),
        (
            lambda t, c: t.forward_backward([*_bounded_data()[:2], *_policy_data()[2:]], "ppo"),
            "Datum 2 has no 'clip_low_threshold', which other data",
        ),
        (lambda t, c: t.optim_step(types.AdamParams()), "no gradients yet"),
        (
            lambda t, c: c.create_lora_training_client(
                t.base.folder, train_mlp=False, train_attn=False, train_unembed=False
            ),
            "set one of",
        ),
        *((lambda t, c, name=name: t.save_state(name), "leads out of the client") for name in ("../../../x", "", "/x")),
        (lambda t, c: t.save_weights_for_sampler("../x"), "leads out of the client"),
        (lambda t, c: _base_sampler(t, c).compute_logprobs(types.ModelInput.empty()), "The prompt is empty"),
        (
            lambda t, c: _base_sampler(t, c).sample(
                types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=-5)
            ),
            "max_tokens is -5; it must",
        ),
        (lambda t, c: c.create_sampling_client(), "needs one of model_path and base_model"),
        (lambda t, c: c.create_lora_training_client("nowhere"), "nowhere"),
        (
            lambda t, c: tinker.ServiceClient(base_url="http://a.b"),
            "base_url is 'http://a.b'; this service runs in",
        ),
        (lambda t, c: types.TensorData([1.0], "float16"), "has int64 or float32"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(client: tinker.Client, base: Path, call: Callable, words: str) -> None:
    training = client.create_lora_training_client(base, rank=2)
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError, UserError), match=words):
        call(training, client)


def test_a_published_loop_of_supervised_training_learns(client: tinker.ServiceClient, base: Path) -> None:
    """The loop of Tinker's own tutorial: pairs of texts, six updates, then answers; asynchronous as there."""

    async def main() -> None:
        training = await client.create_lora_training_client_async(base_model=base, rank=8, seed=0)
        tokenizer = training.get_tokenizer()
        data = []
        for question, answer in (("abc", "cba"), ("def", "fed")):
            asked, given = (tokenizer.encode(text, add_special_tokens=False) for text in (question, answer))
            tokens, weights = asked + given, [0] * len(asked) + [1] * len(given)
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
                    loss_fn_inputs=dict(weights=weights[1:], target_tokens=tokens[1:]),
                )
            )
        losses = []
        for _ in range(12):
            gradients = await training.forward_backward_async(data, "cross_entropy")
            update = await training.optim_step_async(types.AdamParams(learning_rate=2e-2))
            result = await gradients
            await update.result_async()
            logprobs = np.concatenate([output["logprobs"].tolist() for output in result.loss_fn_outputs])
            weights = np.concatenate([datum.loss_fn_inputs["weights"].tolist() for datum in data])
            losses.append(-np.dot(logprobs, weights) / weights.sum())
        assert losses[-1] < 0.1 * losses[0]
        sampler = await training.save_weights_and_get_sampling_client_async("pairs")
        prompt = types.ModelInput.from_ints(tokenizer.encode("def"))
        drawn = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
        answers = await sampler.sample_async(prompt=prompt, num_samples=1, sampling_params=drawn)
        assert tokenizer.decode(answers.sequences[0].tokens).replace(" ", "") == "fed"

    asyncio.run(main())


def test_a_published_loop_of_policy_gradients_learns(client: tinker.ServiceClient, base: Path) -> None:
    """The loop of the cookbook: groups of answers, rewards centred in each group, importance sampling."""
    training = client.create_lora_training_client(base_model=base, rank=8, seed=0).result()
    prompt, rewards = types.ModelInput.from_ints([5, 3]).append(types.EncodedTextChunk([9])), []
    for step in range(15):
        path = training.save_weights_for_sampler(name=f"{step:06d}").result().path
        sampler = client.create_sampling_client(model_path=path)
        drawn = types.SamplingParams(max_tokens=4, seed=step, stop=[])
        group = sampler.sample(prompt=prompt, num_samples=16, sampling_params=drawn).result().sequences
        gains = torch.tensor([sum(token % 2 for token in answer.tokens) / 4 for answer in group])  # odd ids
        rewards.append(float(gains.mean()))
        data = []
        for answer, advantage in zip(group, gains - gains.mean(), strict=True):
            tokens, before = prompt.to_ints() + answer.tokens, prompt.length - 1
            entries = {
                "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
                "logprobs": types.TensorData.from_torch(torch.tensor([0.0] * before + answer.logprobs)),
                "advantages": types.TensorData.from_torch(
                    torch.tensor([0.0] * before + [advantage] * len(answer.tokens))
                ),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=entries))
        gradients = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(types.AdamParams(learning_rate=2e-2, beta1=0.9, beta2=0.95, eps=1e-8))
        gradients.result()
        update.result()
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_objects_of_the_package_are_read(client: tinker.ServiceClient, base: Path) -> None:
    published = pytest.importorskip("tinker").types
    training = client.create_lora_training_client(base, rank=2, seed=0)
    theirs = [
        published.Datum(
            model_input=published.ModelInput.from_ints(datum.model_input.to_ints()),
            loss_fn_inputs={
                name: published.TensorData.from_torch(value.to_torch()) for name, value in datum.loss_fn_inputs.items()
            },
        )
        for datum in _policy_data()
    ]
    ours = training.forward(_policy_data(), "ppo").result()
    assert training.forward(theirs, "ppo").result() == ours
    training.forward_backward(theirs, "ppo").result()
    training.optim_step(published.AdamParams(learning_rate=1e-3)).result()
    sampler = training.save_weights_and_get_sampling_client()
    prompt = published.ModelInput.from_ints([5, 3, 9])
    assert len(sampler.sample(prompt, 2, published.SamplingParams(max_tokens=3)).result().sequences) == 2

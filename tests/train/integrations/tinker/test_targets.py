"""Several targets at a token: gradients and log-probabilities of a loop, whatever the number of each datum."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
import train.integrations.tinker as tinker
from fnmodels import tree
from tests.support.cases import cases, generic_params, off
from train.integrations.tinker import types

CONFIG = next(case.config for case in cases() if case.name == "llama")
TOKENS = ([5, 3, 9, 1, 7], [2, 8, 2], [4])
COLUMNS = (3, 2, None)  # targets at each token of a datum; None: one, as a list


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "base"
    P.save_pretrained(folder, CONFIG, generic_params(CONFIG))
    return folder


@pytest.fixture
def training(tmp_path: Path, base: Path) -> tinker.TrainingClient:
    """Adapters that all differ from 0."""
    made = tinker.ServiceClient(folder=tmp_path).create_lora_training_client(base, rank=2, seed=0)
    made.forward_backward(_data(), "cross_entropy").result()
    made.optim_step(types.AdamParams(learning_rate=0.02)).result()
    return made


def _data() -> list[types.Datum]:
    generator, found = torch.Generator().manual_seed(1), []
    for tokens, columns in zip(TOKENS, COLUMNS, strict=True):
        shape = (len(tokens), columns) if columns else (len(tokens),)
        targets = torch.randint(CONFIG.vocab_size, shape, generator=generator)
        inputs = {"target_tokens": targets, "weights": torch.rand(shape, generator=generator)}
        found.append(types.Datum(types.ModelInput.from_ints(tokens), inputs))
    return found


def _loop(training: tinker.TrainingClient, of: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, list[Tensor], Any]:
    """(total, log-probabilities, gradients of the adapters) of of(logp, weights), each target by itself."""
    params = training.engine.params
    adapters = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), P.lora.adapters(params))
    total, logps = torch.zeros(()), []
    for datum in _data():
        tokens = torch.tensor([datum.model_input.to_ints()])
        logits = fnmodels.forward(P.lora.attach(params, adapters), *fnmodels.prepare(CONFIG, tokens), config=CONFIG)
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        every = F.log_softmax(logits[0].float(), -1)
        each = [every[place, id] for place, row in enumerate(targets.view(len(every), -1)) for id in row.tolist()]
        logps.append(torch.stack(each).view(targets.shape))
        total = total + of(logps[-1], datum.loss_fn_inputs["weights"].to_torch())
    return float(total.detach()), logps, torch.autograd.grad(total, tree.leaves(adapters))


def _check(training: tinker.TrainingClient, output: types.ForwardBackwardOutput, wanted: Any) -> None:
    total, logps, gradients = wanted
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for found, logp in zip(output.loss_fn_outputs, logps, strict=True):
        assert found["logprobs"].shape == list(logp.shape)
        torch.testing.assert_close(found["logprobs"].to_torch(), logp.detach(), rtol=1e-5, atol=1e-5)
    for one, gradient in zip(tree.leaves(training.engine.gradients()), gradients, strict=True):
        assert off(one, gradient) < 2e-5 and gradient.abs().max() > 1e-4


def test_cross_entropy_of_several_targets_is_the_loop_over_them(training: tinker.TrainingClient) -> None:
    wanted = _loop(training, lambda logp, weights: -(logp * weights).sum())
    found = training.forward_backward(_data(), "cross_entropy").result()
    _check(training, found, wanted)
    assert training.forward(_data(), "cross_entropy").result().metrics["loss:sum"] == pytest.approx(wanted[0], rel=1e-5)


def test_a_loss_of_ones_own_sees_the_targets_in_their_shape(training: tinker.TrainingClient) -> None:
    """A reverse divergence, whose gradient is none of fixed weights."""

    def of(logp: Tensor, weights: Tensor) -> Tensor:
        return (logp.exp() * (logp - weights)).sum()

    def loss(data: list[types.Datum], logps: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return torch.stack([of(*each) for each in zip(logps, weights, strict=True)]).sum(), {}

    wanted = _loop(training, of)
    _check(training, training.forward_backward_custom(_data(), loss).result(), wanted)


@pytest.mark.parametrize(
    ("loss", "targets", "weights", "words"),
    [
        ("ppo", [[1, 2]], [[1.0, 1.0]], r"'target_tokens' of datum 0 has the shape \[1, 2\]; its rank must be 1"),
        ("cross_entropy", [[1, 2]], [1.0], r"'weights' of datum 0 has the shape \[1\]; its rank must be 2"),
        ("cross_entropy", [[1, 2]], [[1.0]], r"\[1, 1\] beside 'target_tokens' \[1, 2\]; both must have the same"),
        ("cross_entropy", [[]], [[]], "has no column"),
        ("cross_entropy", [[1, 999]], [[1.0, 0.0]], "is 999, but the vocabulary has"),
    ],
)
def test_targets_of_another_form_get_a_sentence(
    training: tinker.TrainingClient, loss: str, targets: Any, weights: Any, words: str
) -> None:
    inputs = {"target_tokens": torch.tensor(targets).long(), "weights": torch.tensor(weights)}
    datum = types.Datum(types.ModelInput.from_ints([4]), inputs)
    with pytest.raises(ValueError, match=words):
        training.forward_backward([datum], loss)

"""Traced losses: data that compute what the function does, in one pass, and call nothing else than the allowed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import params as P
import train.integrations.tinker as tinker
from fnmodels import tree
from tests.support.cases import cases, generic_params, off
from train.integrations.tinker import types
from train.integrations.tinker.traced import Node, trace, traced_loss

CONFIG = next(case.config for case in cases() if case.name == "llama")
TOKENS = ([5, 3, 9, 1, 7], [2, 8, 2], [4])


@pytest.fixture
def training(tmp_path: Path) -> tinker.TrainingClient:
    P.save_pretrained(tmp_path / "base", CONFIG, generic_params(CONFIG))
    client = tinker.Client(folder=tmp_path / "runs").create_lora_training_client(tmp_path / "base", rank=2, seed=0)
    client.forward_backward(_data(), "importance_sampling")
    client.optim_step(types.AdamParams(learning_rate=0.02))  # after which no adapter is 0
    return client


def _data() -> list[types.Datum]:
    draws = torch.Generator().manual_seed(1)
    data = []
    for number, tokens in enumerate(TOKENS):
        entries: dict[str, Any] = {"target_tokens": [*tokens[1:], 6], "scale": torch.tensor(0.5 + number)}
        entries |= {name: torch.randn(len(tokens), generator=draws) for name in ("logprobs", "advantages")}
        entries |= {"old": entries["logprobs"] - 4, "columns": torch.randn(len(tokens), 2, generator=draws)}
        data.append(types.Datum(types.ModelInput.from_ints(tokens), entries))
    return data


def _loss(logprobs: Tensor, old: Tensor, advantages: Tensor, scale: Tensor, columns: Tensor) -> Any:
    ratio = (logprobs - old).clamp(max=20.0).exp()
    gain = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    loss = -scale * gain.mean() + F.softplus(logprobs * columns[:, 0]).sum() / logprobs.shape[0]
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/far:sum": (ratio > 1.2).float().sum()}


RANKS = {"logprobs": 1, "old": 1, "advantages": 1, "scale": 0, "columns": 2}


def test_a_traced_loss_is_the_function_summed_over_the_data_with_its_gradients(training: tinker.TrainingClient) -> None:
    data = _data()

    def each(data: list[types.Datum], logps: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        found = []
        for datum, logp in zip(data, logps, strict=True):
            entries = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
            scale = entries["scale"].reshape(())
            found.append(_loss(logp, entries["old"], entries["advantages"], scale, entries["columns"]))
        ratio, far = ([float(metrics[name].detach()) for _, metrics in found] for name in found[0][1])
        return torch.stack([loss for loss, _ in found]).sum(), {"ratio": sum(ratio) / 3, "far": sum(far)}

    wanted = training.forward_backward_custom(data, each).result()
    gradients = [one.clone() for one in tree.leaves(training.engine.gradients())]
    training.engine.zero_grad()
    found = training.forward_backward_custom(data, trace(_loss, RANKS)).result()
    assert found.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-6)
    assert found.metrics["custom/ratio:mean"] == pytest.approx(wanted.metrics["ratio"], rel=1e-6)
    assert found.metrics["custom/far:sum"] == wanted.metrics["far"]
    for ours, theirs in zip(tree.leaves(training.engine.gradients()), gradients, strict=True):
        assert off(ours, theirs) < 1e-6 and theirs.abs().max() > 1e-4
    assert [one["logprobs"].shape for one in found.loss_fn_outputs] == [[5], [3], [1]]


def test_the_client_makes_a_loss_that_survives_its_form_as_data(training: tinker.TrainingClient) -> None:
    made = tinker.Client().create_custom_loss(_loss, RANKS).result()
    inputs = [torch.randn(4), torch.randn(4), torch.randn(4), torch.tensor(2.0), torch.randn(4, 2)]
    again = traced_loss(made.name, made.inputs, made.nodes)
    for loss in (made, again):
        value, metrics = loss(*inputs)
        wanted, names = _loss(*inputs)
        assert torch.equal(value, wanted) and all(torch.equal(metrics[name], names[name]) for name in names)
    assert made == again == trace(_loss, RANKS)


def _one(logprobs: Tensor) -> Any:
    return logprobs.sum(), {}


def _graph(*calls: Node, result: str = "found") -> tuple[Node, ...]:
    output = Node("output", "output", "output", ({"tuple": [{"ref": result}, {"dict": {}}]},), {})
    return (Node("placeholder", "logprobs", "logprobs", (), {}), *calls, output)


def _call(target: str, *args: Any, op: str = "call_function", name: str = "found") -> Node:
    return Node(op, name, target, args, {})


LOGP = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (_graph(_call("torch.load", "x")), "calls 'torch.load'"),
        (_graph(_call("os.system", "true")), "calls 'os.system'"),
        (_graph(_call("torch.ops.aten.add", LOGP)), "calls 'torch.ops.aten.add'"),
        (_graph(_call("__reduce__", LOGP, op="call_method")), "calls '__reduce__'"),
        (_graph(_call("mul_", LOGP, 2, op="call_method")), "calls 'mul_'"),
        (_graph(_call("item", LOGP, op="call_method")), "calls 'item'"),
        (_graph(_call("weight", op="get_attr")), "of the kind 'get_attr'"),
        (_graph(_call("torch.exp", {"ref": "later"})), "reads 'later'"),
        (_graph(_call("torch.exp", {"device": "cuda"})), "argument of another form"),
        (_graph(_call("torch.exp", {"dtype": "object"})), "argument of another form"),
        (_graph(_call("torch.exp", LOGP))[:-1], "must begin with its inputs and end with its output"),
        (_graph(_call("torch.exp", LOGP))[1:], "reads 'logprobs'"),
    ],
)
def test_a_graph_that_calls_something_else_is_refused(nodes: tuple[Node, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        traced_loss("mine", [("logprobs", 1)], nodes)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (_graph(_call("torch.exp", LOGP)), "the loss must be a floating-point tensor without dimensions"),
        (_graph(_call("getattr", LOGP, "__class__")), "'__class__' may not be read"),
        (_graph(_call("getattr", "text", "upper")), "'upper' may not be read"),
        (_graph(_call("operator.mul", "text", 1 << 40)), "str is neither a tensor nor a number"),
        (_graph(_call("operator.mul", [1], 1 << 40)), "list is neither a tensor nor a number"),
        (_graph(_call("operator.pow", 9, 1 << 40)), "an integer is beyond 64 bits"),
        (_graph(_call("operator.mul", 1 << 40, 1 << 40)), "beyond 64 bits"),
        (_graph(_call("torch.add", LOGP, [1])), r"fails at found \(torch.add\)"),
        (
            _graph(
                _call("operator.getitem", LOGP, {"tuple": [{"slice": [None, None, None]}, None]}, name="column"),
                _call("operator.mul", {"ref": "column"}, LOGP),
            ),
            "would have 9,000,000 elements",
        ),
    ],
)
def test_a_graph_fails_with_a_sentence_that_names_the_step(nodes: tuple[Node, ...], words: str) -> None:
    loss = traced_loss("mine", [("logprobs", 1)], nodes)
    with pytest.raises(ValueError, match=words):
        loss(torch.randn(3000))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: trace(lambda logprobs: logprobs.sum() if logprobs[0] > 0 else 0, {"logprobs": 1}), "cannot trace"),
        (lambda: trace(_one, {"logprobs": 2}), "have rank 2"),
        (lambda: trace(_one, {"logprobs": 1, "more": 1}), "input_ranks has"),
        (lambda: trace(lambda old, logprobs: (old.sum(), {}), {"old": 1, "logprobs": 1}), "must take logprobs first"),
        (lambda: trace(lambda logprobs: (torch.linalg.norm(logprobs), {}), {"logprobs": 1}), "may not call here"),
    ],
)
def test_a_function_that_is_no_loss_of_a_datum_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"old": None}, "Datum 1 has no 'old', which the custom loss '_loss' needs"),
        ({"scale": torch.ones(3)}, "its rank must be 0"),
        ({"columns": torch.ones(4, 2)}, "for each of the 3 tokens"),
        ({"columns": torch.ones(3, 5)}, "as many columns in all data"),
    ],
)
def test_data_of_another_form_are_refused(training: tinker.TrainingClient, change: dict[str, Any], words: str) -> None:
    data = _data()
    entries = {name: value for name, value in {**data[1].loss_fn_inputs, **change}.items() if value is not None}
    data[1] = dataclasses.replace(data[1], loss_fn_inputs=entries)
    with pytest.raises(ValueError, match=words):
        training.forward_backward_custom(data, trace(_loss, RANKS))

"""On a device without fp64 nothing asks for it: rotary tables are computed on the CPU.

The device is a type of which torch makes fake tensors without a driver; they have no values. It stands for Apple's
"mps", and refuses every operation that takes or makes fp64, as that does.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
import train
from fnmodels import tree
from fnmodels.ops import dtypes
from fnmodels.ops.rotary import Rope, query_temperature, rotary_table
from tests.support.cases import Case, cases, richest, short

DEVICE = torch.device("lazy", 0)


class RefusesFp64(TorchDispatchMode):
    """TypeError, as on the device, for an operation there that takes or makes fp64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device == DEVICE and value.dtype == torch.float64:
                raise TypeError(f"{func}: Cannot convert a MPS Tensor to float64 dtype")
        return result


@pytest.fixture
def without_fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert "mps" in dtypes.WITHOUT_FP64
    monkeypatch.setattr(dtypes, "WITHOUT_FP64", (DEVICE.type,))
    with FakeTensorMode(allow_non_fake_inputs=True), RefusesFp64():
        yield


def params_of(config: Any) -> Any:
    spec = fnmodels.family_of(config).spec(config)
    return tree.map(lambda leaf: torch.empty(leaf.shape, dtype=torch.float32, device=DEVICE), spec)


def batch_of(config: Any) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(8, device=DEVICE).expand(2, 8)
    return {"tokens": tokens, "positions": positions, "segment_ids": tokens + 1, "labels": tokens}


every_family = pytest.mark.parametrize("case", [short(case) for case in richest()], ids=str)


@every_family
@pytest.mark.usefixtures("without_fp64")
def test_a_forward_pass_asks_for_no_fp64(case: Case) -> None:
    config = case.config
    batch = batch_of(config)
    places = {"positions": batch["positions"], "segment_ids": batch["segment_ids"], "length": 8}
    inputs, masks, freqs_cis = fnmodels.prepare(config, batch["tokens"], **places)
    assert all(leaf.device == DEVICE for leaf in tree.leaves((inputs, masks, freqs_cis)))
    logits = fnmodels.forward(params_of(config), inputs, masks, freqs_cis, config=config, kernel="math")
    assert logits.device == DEVICE


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
@pytest.mark.usefixtures("without_fp64")
def test_a_training_step_asks_for_no_fp64(name: str) -> None:
    config = short(next(case for case in cases() if case.name == name)).config
    loss = functools.partial(train.next_token_loss, config=config, kernel="math", length=8)
    params, optimizer = params_of(config), train.adamw(1e-3, spec=fnmodels.family_of(config).spec(config))
    grads = torch.func.grad(lambda p: loss(p, batch_of(config))[0])(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert all(leaf.device == DEVICE for leaf in tree.leaves(train.apply_updates(params, updates)))
    step = train.make_step(loss, optimizer, inplace=False)
    _, metrics = step(train.init_state(params, optimizer), batch_of(config))
    assert metrics["loss"].device == DEVICE


@pytest.mark.usefixtures("without_fp64")
def test_a_planted_table_in_fp64_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "WITHOUT_FP64", ())
    with pytest.raises(TypeError, match="float64"):
        rotary_table(Rope(), 8, torch.zeros(1, 4, dtype=torch.int64, device=DEVICE))


def test_tables_from_the_cpu_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.tensor([[0, 5, 1_000_003]])
    made = [rotary_table(Rope(), 8, positions), query_temperature(positions, beta=0.1, period=4)]
    monkeypatch.setattr(dtypes, "WITHOUT_FP64", ("cpu",))
    again = [rotary_table(Rope(), 8, positions), query_temperature(positions, beta=0.1, period=4)]
    assert all(map(torch.equal, made, again)) and dtypes.widest(positions.device) == torch.float32

"""remat="budget:SIZE": plans against all plans, bits of a step, what is kept and recomputed, bad use."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import train
from fnmodels import tree
from tests.train.test_step import MODEL, MODEL_LOSS, model_batch, model_params
from train.remat_budget import Cost, budget_of, measured, plan, shown

LARGE = Cost({"none": 90, "selective": 40, "full": 10}, {"none": 0.0, "selective": 1.0, "full": 8.0})
SMALL = Cost({"none": 30, "full": 10}, {"none": 0.0, "full": 4.0})


def lost(ways: Any, calls: Any) -> float:
    return sum(cost.seconds[way] for cost, way in zip(calls, ways, strict=True))


@pytest.mark.parametrize("budget", range(40, 270, 10))
def test_plans_fit_and_lose_about_the_least(budget: int) -> None:
    """Against all plans: never over the budget, the best of all for equal layers, and one layer's worth off else."""
    for calls, slack in (([SMALL] * 4, 0.0), ([LARGE, SMALL, LARGE], 4.0)):
        kept = sum(cost.kept["full"] for cost in calls)
        if kept > budget:
            with pytest.raises(ValueError, match="alone are"):
                plan(calls, budget)
            continue
        found = plan(calls, budget)
        assert sum(cost.kept[way] for cost, way in zip(calls, found, strict=True)) <= budget
        every = itertools.product(*(cost.kept for cost in calls))
        fits = [w for w in every if sum(c.kept[way] for c, way in zip(calls, w, strict=True)) <= budget]
        assert lost(found, calls) <= min(lost(ways, calls) for ways in fits) + slack


def step_and_kept(budget: int | str, model_loss: Any = MODEL_LOSS, **how: Any) -> tuple[Any, list[int]]:
    """(params after three steps, bytes that autograd keeps in each step, parameters left out)."""
    params, seen = model_params(), []
    own = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(params)}
    held: dict[int, torch.UntypedStorage] = {}  # storages, not sizes: the address of a freed one would come again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    def loss(params: Any, batch: Any) -> Any:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return model_loss(params, batch)

    optimizer = train.adamw(1e-2)
    remat = budget if isinstance(budget, str) else f"budget:{budget}"
    step = train.make_step(loss, optimizer, remat=remat, **how)
    state = train.init_state(params, optimizer)
    for seed in range(3):
        held.clear()
        state, _ = step(state, model_batch(seed))
        seen.append(sum(storage.nbytes() for storage in held.values()))
        own = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(state.params)}
    return state.params, seen


def test_the_bits_are_those_without_remat_and_less_is_kept() -> None:
    _, most = step_and_kept("none")
    _, least = step_and_kept("full")
    for budget, accumulate in ((5000, 1), (20_000, 1), (1 << 30, 1), (20_000, 2)):
        found, _ = step_and_kept(budget, accumulate=accumulate)
        plain, _ = step_and_kept("none", accumulate=accumulate)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(plain), strict=True))
    _, little = step_and_kept(5000)
    _, much = step_and_kept(1 << 30)
    assert little[-1] < most[-1] and abs(little[1] - least[1]) < (most[1] - least[1]) / 2
    # A wrapped block lays out the rotary table for its own queries and keys, which layers without a wrapper share.
    _, wrapped = step_and_kept("none", functools.partial(MODEL_LOSS, layer_fn=lambda block: block))
    assert much[1:] == wrapped[1:] and 0 < much[1] - most[1] < most[1] / 10


def test_measured_bytes_are_those_of_the_block() -> None:
    """Of a block with one product and one square: x and the product's result, the results of products, x."""
    weight, x = torch.randn(16, 16, requires_grad=True), torch.randn(2, 5, 16)

    def block(layer: Any, x: Any, mask: Any, freqs: Any) -> Any:
        return (x @ layer["w"]).square().sum(-1, keepdim=True).expand_as(x) + x, {}

    found = measured(block, ({"w": weight}, x, None, None), {}, ("none", "full", "selective"))
    assert found.kept == {"none": 2 * x.nbytes, "full": x.nbytes, "selective": 2 * x.nbytes}
    assert found.seconds["none"] == 0 <= found.seconds["selective"] <= found.seconds["full"] > 0


def test_compiled_blocks_take_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    wanted, _ = step_and_kept("none")
    found, _ = step_and_kept(20_000, compile="block")
    for a, b in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_bad_use_is_a_sentence() -> None:
    assert budget_of("budget:2GiB") == 2**31 and budget_of("budget:300") == 300 and budget_of("full") is None
    assert shown(3 * 2**29) == "1.5 GiB" and shown(12) == "12 bytes"
    optimizer = train.adamw(1e-2)
    for remat, words in (("budget:2GB", "it must be"), ("budget:", "it must be"), ("budget:-1", "it must be")):
        with pytest.raises(ValueError, match=words):
            train.make_step(MODEL_LOSS, optimizer, remat=remat)
    with pytest.raises(ValueError, match="whole graph needs one plan"):
        train.make_step(MODEL_LOSS, optimizer, remat="budget:2GiB", compile="whole")
    step = train.make_step(MODEL_LOSS, optimizer, remat="budget:100")
    state = train.init_state(model_params(), optimizer)
    state, _ = step(state, model_batch())
    with pytest.raises(ValueError, match="the inputs of the 4 layers alone are"):
        step(state, model_batch())
    assert MODEL.num_hidden_layers == 4

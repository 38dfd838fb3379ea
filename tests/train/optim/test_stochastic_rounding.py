"""Stochastic rounding: the mean is exact, small updates survive, and the draw is a function of seed, step and path."""

import copy
from types import SimpleNamespace

import pytest
import torch

from fnmodels import tree
from train import adamw, apply_updates, init_state, make_step, partition, sgd, with_ema
from train.optim import cache_chunks, stochastic_round, with_master, with_stochastic_rounding
from train.optim.stochastic_rounding import draw

STEP = torch.tensor(1)


@pytest.mark.parametrize("share", [0.0, 1 / 3, 0.5, 0.99])
@pytest.mark.parametrize("low", [1.0, -1.0, 3e-39, -96.0], ids=str)
def test_one_of_two_neighbors_as_often_as_its_share(low: float, share: float) -> None:
    below = torch.tensor(low).bfloat16()
    above = (below.view(torch.int16) + 1).view(torch.bfloat16)  # away from 0
    value = below.float() + share * (above.float() - below.float())
    many = value.expand(200_000)
    found = stochastic_round(many, draw(0, STEP, "w", many))
    assert {*found.tolist()} <= {float(below), float(above)}
    up = (found == above).double().mean()
    # four standard deviations of a coin, and the half bit by which fp32 itself may be off
    assert abs(float(up) - share) <= 4 * (share * (1 - share) / len(many)) ** 0.5 + 2**-15


def test_what_bf16_holds_stays_with_every_draw() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for bits in (0, 1, 2**16 - 1):
        found = stochastic_round(every.float(), torch.full((2**16,), bits, dtype=torch.int32))
        assert torch.equal(found.isnan(), every.isnan())
        assert torch.equal(found[~every.isnan()], every[~every.isnan()])
    payload = torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)  # NaN, whose bits would run over
    assert stochastic_round(payload, torch.tensor([2**16 - 1])).isnan().all()
    with pytest.raises(ValueError, match=r"is torch\.float64"):
        stochastic_round(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32))


def test_draws_are_even_and_differ_by_seed_step_path_and_index() -> None:
    like = torch.empty(64, 500)
    first = draw(0, STEP, "w", like)
    assert first.shape == like.shape and first.min() >= 0 and first.max() < 2**16
    for others in ((1, STEP, "w"), (1, STEP - 1, "w"), (0, STEP + 1, "w"), (0, STEP, "v")):
        both = torch.stack([first.flatten(), draw(*others, like).flatten()]).float()
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.03
    for lag in (1, 2, 16, 500):
        both = torch.stack([first.flatten()[lag:], first.flatten()[:-lag]]).float()
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.03
    counts = torch.bincount(first.flatten() >> 8, minlength=256).double()
    assert float(((counts - 125) ** 2 / 125).sum()) < 255 + 6 * (2 * 255) ** 0.5  # chi-squared
    over_steps = torch.stack([draw(0, torch.tensor(s), "w", torch.empty(32)) for s in range(500)]).double().mean(0)
    assert (over_steps - 32767.5).abs().max() < 5 * 65536 / 12**0.5 / 500**0.5


def _mean_after(optimizer, steps: int = 100) -> float:
    params, grads = {"w": torch.ones(4096, dtype=torch.bfloat16)}, {"w": torch.ones(4096, dtype=torch.bfloat16)}
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
    assert params["w"].dtype == torch.bfloat16
    return float(params["w"].double().mean())


def test_small_updates_survive() -> None:
    """A rate of 1e-4 at 1 is 1/39 of the distance to the next smaller bf16: rounding to the nearest stays."""
    assert _mean_after(sgd(1e-4)) == 1.0
    assert _mean_after(with_master(sgd(1e-4))) == pytest.approx(0.99, abs=2e-3)
    assert _mean_after(with_stochastic_rounding(sgd(1e-4))) == pytest.approx(0.99, abs=4e-4)  # 2^-8 sqrt(2.5 / 4096)


def _params() -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(6, 5, generator=draws).bfloat16(),
        "norm": torch.randn(5, generator=draws),  # fp32
        "table": torch.arange(3),
        "frozen": torch.randn(4, generator=draws).bfloat16(),
    }


SPEC = {name: SimpleNamespace(decay=False, trainable=name in ("w", "norm")) for name in _params()}
OPTIMIZERS = {
    "adamw": lambda: adamw(1e-3, eps=1e-3, spec=SPEC),
    "partition": lambda: partition({"norm": adamw(1e-2), "w": sgd(1e-3, momentum=0.9), "*": None}),
    "average": lambda: with_ema(sgd(1e-3, spec=SPEC), 0.9),
}


def _run(optimizer, *, inplace: bool, steps: int, at=None):
    params, state = at or (_params(), None)
    params = tree.map(torch.clone, params)
    state = optimizer.init(params) if state is None else copy.deepcopy(state)
    for step in range(steps):
        draws = torch.Generator().manual_seed(step)
        grads = {n: torch.randn(p.shape, generator=draws) if n in ("w", "norm") else None for n, p in params.items()}
        if inplace:
            optimizer.apply_(grads, state, params)
        else:
            updates, state = optimizer.update(grads, state, params)
            params = apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pure_and_in_place_are_the_same_but_for_fp32_roundings(name: str) -> None:
    optimizer = with_stochastic_rounding(OPTIMIZERS[name]())
    (pure, pure_state), (inplace, state) = (_run(optimizer, inplace=way, steps=3) for way in (False, True))
    torch.testing.assert_close(pure["norm"], inplace["norm"], rtol=1e-6, atol=1e-6)
    # A fused kernel's last bit decides now and then to which side a value falls.
    assert (pure["w"] == inplace["w"]).float().mean() > 0.9
    torch.testing.assert_close(pure["w"], inplace["w"], rtol=2**-7, atol=0)
    assert tree.flatten(pure_state).keys() == tree.flatten(state).keys()
    before = _params()
    assert all(torch.equal(inplace[n], before[n]) and torch.equal(pure[n], before[n]) for n in ("table", "frozen"))
    moments = [t for path, t in tree.flatten(state).items() if not path.endswith(("step", "table"))]
    assert all(t.dtype == torch.float32 for t in moments)


def test_parts_of_a_leaf_get_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for size in (1 << 20, 1 << 10):
        monkeypatch.setattr(cache_chunks, "SIZE", size)
        params = {"w": torch.linspace(-1, 1, 5000, dtype=torch.bfloat16)}
        optimizer = with_stochastic_rounding(adamw(1e-3))
        opt_state = optimizer.init(params)
        optimizer.apply_(tree.map(torch.sin, params), opt_state, params)
        held.append(params["w"])
    assert torch.equal(*held)


def test_fp32_leaves_are_updated_as_without() -> None:
    plain, _ = _run(adamw(1e-3), inplace=True, steps=3, at=(_params() | {"w": _params()["w"].float()}, None))
    found, _ = _run(with_stochastic_rounding(adamw(1e-3)), inplace=True, steps=3)
    assert torch.equal(found["norm"], plain["norm"])


def test_a_resumed_run_repeats_the_draws_and_another_seed_does_not() -> None:
    optimizer = with_stochastic_rounding(sgd(1e-3))
    whole, _ = _run(optimizer, inplace=True, steps=4)
    again, _ = _run(optimizer, inplace=True, steps=4)
    other, _ = _run(with_stochastic_rounding(sgd(1e-3), seed=1), inplace=True, steps=4)
    assert torch.equal(whole["w"], again["w"]) and not torch.equal(whole["w"], other["w"])
    params, state = _params(), optimizer.init(_params())
    grads = tree.map(lambda p: torch.full_like(p, 0.1) if p.is_floating_point() else None, params)
    first, middle = optimizer.update(grads, state, params)
    assert torch.equal(optimizer.update(grads, state, params)[0]["w"], first["w"])
    assert not torch.equal(optimizer.update(grads, middle, params)[0]["w"], first["w"])


def test_a_skipped_step_keeps_every_bit_and_the_step_takes_it() -> None:
    optimizer = with_stochastic_rounding(adamw(1e-2))

    def loss(params, batch):
        return ((params["w"].float() - 1).square().sum() + params["norm"].sum()) * batch["x"].sum(), torch.tensor(30)

    given = {name: tensor for name, tensor in _params().items() if name in ("w", "norm")}
    results = []
    for inplace in (True, False):
        step, state, losses = make_step(loss, optimizer, inplace=inplace), init_state(given, optimizer), []
        for _ in range(4):
            state, metrics = step(state, {"x": torch.ones(1)})
            losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0] and float(metrics["lr"]) == pytest.approx(1e-2)
        before = copy.deepcopy((state.params, state.opt_state))
        state, metrics = step(state, {"x": torch.full((1,), torch.nan)})
        assert not metrics["finite"]
        after = tree.leaves((state.params, state.opt_state))
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), after, strict=True))
        results.append(state.params["w"])
    torch.testing.assert_close(results[0], results[1], rtol=2**-6, atol=0)


def test_the_pure_update_goes_through_vmap() -> None:
    optimizer = with_stochastic_rounding(adamw(1e-3))
    params = {"w": torch.stack([_params()["w"], 2 * _params()["w"]])}
    grads = tree.map(torch.ones_like, params)
    states = torch.func.vmap(optimizer.init)(params)
    updates, _ = torch.func.vmap(optimizer.update)(grads, states, params)
    for i in range(2):
        one = {"w": params["w"][i]}
        expected, _ = optimizer.update({"w": grads["w"][i]}, optimizer.init(one), one)
        assert torch.equal(updates["w"][i], expected["w"])


def test_the_derivative_is_that_without_rounding() -> None:
    grads = tree.map(torch.ones_like, _params())

    def moved(rate: torch.Tensor, rounded: bool) -> torch.Tensor:
        optimizer = with_stochastic_rounding(adamw(rate)) if rounded else adamw(rate)
        params = _params() if rounded else tree.map(torch.Tensor.float, _params())
        return optimizer.update(grads, optimizer.init(params), params)[0]["w"].sum()

    rate = torch.tensor(0.1)
    wanted = torch.func.grad(moved)(rate, False)
    torch.testing.assert_close(torch.func.grad(moved)(rate, True), wanted)
    tracked = rate.clone().requires_grad_()
    moved(tracked, True).backward()
    torch.testing.assert_close(tracked.grad, wanted)

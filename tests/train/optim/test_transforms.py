import pytest
import torch

from fnmodels import tree
from tests.train.optim.test_more_optim import _assert_close, _gradient, _ours, _params
from train import Optimizer, adamw, apply_updates, chain, init_state, make_step, partition, sgd
from train.optim import clip_by_global_norm, clip_norm, masked, trainable_mask


def _heavy(decay: float) -> Optimizer:
    """A transform with state: the sum of past gradients."""

    def update(grads, state, params):
        sums = tree.map(lambda s, g: decay * s + g, state, grads)
        return sums, sums

    return Optimizer(lambda params: tree.map(torch.zeros_like, params), update)


def test_each_result_is_the_next_ones_gradient() -> None:
    params = _params()
    ours, state = _ours(chain(clip_norm(0.5), _heavy(0.9), sgd(0.1)), params)
    theirs, buffer = params, tree.map(torch.zeros_like, params)
    for step in range(50):
        grads = tree.map(lambda p, step=step: _gradient(p, step), theirs)
        clipped, norm = clip_by_global_norm(grads, 0.5)
        buffer = tree.map(lambda b, g: 0.9 * b + g, buffer, clipped)
        theirs = tree.map(lambda p, b: p - 0.1 * b, theirs, buffer)
    assert float(norm) > 0.5  # clipping did something
    _assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert state[0] == {} and int(state[-1]["step"]) == 50
    optimizer, held = chain(clip_norm(0.5), _heavy(0.9), sgd(0.1)), tree.map(torch.clone, params)
    kept = optimizer.init(held)
    for step in range(50):
        optimizer.apply_(tree.map(lambda p, step=step: _gradient(p, step), held), kept, held)
    _assert_close(held, theirs, rtol=1e-5, atol=1e-6)
    _assert_close(kept[1], buffer, rtol=1e-5, atol=1e-6)


def test_a_group_is_clipped_by_its_own_norm() -> None:
    params = _params()
    ours, _ = _ours(partition({"t*": chain(clip_norm(0.1), sgd(0.1)), "*": sgd(0.1)}), params)
    _assert_close(ours["tall"], _ours(chain(clip_norm(0.1), sgd(0.1)), {"tall": params["tall"]})[0]["tall"])
    _assert_close(ours["wide"], _ours(sgd(0.1), {"wide": params["wide"]})[0]["wide"])


def test_in_place_and_pure_agree_and_a_skipped_step_keeps_every_bit() -> None:
    optimizer = chain(clip_norm(0.5), _heavy(0.5), adamw(lambda n: 0.1 / n))
    results = []

    def loss(params, batch):
        return sum(p.square().sum() for p in tree.leaves(params)) * batch["x"].sum(), torch.tensor(1)

    for inplace in (True, False):
        step, state = make_step(loss, optimizer, inplace=inplace), init_state(_params(), optimizer)
        for _ in range(3):
            state, metrics = step(state, {"x": torch.ones(1)})
        assert float(metrics["lr"]) == pytest.approx(0.1 / 3)
        before = tree.map(torch.clone, (state.params, state.opt_state))
        state, metrics = step(state, {"x": torch.full((1,), torch.nan)})
        assert not metrics["finite"]
        after = tree.leaves((state.params, state.opt_state))
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), after, strict=True))
        results.append(state.params)
    _assert_close(*results, rtol=1e-5, atol=1e-6)


def test_alone_it_is_the_optimizer() -> None:
    _assert_close(_ours(chain(adamw(0.01)), _params(), 5)[0], _ours(adamw(0.01), _params(), 5)[0], rtol=0, atol=0)
    assert chain(adamw(0.01)).traits.elementwise and not chain(clip_norm(1.0), adamw(0.01)).traits.elementwise
    updates, _ = clip_norm(1e9).update(_params(), None, _params())
    _assert_close(apply_updates(_params(), updates), tree.map(lambda p: 2 * p, _params()))


def test_what_does_not_go_is_named() -> None:
    with pytest.raises(ValueError, match="at least one transform"):
        chain()
    with pytest.raises(ValueError, match="limit is 0; it must be above 0"):
        clip_norm(0)
    with pytest.raises(ValueError, match="at least one pattern"):
        masked(clip_norm(1.0))
    with pytest.raises(ValueError, match="The pattern 'tal' gets no leaf; the paths are like wide"):
        masked(clip_norm(1.0), "w*", "tal").init(_params())
    with pytest.raises(ValueError, match=r"train\.partition"):
        masked(adamw(1e-3), "tall")


def test_a_masked_transform_sees_its_own_leaves_and_the_others_pass() -> None:
    params = _params()
    both = chain(masked(clip_norm(0.1), "t*", "square"), masked(_heavy(0.9), "wide"), sgd(0.1))
    ours, state = _ours(both, params)
    named = {name: params[name] for name in ("tall", "square")}
    _assert_close({name: ours[name] for name in named}, _ours(chain(clip_norm(0.1), sgd(0.1)), named)[0])
    _assert_close(ours["wide"], _ours(chain(_heavy(0.9), sgd(0.1)), {"wide": params["wide"]})[0]["wide"])
    assert list(tree.flatten(state[1])) == ["wide"]
    assert not both.traits.elementwise


def test_what_trains_and_the_rates_are_those_of_the_last() -> None:
    optimizer = chain(clip_norm(0.5), partition({"tall": None, "wide": sgd(0.1), "*": sgd(0.2)}))
    params = _params()
    assert tree.flatten(trainable_mask(params, optimizer.traits.trainable))["tall"] is False
    assert optimizer.traits.rates is not None and optimizer.traits.rates(optimizer.init(params)) == {
        "wide": 0.1,
        "*": 0.2,
    }

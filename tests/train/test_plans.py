"""What a step keeps between two calls: a plan of flat lists, on which no result may depend."""

import gc
import weakref

import pytest
import torch

import train
from fnmodels import tree
from train.gradients import gradient_sums
from train.optim.base import Optimizer, with_traits
from train.state import init_state
from train.step import make_step
from train.update import update

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 4, generator=DRAW), torch.randn(12, 3, generator=DRAW)
BATCH = {"x": X, "y": Y}
OPTIMIZERS = {
    "adamw": lambda: train.adamw(0.1),
    "sgd": lambda: train.sgd(0.1, momentum=0.9),
    "lion": lambda: train.lion(0.01),
    "groups": lambda: train.partition({"*.w": train.adamw(0.1), "*.b": train.sgd(0.1)}),
    "frozen": lambda: train.partition({"*.w": train.adamw(0.1), "*.b": None}),
    "chain": lambda: train.chain(train.optim.clip_norm(0.1), train.adamw(0.1)),
    "ema": lambda: train.with_ema(train.adamw(0.1), 0.9),
}


def params():
    draw = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    return {"one": {"w": make(5, 4), "b": make(5)}, "two": {"w": make(3, 5), "b": make(3)}}


def loss(params, batch):
    h = (batch["x"] @ params["one"]["w"].T + params["one"]["b"]).tanh()
    error = h @ params["two"]["w"].T + params["two"]["b"] - batch["y"]
    return error.square().sum(), torch.tensor(len(batch["x"]))


def same_bits(one, other):
    flat, others = tree.flatten(one), tree.flatten(other)
    return flat.keys() == others.keys() and all(torch.equal(flat[path], others[path]) for path in flat)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_a_plan_has_the_bits_of_a_new_step(name):
    optimizer = OPTIMIZERS[name]()
    step, planned, fresh = make_step(loss, optimizer, clip=1.0), *(init_state(params(), optimizer) for _ in range(2))
    for _ in range(4):
        planned, _ = step(planned, BATCH)
        fresh, _ = make_step(loss, optimizer, clip=1.0)(fresh, BATCH)
    assert same_bits(planned, fresh)


def replaced(state):
    state.params["one"]["b"] = torch.ones(5)


def moments_replaced(state):
    state.opt_state["exp_avg"]["one"]["w"] = torch.ones(5, 4)


def counter_replaced(state):
    state.opt_state["step"] = torch.tensor(100)


@pytest.mark.parametrize("change", [replaced, moments_replaced, counter_replaced])
def test_an_entry_replaced_between_two_steps_is_used(change):
    optimizer = OPTIMIZERS["adamw"]()
    step, results = make_step(loss, optimizer), []
    for remembered in (True, False):
        state, _ = step(init_state(params(), optimizer), BATCH)
        change(state)
        state, _ = (step if remembered else make_step(loss, optimizer))(state, BATCH)
        results.append(state)
    assert same_bits(*results)
    untouched, _ = step(init_state(params(), optimizer), BATCH)
    untouched, _ = step(untouched, BATCH)
    assert not same_bits(results[0], untouched)


def test_a_step_keeps_no_state_alive():
    optimizer = OPTIMIZERS["adamw"]()
    step = make_step(loss, optimizer)
    state, metrics = step(init_state(params(), optimizer), BATCH)
    leaves = [weakref.ref(leaf) for leaf in tree.leaves(state)]
    del state, metrics
    gc.collect()
    assert not [leaf for leaf in leaves if leaf() is not None]


def test_the_trainable_mask_is_computed_once_per_state():
    asked = []

    def trainable(params):
        asked.append(1)
        return tree.map(lambda _: True, params)

    optimizer = with_traits(train.adamw(0.1), trainable=trainable)
    step, state = make_step(loss, optimizer), init_state(params(), optimizer)
    asked.clear()
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert len(asked) == 1


def test_a_state_of_an_optimizer_without_a_form_in_place_goes_by_update():
    sgd = train.sgd(0.1)
    pure = Optimizer(sgd.init, sgd.update)
    steps, states = [make_step(loss, one) for one in (sgd, pure)], [init_state(params(), pure) for _ in range(2)]
    for _ in range(3):
        states = [step(state, BATCH)[0] for step, state in zip(steps, states, strict=True)]
    for one, other in zip(*map(tree.leaves, states), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_within_the_clip_are_not_written():
    """A factor of 1 changes no bit, and is a pass over all gradients; one below 1 is multiplied."""
    optimizer = train.adamw(0.1)
    for clip, writes in ((1e6, 0), (1e-3, 1)):
        state = init_state(params(), optimizer)
        sums = gradient_sums(loss, optimizer)(state.params, [BATCH])
        grads, before = sums.grads, [grad._version for grad in sums.grads]
        unclipped = [grad.clone() for grad in grads]
        _, metrics = update(optimizer, state, sums, clip=clip)
        assert [grad._version - version for grad, version in zip(grads, before, strict=True)] == [writes] * len(grads)
        factor = min(1.0, clip / float(metrics["grad_norm"]))
        assert all(torch.allclose(a, b * factor) for a, b in zip(grads, unclipped, strict=True))

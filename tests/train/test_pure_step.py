"""A step under each transform of torch.func: equal to a loop, to finite differences, and to the step in place."""

import functools

import pytest
import torch
from torch.func import grad, jvp, vmap

import fnmodels
import params as P
import train
from fnmodels import llama, tree
from train.optim.base import Optimizer
from train.state import State, init_state
from train.step import make_step, pure_step

DRAW = torch.Generator().manual_seed(0)
BATCH = {
    "x": torch.randn(12, 4, generator=DRAW, dtype=torch.float64),
    "y": torch.randn(12, 3, generator=DRAW, dtype=torch.float64),
}
OPTIMIZERS = {
    "adamw": lambda rate: train.adamw(rate),
    "sgd": lambda rate: train.sgd(rate, momentum=0.9, nesterov=True),
    "lion": lambda rate: train.lion(rate),
    "groups": lambda rate: train.partition({"*w": train.adamw(rate), "*b": train.sgd(rate)}),
    "frozen": lambda rate: train.partition({"*w": train.adamw(rate), "*b": None}),
    "chain": lambda rate: train.chain(train.optim.masked(train.optim.clip_norm(0.1), "*w"), train.adamw(rate)),
    "clipped group": lambda rate: train.partition({"*": train.chain(train.optim.clip_norm(0.1), train.sgd(rate))}),
    "ema": lambda rate: train.with_ema(train.partition({"*w": train.adamw(rate), "*b": None}), 0.9),
    "master": lambda rate: train.optim.with_master(train.adamw(rate)),
}


def params(seed=1):
    draw = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    return {"layers": [{"w": make(5, 4), "b": make(5)}, {"w": make(3, 5), "b": make(3)}]}


def loss(params, batch):
    first, second = params["layers"]
    h = (batch["x"] @ first["w"].T + first["b"]).tanh()
    error = h @ second["w"].T + second["b"] - batch["y"]
    return error.square().sum(), torch.tensor(len(batch["x"]))


def assert_close(one, other, **tolerance):
    flat, others = tree.flatten(one), tree.flatten(other)
    assert flat.keys() == others.keys()
    for path, leaf in flat.items():
        torch.testing.assert_close(leaf, others[path], msg=lambda m, path=path: f"{path}: {m}", **tolerance)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_step_that_leaves_its_state_alone(name, clip):
    optimizer = OPTIMIZERS[name](0.1)
    steps = pure_step(loss, optimizer, clip=clip), make_step(loss, optimizer, clip=clip, inplace=False)
    states = [init_state(params(), optimizer) for _ in steps]
    first = tree.map(torch.clone, states[0])
    for _ in range(3):
        (pure, metrics), (made, others) = (step(state, BATCH) for step, state in zip(steps, states, strict=True))
        assert_close((pure, metrics), (made, others), rtol=1e-9, atol=1e-11)
        states = [pure, made]
    assert_close(init_state(params(), optimizer), first, rtol=0, atol=0)
    assert int(states[0].step) == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_vmap_over_seeds_and_rates_equals_a_loop(name):
    rates = torch.tensor([0.01, 0.1, 0.3], dtype=torch.float64)

    def tuned(rate, start):
        optimizer = OPTIMIZERS[name](rate)
        step, state = pure_step(loss, optimizer, clip=1.0), State(torch.tensor(0), start, optimizer.init(start))
        for _ in range(2):
            state, metrics = step(state, BATCH)
        return state, metrics

    starts = tree.stack([params(1), params(2)])
    states, metrics = vmap(vmap(tuned, (0, None)), (None, 0))(rates, starts)
    for seed in range(2):
        for index, rate in enumerate(rates):
            alone = tuned(rate, params(seed + 1))
            member = tree.map(lambda leaf, s=seed, i=index: leaf[s, i], (states, metrics))
            assert_close(member, alone, rtol=1e-9, atol=1e-11)


def test_vmap_over_states_and_batches_takes_a_state_and_returns_one():
    optimizer = OPTIMIZERS["frozen"](0.1)
    made = [init_state(params(seed), optimizer) for seed in (1, 2)]
    batches = [BATCH, tree.map(lambda t: 2 * t, BATCH)]
    states, _ = vmap(pure_step(loss, optimizer))(tree.stack(made), tree.stack(batches))
    for member, state, batch in zip(tree.unstack(states), made, batches, strict=True):
        assert_close(member, pure_step(loss, optimizer)(state, batch)[0], rtol=1e-9, atol=1e-11)


def after_two(rate, start):
    """The loss after two steps."""
    optimizer = train.adamw(rate, eps=1e-3)
    step, state = pure_step(loss, optimizer), State(torch.tensor(0), start, optimizer.init(start))
    for _ in range(2):
        state, _ = step(state, BATCH)
    return loss(state.params, BATCH)[0]


def test_grad_through_two_steps_is_that_of_finite_differences():
    """MAML by the parameters, and the hypergradient of the rate."""
    rate, start = torch.tensor(0.1, dtype=torch.float64), params()
    of_rate, of_start = grad(after_two, (0, 1))(rate, start)
    draw = torch.Generator().manual_seed(3)
    along = tree.map(lambda p: torch.randn(p.shape, generator=draw, dtype=p.dtype), start)
    moved = [after_two(rate, tree.axpy(h, along, start)) for h in (1e-6, -1e-6)]
    torch.testing.assert_close(tree.vdot(of_start, along), (moved[0] - moved[1]) / 2e-6, rtol=1e-5, atol=1e-7)
    tuned = [after_two(rate + h, start) for h in (1e-6, -1e-6)]
    torch.testing.assert_close(of_rate, (tuned[0] - tuned[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_jvp_through_two_steps_is_the_gradients_product():
    rate, start = torch.tensor(0.1, dtype=torch.float64), params()
    along = tree.map(torch.ones_like, start)
    _, moved = jvp(functools.partial(after_two, rate), (start,), (along,))
    torch.testing.assert_close(moved, tree.vdot(grad(after_two, 1)(rate, start), along))


def test_a_step_compiles_to_one_graph():
    optimizer = train.partition({"*w": train.adamw(0.1), "*b": train.sgd(0.1)})
    state = init_state(params(), optimizer)
    step = pure_step(loss, optimizer, clip=1.0)
    graph = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_close(graph(state, BATCH), step(state, BATCH), rtol=1e-9, atol=1e-11)


def test_a_step_made_within_a_mapped_function_compiles_to_one_graph():
    start, rates = params(), torch.tensor([0.01, 0.1], dtype=torch.float64)

    def tuned(rate):
        optimizer = train.adamw(rate, betas=(0.9, 1 - rate), weight_decay=rate)
        return pure_step(loss, optimizer)(State(torch.tensor(0), start, optimizer.init(start)), BATCH)

    graph = torch.compile(vmap(tuned), backend="aot_eager", fullgraph=True)
    assert_close(graph(rates), vmap(tuned)(rates), rtol=1e-9, atol=1e-11)


def test_a_step_that_is_not_finite_keeps_its_state():
    optimizer = OPTIMIZERS["groups"](0.1)
    state = init_state(params(), optimizer)
    after, metrics = pure_step(loss, optimizer)(state, BATCH | {"y": BATCH["y"] * torch.inf})
    assert not metrics["finite"] and int(after.step) == 1
    assert_close((after.params, after.opt_state), (state.params, state.opt_state), rtol=0, atol=0)


def test_a_state_of_another_optimizer_is_named():
    with pytest.raises(ValueError, match="is not of this step's optimizer"):
        pure_step(loss, train.adamw(0.1))(init_state(params(), train.sgd(0.1)), BATCH)
    with pytest.raises(TypeError, match="A pure step takes a State"):
        pure_step(loss, train.adamw(0.1))((params(), {}), BATCH)  # type: ignore[arg-type]


def test_what_is_no_optimizer_or_clip_is_named():
    with pytest.raises(TypeError, match=r"must be a train\.Optimizer"):
        pure_step(loss, torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip is -1"):
        pure_step(loss, OPTIMIZERS["sgd"](0.1), clip=-1)


CONFIG = llama.Config.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)


def model_batch():
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    inputs = fnmodels.prepare(CONFIG, tokens)[0]
    ones = torch.ones_like(tokens)
    return {"tokens": tokens, "positions": inputs["positions"], "segment_ids": ones, "labels": tokens.roll(-1, 1)}


def test_a_model_trains_under_vmap_over_seeds_and_rates():
    optimizer_of = functools.partial(train.adamw, spec=llama.spec(CONFIG))
    own = functools.partial(train.next_token_loss, config=CONFIG)
    starts, batch = [P.init(CONFIG, seed) for seed in (0, 1)], model_batch()

    def trained(rate, start):
        optimizer = optimizer_of(rate)
        step, state = pure_step(own, optimizer), State(torch.tensor(0), start, optimizer.init(start))
        for _ in range(3):
            state, metrics = step(state, batch)
        return metrics["loss"]

    rates = torch.tensor([1e-3, 1e-2])
    losses = vmap(vmap(trained, (0, None)), (None, 0))(rates, tree.stack(starts))
    for seed, start in enumerate(starts):
        for index, rate in enumerate((1e-3, 1e-2)):
            optimizer = optimizer_of(rate)
            step, state = make_step(own, optimizer), init_state(start, optimizer)
            for _ in range(3):
                state, metrics = step(state, batch)
            torch.testing.assert_close(losses[seed, index], metrics["loss"], rtol=1e-5, atol=1e-5)


def test_maml_through_a_model_is_that_of_finite_differences():
    own = functools.partial(train.next_token_loss, config=CONFIG, kernel="math")
    optimizer, batch = train.sgd(0.5), model_batch()
    start = P.init(CONFIG, 0, dtype=torch.float64)

    def outer(start):
        state = State(torch.tensor(0), start, optimizer.init(start))
        after, _ = pure_step(own, optimizer)(state, batch)
        total, count = own(after.params, batch)
        return total / count

    along = tree.map(lambda p: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view_as(p), start)
    moved = [outer(tree.axpy(h, along, start)) for h in (1e-6, -1e-6)]
    torch.testing.assert_close(tree.vdot(grad(outer)(start), along), (moved[0] - moved[1]) / 2e-6, rtol=1e-5, atol=1e-8)


def test_an_optimizer_of_ones_own_goes_through_vmap():
    signs = Optimizer(lambda params: torch.tensor(0), lambda grads, n, params: (tree.map(torch.sign, grads), n + 1))
    state, _ = vmap(pure_step(loss, signs), (None, 0))(init_state(params(), signs), tree.map(lambda t: t[None], BATCH))
    assert int(state.opt_state) == 1


def after_a_step(start, optimizer, clip=None):
    """The loss after a step from these parameters, by a State that is made within the transform."""
    return loss(pure_step(loss, optimizer, clip=clip)(init_state(start, optimizer), BATCH)[0].params, BATCH)[0]


@pytest.mark.parametrize("name", ["sgd", "adamw", "master"])
def test_a_state_made_in_a_transform_keeps_derivatives(name):
    optimizer, start = OPTIMIZERS[name](0.1), params()
    draw = torch.Generator().manual_seed(5)
    direction = tree.map(lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=torch.float64), start)
    grads = grad(after_a_step)(start, optimizer)
    along = sum(float((g * d).sum()) for g, d in zip(tree.leaves(grads), tree.leaves(direction), strict=True))
    moved = [tree.map(lambda p, d, e=e: p + e * d, start, direction) for e in (1e-5, -1e-5)]
    difference = float((after_a_step(moved[0], optimizer) - after_a_step(moved[1], optimizer)) / 2e-5)
    assert along == pytest.approx(difference, rel=1e-5) and abs(along) > 1e-3
    _, tangent = jvp(lambda p: after_a_step(p, optimizer), (start,), (direction,))
    assert float(tangent) == pytest.approx(difference, rel=1e-5)


def test_parameters_in_bf16_with_a_master_copy_keep_derivatives():
    optimizer = train.optim.with_master(train.sgd(0.1))
    start = {"w": torch.zeros((), dtype=torch.bfloat16)}

    def squared(params, batch):
        return (params["w"].float() - 1).square(), torch.tensor(1)

    def twice(params):
        return squared(pure_step(squared, optimizer)(init_state(params, optimizer), {})[0].params, {})[0]

    assert float(grad(twice)(start)["w"]) == pytest.approx(2 * (0.2 - 1) * 0.8, rel=1e-2)


def test_an_eval_step_has_the_derivatives_of_its_loss():
    found = grad(lambda p: train.make_eval_step(loss)(p, BATCH)["loss"])(params())
    wanted = grad(lambda p: loss(p, BATCH)[0] / 12)(params())
    assert_close(found, wanted)
    assert not train.make_eval_step(loss)(tree.map(lambda p: p.requires_grad_(), params()), BATCH)["loss"].requires_grad


def test_the_limit_of_clipping_may_be_mapped():
    limits, start = torch.tensor([0.1, 1.0], dtype=torch.float64), params()
    found = vmap(lambda limit: after_a_step(start, train.sgd(0.1), limit))(limits)
    chained = vmap(lambda limit: after_a_step(start, train.chain(train.optim.clip_norm(limit), train.sgd(0.1))))(limits)
    for index, limit in enumerate(limits):
        wanted = after_a_step(start, train.sgd(0.1), float(limit))
        torch.testing.assert_close(found[index], wanted)
        torch.testing.assert_close(chained[index], wanted)


def test_bad_use_is_a_sentence():
    optimizer = train.sgd(0.1)
    state = init_state(params(), optimizer)
    with pytest.raises(TypeError, match="A pure step takes one batch, a dict, not a list: join microbatches"):
        pure_step(loss, optimizer)(state, [BATCH, BATCH])
    rates = torch.tensor([0.1, 0.2])
    for compiled in ("none", "step"):
        step = make_step(loss, optimizer, inplace=False, compile=compiled)
        with pytest.raises(ValueError, match=r"not for vmap, grad and jvp of torch\.func: take train\.pure_step"):
            vmap(lambda rate, step=step: step(state, BATCH)[1]["loss"] * rate)(rates)


def test_a_loss_over_mapped_batches_and_tasks():
    config = llama.Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    weights, batch = P.init(config, 0), fnmodels.pack([torch.arange(6)] * 3, 6).batch()
    of_batch = functools.partial(train.next_token_loss, config=config)
    found = vmap(lambda part: of_batch(weights, part)[0])(fnmodels.rows(batch))
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        torch.testing.assert_close(found[row], of_batch(weights, alone)[0])

    def task(p, part):
        slow = grad(lambda q: of_batch(q, part)[0])(p)
        return of_batch(tree.map(lambda q, g: q - 0.01 * g, p, slow), part)[0]

    of_tasks = grad(lambda p: vmap(task, (None, 0))(p, fnmodels.rows(batch)).sum())(weights)
    wanted = grad(lambda p: sum(task(p, {n: v[r : r + 1] for n, v in batch.items()}) for r in range(3)))(weights)
    assert_close(of_tasks, wanted, rtol=1e-4, atol=1e-5)

"""make_step(compile="step"): the results of an eager step, by one graph.

The backend runs the traced operations of torch one by one, so that differences are those of the graph; the last tests
generate code.
"""

import dataclasses
import functools

import pytest
import torch
from torch.func import grad

import fnmodels
import train
from fnmodels import llama, tree
from tests.support.cases import Case, cases, causal, covering, generic_params, is_ordered, is_routed, shortest
from tests.support.small_steps import BATCHES, assert_close, llama_of, loss, model_batch, params, run, same_bits
from train import optim
from train.checkpoint import saved_steps
from train.optim.schedules import warmup_stable_decay
from train.state import State, init_state
from train.step import graph, make_step


def rate(step):
    return 0.1 * warmup_stable_decay(step, total=8, warmup=2)


OPTIMIZERS = {
    "adamw": lambda: train.adamw(rate),
    "sgd": lambda: train.sgd(rate, momentum=0.9),
    "lion": lambda: train.lion(0.01),
    "adafactor": lambda: train.adafactor(0.01),
    "muon": lambda: train.partition({"*.w": train.muon(rate), "*": train.adamw(rate)}),
    "frozen": lambda: train.partition({"*.w": train.adamw(0.1), "*.b": None}),
    "chain": lambda: train.chain(optim.clip_norm(0.1), train.adamw(0.1)),
    "ema": lambda: train.with_ema(train.adamw(0.1), 0.9),
    "small": lambda: optim.with_small_state(train.adamw(0.1), bits=8),
    "master": lambda: optim.with_master(train.adamw(0.1)),
    "rounded": lambda: optim.with_stochastic_rounding(train.adamw(0.1), seed=0),
}
IN_BF16 = ("master", "rounded")
SPLIT = ("adamw", "rounded")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_graph_equals_eager_steps(graphs, name):
    """While the rate and the step's number change; in place and clipped. Some from microbatches, into other tensors:
    these give the optimizer sums that it takes as any others."""
    optimizer, start = OPTIMIZERS[name](), params(torch.bfloat16 if name in IN_BF16 else torch.float32)
    eager = run(make_step(loss, optimizer, clip=1.0), init_state(start, optimizer))
    assert_close(run(make_step(loss, optimizer, clip=1.0, compile="step"), init_state(start, optimizer)), eager)
    assert len(graphs) == 1
    if name not in SPLIT:
        return
    split = make_step(loss, optimizer, clip=1.0, compile="step", accumulate=3, inplace=False)
    atol = 0.02 if name in IN_BF16 else 1e-5  # gradients of microbatches are rounded one by one
    assert_close(run(split, init_state(start, optimizer)), eager, atol)
    assert len(graphs) == 2
    assert set(split(init_state(start, optimizer), BATCHES[0])[1]) == set(eager[1][0])


def frozen_rate(optimizer, state, *args, **options):
    opt_state = state.opt_state | {"step": torch.zeros_like(state.opt_state["step"])}
    return train.update.update(optimizer, dataclasses.replace(state, opt_state=opt_state), *args, **options)


def divided_twice(*args, real=graph._gradients, **options):
    sums = real(*args, **options)
    return dataclasses.replace(sums, grads=[gradient / sums.count for gradient in sums.grads])


def stale_moments(state, after, real=graph._write):
    real(dataclasses.replace(state, opt_state=None), dataclasses.replace(after, opt_state=None))


@pytest.mark.parametrize(
    ("place", "fault"), [("update", frozen_rate), ("_gradients", divided_twice), ("_write", stale_moments)]
)
def test_a_graph_with_a_fault_differs_from_eager_steps(graphs, monkeypatch, place, fault):
    optimizer, options = train.sgd(rate, momentum=0.9), {"accumulate": 2}
    eager = run(make_step(loss, optimizer, **options), init_state(params(), optimizer))
    if place == "update":  # once for all faults
        assert_close(run(make_step(loss, optimizer, compile="step", **options), init_state(params(), optimizer)), eager)
    monkeypatch.setattr(graph, place, fault)
    faulty = run(make_step(loss, optimizer, compile="step", **options), init_state(params(), optimizer))
    with pytest.raises(AssertionError):
        assert_close(faulty, eager)


def test_a_state_is_donated_in_place_and_kept_otherwise(graphs):
    optimizer = train.sgd(0.1, momentum=0.9)
    first = init_state(params(), optimizer)
    tensors = tree.leaves(first)
    after, _ = make_step(loss, optimizer, compile="step")(first, BATCHES[0])
    assert all(one is other for one, other in zip(tree.leaves(after), tensors, strict=True))
    with pytest.raises(RuntimeError, match="used up by a step with inplace=True"):
        first.params
    before = tree.map(torch.clone, after)
    pure = make_step(loss, optimizer, compile="step", inplace=False)(after, BATCHES[0])[0]
    assert same_bits(after, before) and int(pure.step) == 2
    assert_close(pure, make_step(loss, optimizer)(after, BATCHES[0])[0])


def test_an_update_that_is_not_finite_is_skipped(graphs):
    optimizer = train.with_ema(train.sgd(rate, momentum=0.9), 0.9)
    state, before = init_state(params(), optimizer), init_state(params(), optimizer)
    after, metrics = make_step(loss, optimizer, compile="step")(state, BATCHES[0] | {"y": BATCHES[0]["y"] * torch.inf})
    assert not metrics["finite"] and int(after.step) == 1
    assert same_bits((after.params, after.opt_state), (before.params, before.opt_state))


def test_each_size_of_a_batch_has_a_graph_and_is_compiled_once(graphs):
    optimizer = train.sgd(0.1)
    step, state = make_step(loss, optimizer, compile="step"), init_state(params(), optimizer)
    few = tree.map(lambda t: t[:5], BATCHES[0])
    for batch in (*BATCHES, few, BATCHES[1], few, [BATCHES[0], few]):
        state, _ = step(state, batch)
    assert len(graphs) == 3
    state.params["one"]["b"] = torch.ones(5)  # an entry that the caller replaces is used
    again = State(state.step.clone(), *(tree.map(torch.clone, part) for part in (state.params, state.opt_state)))
    assert_close(step(state, few)[0], make_step(loss, optimizer)(again, few)[0])
    assert len(graphs) == 3


FACTOR = 1.0


def test_a_global_that_a_loss_reads_is_not_frozen_into_the_graph(graphs, monkeypatch):
    def scaled(params, batch):
        total, count = loss(params, batch)
        return FACTOR * total, count

    step, optimizer = make_step(scaled, train.sgd(0.1), compile="step", inplace=False), train.sgd(0.1)
    state = init_state(params(), optimizer)
    before = step(state, BATCHES[0])[1]["loss"]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert_close(step(state, BATCHES[0])[1]["loss"], 3 * before)


# Refusals.


@pytest.mark.parametrize("remat", ["full", "every:2", "selective", "budget:1GiB"])
def test_remat_is_refused(remat):
    with pytest.raises(ValueError, match=f'remat=.{remat}. is not for compile="step"'):
        make_step(loss, train.sgd(0.1), compile="step", remat=remat)


def test_a_mesh_is_refused():
    with pytest.raises(ValueError, match=r'compile is .step.; over a mesh it must be "none" or "block"'):
        make_step(loss, train.sgd(0.1), compile="step", mesh=train.parallel.Mesh(fsdp=2))


def test_a_torch_that_does_not_trace_gradients_is_refused(monkeypatch):
    monkeypatch.setattr(graph, "traces_gradients", lambda: False)
    with pytest.raises(ValueError, match='compile="step" needs a torch that traces'):
        make_step(loss, train.sgd(0.1), compile="step")


def test_a_schedule_that_reads_the_step_on_the_host_is_named(graphs):
    optimizer = train.sgd(lambda step: 0.1 if int(step) < 2 else 0.01)
    state = init_state(params(), optimizer)
    with pytest.raises(ValueError, match=r"torch cannot trace these: .*such as int\(step\) in a schedule"):
        make_step(loss, optimizer, compile="step")(state, BATCHES[0])
    assert int(state.step) == 0  # and it is not used up


def test_what_a_graph_would_pass_over_is_found_outside_of_it(graphs):
    optimizer, start = train.adamw(0.1), params() | {"three": torch.ones(3)}
    with pytest.raises(ValueError, match="does not reach 1 of the trainable parameters: three"):
        make_step(loss, optimizer, compile="step")(init_state(start, optimizer), BATCHES[0])
    with pytest.raises(ValueError, match=r"must return \(sum, count\)"):
        make_step(lambda p, b: loss(p, b)[0], optimizer, compile="step")(init_state(params(), optimizer), BATCHES[0])
    with pytest.raises(ValueError, match="not of this step's optimizer"):
        make_step(loss, optimizer, compile="step")(init_state(params(), train.sgd(0.1)), BATCHES[0])
    assert not graphs


# Models.


def size(case: Case) -> int:
    """The number of its leaves, of which the time of a trace follows."""
    config = shortest(case.config)
    return len(tree.leaves(fnmodels.family_of(config).spec(config)))


# Every block is captured, backward too, in tests/contract/test_compile.py: here one model of each form of what a step
# gets of the layers, which are experts' counts and states.
MODELS = tuple(
    {(is_routed(c.config), is_ordered(c)): c for c in sorted(covering(), key=size, reverse=True) if causal(c)}.values()
)


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_a_step_of_a_model_is_one_graph(lowered, case: Case):
    """Of packed rows: the two tests below have rows of one document."""
    config = shortest(case.config)
    family, weights = fnmodels.family_of(config), generic_params(config)
    optimizer = train.sgd(0.1, spec=family.spec(config))
    of_model = functools.partial(train.next_token_loss, config=config, z_loss=1e-3)
    eager, compiled = (make_step(of_model, optimizer, compile=how, inplace=False) for how in ("none", "step"))
    state, batch = init_state(weights, optimizer), model_batch(config, True)
    assert_close(compiled(state, batch), eager(state, batch), atol=1e-4)
    assert len(lowered) == 1


def test_a_model_computes_in_another_dtype(lowered):
    config = llama_of()
    optimizer, weights = train.sgd(0.1), generic_params(config)
    of_model = functools.partial(train.next_token_loss, config=config)
    results = [
        make_step(of_model, optimizer, compile=how, dtype=torch.bfloat16)(
            init_state(weights, optimizer), model_batch(config, False)
        )
        for how in ("none", "step")
    ]
    assert_close(results[1], results[0], atol=0.02)
    assert {leaf.dtype for leaf in tree.leaves(results[1][0].params)} == {torch.float32}


@pytest.mark.slow
def test_experts_are_counted_and_balanced(lowered):
    # One layer, whose attention is plain: what counts and balances experts is the same in every block.
    config = shortest(next(case.config for case in cases() if case.name == "minimax_m2"))
    assert any(path.endswith("selection_bias") for path in tree.flatten(generic_params(config)))
    balance = train.Balance(sequence=1e-2, z=1e-3)
    of_model = functools.partial(train.next_token_loss, config=config, balance=balance, aux=True)
    optimizer = train.sgd(0.1, spec=fnmodels.family_of(config).spec(config))
    results = [
        make_step(of_model, optimizer, compile=how, balance_rate=0.1, accumulate=2)(
            init_state(generic_params(config), optimizer), model_batch(config, False)
        )
        for how in ("none", "step")
    ]
    assert_close(results[1], results[0], atol=1e-4)
    assert results[1][1]["aux"]["counts"].sum() > 0


def test_the_gradient_of_a_default_loss_is_one_graph():
    """With the default chunk, which is one chunk here."""
    config = llama_of()
    weights, batch = generic_params(config), model_batch(config, False)

    def mean(weights):
        total, count = train.next_token_loss(weights, batch, config=config)
        return total / count

    assert_close(torch.compile(grad(mean), backend="aot_eager", fullgraph=True)(weights), grad(mean)(weights))


# Generated code.


@pytest.mark.slow
def test_generated_code_resumes_with_the_bits_of_an_uninterrupted_run(tmp_path):
    config = llama_of()
    optimizer = train.adamw(rate, spec=llama.spec(config))
    of_model = functools.partial(train.next_token_loss, config=config)
    batches = [model_batch(config, False)] * 4
    step = make_step(of_model, optimizer, compile="step", clip=1.0)
    initial = lambda: init_state(generic_params(config), optimizer)  # noqa: E731
    uninterrupted, _ = run(step, initial(), batches)
    assert_close(uninterrupted, run(make_step(of_model, optimizer, clip=1.0), initial(), batches)[0])
    half, _ = run(step, initial(), batches[:2])
    saved_steps.save(tmp_path, 2, half)
    loaded = saved_steps.load(saved_steps.latest(tmp_path), initial())
    again = make_step(of_model, optimizer, compile="step", clip=1.0)
    assert same_bits(again.many(loaded, batches[2:])[0], uninterrupted)

"""step.many, and each form of a batch and of the params with a graph of its own: what is checked before a step runs."""

import functools
import gc
import weakref

import pytest
import torch

import train
from fnmodels import tree
from tests.support.cases import generic_params
from tests.support.small_steps import BATCHES, assert_close, llama_of, loss, model_batch, params, run, same_bits
from train.optim.schedules import warmup_stable_decay
from train.state import State, init_state
from train.step import make_step


def rate(step):
    return 0.1 * warmup_stable_decay(step, total=8, warmup=2)


@pytest.mark.parametrize("compile", ["none", "step"])
def test_many_steps_are_single_ones(graphs, compile):
    optimizer = train.adamw(rate)
    step = make_step(loss, optimizer, compile=compile)
    after, singles = run(step, init_state(params(), optimizer))
    for batches in (BATCHES, tree.stack(BATCHES)):
        state, metrics = step.many(init_state(params(), optimizer), batches)
        assert same_bits(state, after)
        assert same_bits(metrics, tree.stack(singles)) and metrics["loss"].shape == (3,)
    assert len(graphs) == (compile == "step")
    split = step.many(init_state(params(), optimizer), [[batch] for batch in BATCHES])  # a list of microbatches each
    assert same_bits(split[0], after)
    assert same_bits(step.many(init_state(params(), optimizer), iter(BATCHES))[0], after)
    for none in ([], (), {}):
        with pytest.raises(ValueError, match="at least one batch"):
            step.many(after, none)
    with pytest.raises(TypeError, match=r"sequence of batches.* not a Tensor"):
        step.many(after, torch.ones(3))
    with pytest.raises(ValueError, match="one size in dimension 0"):
        step.many(after, {"x": torch.zeros(2, 12, 4), "y": torch.zeros(3, 12, 3)})


@pytest.mark.parametrize("compile", ["none", "step"])
def test_many_steps_have_a_rate_for_each_pattern_of_leaves(graphs, compile):
    """Patterns have dots, which keys of params have not."""
    optimizer = train.partition({"one.*": train.sgd(rate), "*": train.sgd(0.01)})
    step = make_step(loss, optimizer, compile=compile)
    _, singles = run(step, init_state(params(), optimizer))
    for batches in (BATCHES, tree.stack(BATCHES)):
        metrics = step.many(init_state(params(), optimizer), batches)[1]
        for pattern in ("one.*", "*"):
            assert torch.equal(metrics["lr_of"][pattern], torch.stack([one["lr_of"][pattern] for one in singles]))


def test_many_steps_whose_aux_has_other_shapes_are_refused():
    step = make_step(lambda params, batch: (*loss(params, batch), {"rows": batch["x"][:, 0]}), train.sgd(0.1))
    halves = [BATCHES[0], {name: value[:6] for name, value in BATCHES[1].items()}]
    with pytest.raises(ValueError, match=r"'aux.rows' is \[6\] in step 1 but \[12\] in the first"):
        step.many(init_state(params(), train.sgd(0.1)), halves)


def test_every_structure_of_params_is_checked(graphs):
    """Not only the first State of a batch's size, and where the first batch has no valid token, the next one."""
    optimizer, start = train.adamw(0.1, weight_decay=0.5), params() | {"three": torch.ones(3)}
    step = make_step(loss, optimizer, compile="step")
    of_two, _ = step(init_state(params(), optimizer), BATCHES[0])
    for run_of in (step, lambda state, batch: step.many(state, [batch])):
        state = init_state(start, optimizer)
        with pytest.raises(ValueError, match="does not reach 1 of the trainable parameters: three"):
            run_of(state, BATCHES[0])
        assert state.params["three"].tolist() == [1, 1, 1]
    of_two.params["three"] = torch.ones(3)  # an entry that the caller adds
    with pytest.raises(ValueError, match="does not reach"):
        step(State(of_two.step, of_two.params, optimizer.init(of_two.params)), BATCHES[0])
    assert len(graphs) == 1

    def counted(params, batch):
        total, _ = loss(params, batch)
        return total * batch["valid"], batch["valid"]

    step, state = make_step(counted, optimizer, compile="step"), init_state(start, optimizer)
    state, _ = step(state, BATCHES[0] | {"valid": torch.tensor(0)})
    with pytest.raises(ValueError, match="does not reach"):
        step(state, BATCHES[0] | {"valid": torch.tensor(1)})


def test_params_of_a_state_that_nobody_has_are_freed(graphs):
    optimizer = train.sgd(0.1)
    step = make_step(loss, optimizer, compile="step")
    state, _ = step(init_state(params(), optimizer), BATCHES[0])
    leaf = weakref.ref(state.params["one"]["w"])
    del state
    gc.collect()
    assert leaf() is None


def test_many_steps_of_plain_and_packed_rows_are_single_ones(graphs):
    """Whose graphs differ, as plain rows have a layout; each is compiled once."""
    config, optimizer = llama_of(), train.sgd(0.05, momentum=0.9)
    of_model = functools.partial(train.next_token_loss, config=config)
    batches = [model_batch(config, bool(packed)) for packed in (0, 1, 0, 1, 1, 0)]
    step, initial = (
        make_step(of_model, optimizer, compile="step"),
        lambda: init_state(generic_params(config), optimizer),
    )
    first, metrics = step.many(initial(), tree.stack(batches))
    assert len(graphs) == 2
    after, singles = run(step, initial(), batches)
    assert same_bits(first, after) and same_bits(metrics, tree.stack(singles))
    assert_close((after, singles), run(make_step(of_model, optimizer), initial(), batches), atol=1e-4)
    assert same_bits(step.many(initial(), batches)[0], after) and len(graphs) == 2


def test_batches_of_other_forms_have_steps_of_their_own(graphs):
    """After a batch one with weights in fp64, with fp32 ones, one of fewer rows and one with a dimension more."""

    def weighted(params, batch):
        total, count = loss(params, batch)
        return (batch["weights"].sum().float() * total if "weights" in batch else total), count

    plain, optimizer = BATCHES[0], train.sgd(0.05, momentum=0.9)
    fewer, deeper = tree.map(lambda t: t[:5], plain), tree.map(lambda t: t.unflatten(0, (3, 4)), plain)
    weights = [plain | {"weights": torch.full((2,), 0.1, dtype=dtype)} for dtype in (torch.float64, torch.float32)]
    batches = [plain, *weights, fewer, deeper, plain]
    initial = lambda: init_state(params(), optimizer)  # noqa: E731
    step = make_step(weighted, optimizer, compile="step")
    found = run(step, initial(), batches)
    assert_close(found, run(make_step(weighted, optimizer), initial(), batches), atol=1e-4)
    assert same_bits(step.many(initial(), batches)[0], found[0]) and len(graphs) == 5


def test_a_batch_that_many_steps_cannot_take_leaves_the_state_as_it_was(graphs):
    """Of which the first batch is good: all are checked before the first step."""
    optimizer = train.adamw(0.1)

    def without_one(params, batch):
        total, count = loss(params, batch)
        return (total if len(batch["x"]) == 12 else params["one"]["w"].sum()), count

    step, state = make_step(without_one, optimizer, compile="step"), init_state(params(), optimizer)
    few = tree.map(lambda t: t[:5], BATCHES[1])
    with pytest.raises(ValueError, match="does not reach 3 of the trainable parameters"):
        step.many(state, [BATCHES[0], few])
    with pytest.raises(ValueError, match="list of microbatches is empty"):
        step.many(state, [BATCHES[0], []])
    assert int(state.step) == 0 and same_bits(state.params, params())


@pytest.mark.parametrize("compile", ["none", "step"])
def test_a_batch_that_raises_in_between_hands_the_state_back(graphs, compile):
    """As it is after the steps before: nothing is lost. `compile`: the batch has a form that torch cannot trace."""
    optimizer = train.sgd(0.1, momentum=0.9)

    def reads_few(params, batch):
        if len(batch["x"]) == 5 and (compile == "none" or torch.compiler.is_compiling()):
            raise ValueError(f"{float(batch['x'].sum())} cannot be read here")
        return loss(params, batch)

    step, state = make_step(reads_few, optimizer, compile=compile), init_state(params(), optimizer)
    few = tree.map(lambda t: t[:5], BATCHES[1])
    with pytest.raises(ValueError, match=r"cannot be read here|cannot trace") as raised:
        step.many(state, [*BATCHES[:2], few, BATCHES[2]])
    assert raised.value.__notes__ == ["step.many took 2 of 4 steps; the State passed is that after them."]
    two, _ = step.many(init_state(params(), optimizer), BATCHES[:2])
    assert same_bits(state, two)
    assert same_bits(step(state, BATCHES[2])[0], step(two, BATCHES[2])[0])
    unchanged = init_state(params(), optimizer)
    with pytest.raises(ValueError, match=r"cannot be read here|cannot trace") as raised:
        make_step(reads_few, optimizer, compile=compile, inplace=False).many(unchanged, [*BATCHES[:2], few])
    assert int(unchanged.step) == 0 and not hasattr(raised.value, "__notes__")

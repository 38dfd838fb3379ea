import collections
import copy
import dataclasses
import functools
import re
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import fnmodels
from fnmodels import llama, tree
from fnmodels.ops.attention import select
from train.engine import Engine
from train.loss import run_options
from train.losses.next_token import next_token_loss
from train.optim.adamw import adamw, sgd
from train.optim.base import Optimizer
from train.state import State, init_state
from train.step import make_step

# A toy with the parts that the step looks at: layers, a sum and a count, padding.


def toy_params(layers=2):
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=draw) * 0.4  # noqa: E731
    return {"layers": [{"w": make(6, 6), "b": make(6)} for _ in range(layers)], "head": make(5, 6)}


def toy_batch(seed=1, rows=6):
    """Rows with 4, 3, 2, 1, 0, 4, ... valid labels of 4."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (rows, 4), generator=draw)
    for row in range(rows):
        labels[row, 4 - row % 5 :] = -100
    return {"x": torch.randn(rows, 4, 6, generator=draw), "labels": labels}


def toy_block(layer, x, mask, freqs):
    return x + torch.tanh(F.linear(x, layer["w"], layer["b"])), {}


def toy_loss(params, batch, block=toy_block):
    layer_fn = run_options(params).layer_fn
    block = block if layer_fn is None else layer_fn(block)
    x = batch["x"]
    for layer in params["layers"]:
        x, _ = block(layer, x, None, None)
    logits, labels = F.linear(x, params["head"]), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def spec_of(params, trainable):
    def leaf(p):
        return fnmodels.Leaf(tuple(p.shape), p.dtype, ("d",) * p.ndim, fnmodels.Normal(), trainable=trainable(p))

    return tree.map(leaf, params)


def same_bits(ours, theirs):
    pairs = zip(tree.leaves(ours), tree.leaves(theirs), strict=True)
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)


def assert_close(ours, theirs, atol=1e-6):
    for path, value in tree.flatten(ours).items():
        torch.testing.assert_close(
            value, tree.flatten(theirs)[path], rtol=0, atol=atol, msg=lambda m, p=path: f"{p}: {m}"
        )


def run(loss, optimizer, params, batches, **options):
    state, step, metrics = init_state(params, optimizer), make_step(loss, optimizer, **options), []
    for batch in batches:
        state, measured = step(state, batch)
        metrics.append(measured)
    return state, metrics


def gradients(params, batch, **options):
    """The step's own gradients: what SGD with rate 1 takes away."""
    state, (metrics,) = run(toy_loss, sgd(1.0), params, [batch], **options)
    return tree.map(torch.sub, params, state.params), metrics


def test_a_plain_loop_with_torch_optim():
    theirs = tree.map(lambda p: torch.nn.Parameter(p.clone()), toy_params())
    optimizer = torch.optim.AdamW(tree.leaves(theirs), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms = [], []
    for seed in range(20):
        total, count = toy_loss(theirs, toy_batch(seed))
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(tree.leaves(theirs), 0.3))
        optimizer.step()
        losses.append((total / count).detach())

    ours = adamw(1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for inplace in (True, False):
        state, metrics = run(toy_loss, ours, toy_params(), map(toy_batch, range(20)), clip=0.3, inplace=inplace)
        assert_close(state.params, tree.map(torch.Tensor.detach, theirs), atol=2e-6)
        torch.testing.assert_close(torch.stack([m["loss"] for m in metrics]), torch.stack(losses))
        torch.testing.assert_close(torch.stack([m["grad_norm"] for m in metrics]), torch.stack(norms))
        assert int(state.step) == 20


def test_metrics():
    rate = lambda step: 0.1 / step  # noqa: E731
    _, metrics = run(toy_loss, adamw(rate), toy_params(), [toy_batch()] * 3)
    assert all(set(m) == {"loss", "count", "grad_norm", "lr", "finite"} for m in metrics)
    assert all(v.shape == () and not v.requires_grad for m in metrics for v in m.values())
    assert [float(m["lr"]) for m in metrics] == pytest.approx([0.1, 0.05, 0.1 / 3])
    assert [int(m["count"]) for m in metrics] == [14] * 3
    assert all(m["finite"] for m in metrics)


# Accumulation.


@pytest.mark.parametrize("accumulate", [2, 3, 4, 6])
def test_any_split_gives_the_gradients_of_one_batch(accumulate):
    # With 6 parts one of them has no valid label at all; with 4 they are of unequal size.
    whole, expected = gradients(toy_params(), toy_batch())
    parts, metrics = gradients(toy_params(), toy_batch(), accumulate=accumulate)
    assert_close(parts, whole)
    assert_close(metrics, expected)
    assert metrics["finite"]


def test_accumulation_of_bf16_gradients_is_in_fp32():
    params = tree.map(lambda p: p.bfloat16(), toy_params())
    batch = toy_batch(rows=64) | {}
    batch["x"] = batch["x"].bfloat16()
    exact, _ = gradients(toy_params(), toy_batch(rows=64))
    seen = {}

    def spy(opt_state, params):
        return lambda grads, skip: seen.update(zip(tree.flatten(params), grads, strict=True))

    step = make_step(toy_loss, Optimizer(lambda p: {}, lambda *a: a, spy), accumulate=64)
    step(init_state(params, Optimizer(lambda p: {}, lambda *a: a, spy)), batch)
    for path, grad in seen.items():
        assert grad.dtype == torch.float32
        reference = tree.flatten(exact)[path]
        assert (grad - reference).norm() < 0.02 * reference.norm()


def test_more_parts_than_rows_is_named():
    step = make_step(toy_loss, sgd(1.0), accumulate=7)
    with pytest.raises(ValueError, match=r"accumulate=7 cannot split 'x', whose shape is \(6, 4, 6\)"):
        step(init_state(toy_params(), sgd(1.0)), toy_batch())


def test_aux_is_summed():
    def loss(params, batch):
        total, count = toy_loss(params, batch)
        return total, count, {"tokens": torch.tensor(batch["x"].shape[0]), "sum": params["head"].sum()}

    for accumulate in (1, 3):
        _, (metrics,) = run(loss, sgd(0.1), toy_params(), [toy_batch()], accumulate=accumulate)
        assert int(metrics["aux"]["tokens"]) == 6 and not metrics["aux"]["sum"].requires_grad
        torch.testing.assert_close(metrics["aux"]["sum"], accumulate * toy_params()["head"].sum().double())


# Nothing to learn from, and nothing that can be learned from.


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_valid_label_gives_zero_and_no_nan(accumulate):
    batch = toy_batch()
    batch["labels"][:] = -100
    grads, metrics = gradients(toy_params(), batch, accumulate=accumulate)
    assert all(not g.any() for g in tree.leaves(grads))
    assert float(metrics["loss"]) == 0 and int(metrics["count"]) == 0 and metrics["finite"]


def plain_zero(params, batch):
    """A loss that looks at its labels first."""
    count = (batch["labels"] != -100).sum()
    return toy_loss(params, batch) if count else (torch.zeros(()), count)


@pytest.mark.parametrize("loss", [toy_loss, plain_zero])
@pytest.mark.parametrize("rows", [0, 2])
def test_a_part_without_a_token_adds_nothing(loss, rows):
    empty = {name: tensor[:rows] for name, tensor in toy_batch().items()}
    empty["labels"] = torch.full_like(empty["labels"], -100)
    whole, (clipped,) = run(toy_loss, sgd(1.0), toy_params(), [toy_batch()], clip=0.3)
    for parts in ([toy_batch(), empty], [empty, toy_batch()]):
        state, (metrics,) = run(loss, sgd(1.0), toy_params(), [parts], clip=0.3)
        assert_close(state.params, whole.params)
        assert_close(metrics, clipped)
    state, (metrics,) = run(loss, sgd(1.0), toy_params(), [[empty, empty]])
    assert same_bits(state.params, toy_params()) and metrics["finite"] and float(metrics["loss"]) == 0


def test_a_count_of_weights_may_be_below_one():
    def light(params, batch):
        total, count = toy_loss(params, batch)
        return total / 64, count / 64

    whole, expected = gradients(toy_params(), toy_batch())
    for accumulate in (1, 3):
        state, (metrics,) = run(light, sgd(1.0), toy_params(), [toy_batch()], accumulate=accumulate)
        assert_close(tree.map(torch.sub, toy_params(), state.params), whole)
        torch.testing.assert_close(metrics["loss"], expected["loss"])
        assert float(metrics["count"]) < 1


def test_a_batch_may_be_any_mapping():
    whole, expected = gradients(toy_params(), toy_batch(), accumulate=2)
    for mapping in (collections.UserDict, types.MappingProxyType):
        found, metrics = gradients(toy_params(), mapping(toy_batch()), accumulate=2)
        assert same_bits(found, whole) and same_bits(metrics, expected)
        found, _ = gradients(toy_params(), [mapping(toy_batch())])
        assert_close(found, whole)


class Explode(torch.autograd.Function):
    """Finite forward, infinite gradient."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.inf


def bad_loss(params, batch):
    total, count = toy_loss(
        params | {"head": Explode.apply(params["head"])} if (batch["bad"] == 1).any() else params, batch
    )
    total = total * torch.nan if (batch["bad"] == 2).any() else total
    return (total + torch.inf if (batch["bad"] == 3).any() else total), count


def without_apply(optimizer):
    return replace(optimizer, bind=None)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("bad", [1, 2, 3], ids=["gradient", "both", "loss"])
@pytest.mark.parametrize(
    "optimizer",
    [adamw(1e-2), sgd(1e-2), sgd(1e-2, momentum=0.9), without_apply(adamw(1e-2))],
    ids=["adamw", "sgd", "momentum", "update only"],
)
def test_a_step_that_is_not_finite_changes_no_bit(optimizer, bad, inplace, accumulate, clip):
    step = make_step(bad_loss, optimizer, inplace=inplace, accumulate=accumulate, clip=clip)
    good = toy_batch() | {"bad": torch.zeros(6)}
    poison = toy_batch() | {"bad": torch.tensor([0, 0, 0, bad, 0, 0])}
    state, metrics = step(init_state(toy_params(), optimizer), good)
    assert metrics["finite"]
    before = copy.deepcopy((state.params, state.opt_state))
    state, metrics = step(state, poison)
    assert not metrics["finite"] and same_bits((state.params, state.opt_state), before)
    assert int(state.step) == 2  # the batch is behind us
    state, metrics = step(state, good)
    assert metrics["finite"] and not same_bits(state.params, before[0])
    assert int(state.opt_state["step"]) == 2


# The State.


def test_init_state_copies():
    params = toy_params()
    before = copy.deepcopy(params)
    run(toy_loss, adamw(1e-1), params, [toy_batch()] * 2)
    assert same_bits(params, before)
    assert all(p.grad is None and not p.requires_grad for p in tree.leaves(params))


def test_a_tie_of_two_paths_is_refused_before_it_comes_apart():
    tied = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"embed and head\.w are one tensor: keep it at one path"):
        init_state({"embed": tied, "norm": torch.ones(2), "head": {"w": tied}}, adamw(1e-1))


@pytest.mark.parametrize("optimizer", [adamw(1e-1), without_apply(adamw(1e-1))], ids=["in place", "update only"])
def test_a_state_that_was_used_up_says_so(optimizer):
    step, state = make_step(toy_loss, optimizer), init_state(toy_params(), optimizer)
    after, _ = step(state, toy_batch())
    for use in (lambda: step(state, toy_batch()), lambda: state.params, lambda: tree.leaves(state)):
        with pytest.raises(RuntimeError, match="used up by a step with inplace=True"):
            use()
    step(after, toy_batch())
    with pytest.raises(AttributeError, match="no 'parameters'"):
        _ = init_state(toy_params(), optimizer).parameters


def test_a_step_that_fails_leaves_the_state_usable():
    step, state = make_step(toy_loss, adamw(1e-1)), init_state(toy_params(), adamw(1e-1))
    with pytest.raises(RuntimeError):
        step(state, toy_batch() | {"x": torch.zeros(6, 4, 3)})
    step(state, toy_batch())


@pytest.mark.parametrize("optimizer", [adamw(1e-1), sgd(1e-1, momentum=0.9)], ids=["adamw", "sgd"])
def test_in_place_writes_the_same_storage_and_pure_writes_none(optimizer):
    state = init_state(toy_params(), optimizer)
    before = copy.deepcopy(state)
    pure, _ = make_step(toy_loss, optimizer, inplace=False)(state, toy_batch())
    assert same_bits(state, before)
    where = [t.data_ptr() for t in tree.leaves(state)]
    assert not {t.data_ptr() for t in tree.leaves(pure)} & set(where)
    inplace, _ = make_step(toy_loss, optimizer)(state, toy_batch())
    assert [t.data_ptr() for t in tree.leaves(inplace)] == where
    assert same_bits(inplace, pure)


def test_a_state_is_a_pytree():
    state = init_state(toy_params(), adamw(1e-1))
    assert isinstance(tree.map(torch.clone, state), State)
    assert {"step", "params.head", "opt_state.exp_avg.head"} <= set(tree.flatten(state))
    assert len(torch.utils._pytree.tree_leaves(state)) == len(tree.leaves(state))


def test_frozen_and_integer_leaves_stay_and_have_no_state():
    params = toy_params() | {"table": torch.arange(3), "scale": torch.ones(1)}
    spec = tree.map(lambda p: fnmodels.Leaf(tuple(p.shape), p.dtype, ("d",) * p.ndim, fnmodels.Normal()), params)
    spec["scale"] = fnmodels.Leaf((1,), torch.float32, ("d",), fnmodels.Constant(1.0), trainable=False)
    loss = lambda params, batch: toy_loss({**params, "head": params["head"] * params["scale"]}, batch)  # noqa: E731
    state, _ = run(loss, adamw(1e-1, spec=spec), params, [toy_batch()] * 2)
    assert same_bits([state.params["table"], state.params["scale"]], [params["table"], params["scale"]])
    assert not same_bits(state.params["head"], params["head"])
    assert not [path for path in tree.flatten(state.opt_state) if "table" in path or "scale" in path]


def test_gradients_that_share_storage():
    # The gradients of a sum are one expanded tensor, handed out to both.
    params, batch = {"a": torch.zeros(3), "b": torch.zeros(3)}, {"x": torch.ones(1)}
    loss = lambda params, batch: ((params["a"] + params["b"]).sum(), torch.tensor(4))  # noqa: E731
    state, _ = run(loss, sgd(1.0), params, [batch], clip=100.0)
    expected = {"a": torch.full((3,), -0.25), "b": torch.full((3,), -0.25)}
    assert_close(state.params, expected)


# Remat and compilation.


class Calls:
    """A toy loss that counts how often a block's forward runs."""

    def __init__(self):
        self.made = 0

    def __call__(self, params, batch):
        def block(*args):
            self.made += 1
            return toy_block(*args)

        return toy_loss(params, batch, block)


@pytest.mark.parametrize(
    ("remat", "calls"), [("none", 6), ("full", 12), ("every:1", 12), ("every:2", 9), ("every:4", 7)]
)
def test_remat_recomputes_the_layers_it_names(remat, calls):
    loss = Calls()
    run(loss, sgd(0.1), toy_params(6), [toy_batch()], remat=remat)
    assert loss.made == calls
    run(loss, sgd(0.1), toy_params(6), [toy_batch()], remat=remat)
    assert loss.made == 2 * calls


def test_selective_remat_repeats_no_matmul():
    counts = {}
    for remat in ("none", "full", "selective"):
        with torch.utils.flop_counter.FlopCounterMode(display=False) as flops:
            run(toy_loss, sgd(0.1), toy_params(), [toy_batch()], remat=remat)
        counts[remat] = flops.get_total_flops()
    assert counts["selective"] == counts["none"] < counts["full"]


MODEL = llama.Config(37, 16, 24, 4, 4, 2, layer_kinds=("full", "sliding", "full", "sliding"), sliding_window=5)


def model_params(config=MODEL):
    draw = torch.Generator().manual_seed(0)
    return tree.map(lambda leaf: torch.randn(leaf.shape, generator=draw) * 0.3, llama.spec(config))


def model_batch(seed=0, packed=True):
    draw = torch.Generator().manual_seed(seed)
    segment_ids = torch.tensor([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2]) if packed else torch.ones(2, 9, dtype=torch.long)
    labels = torch.randint(37, (2, 9), generator=draw)
    return {
        "tokens": torch.randint(37, (2, 9), generator=draw),
        "positions": fnmodels.positions_from_segments(segment_ids),
        "segment_ids": segment_ids,
        "labels": labels.masked_fill(segment_ids == 0, -100),
    }


MODEL_LOSS = functools.partial(next_token_loss, config=MODEL)


@pytest.mark.parametrize("remat", ["full", "every:2", "selective"])
def test_remat_is_bit_equal_on_a_model(remat):
    batches = [model_batch(seed) for seed in range(3)]
    plain, _ = run(MODEL_LOSS, adamw(1e-2), model_params(), batches)
    saved, _ = run(MODEL_LOSS, adamw(1e-2), model_params(), batches, remat=remat)
    assert same_bits(plain, saved)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_against_a_plain_loop(accumulate):
    theirs = tree.map(lambda p: torch.nn.Parameter(p.clone()), model_params())
    optimizer = torch.optim.AdamW(tree.leaves(theirs), lr=1e-2)
    for seed in range(5):
        total, count = next_token_loss(theirs, model_batch(seed), config=MODEL, chunk=None)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    state, _ = run(MODEL_LOSS, adamw(1e-2), model_params(), map(model_batch, range(5)), accumulate=accumulate)
    # Adam divides gradients near 0 by their own size, so that rounding shows.
    assert_close(state.params, tree.map(torch.Tensor.detach, theirs), atol=1e-4)


@pytest.fixture
def counter(monkeypatch):
    """torch.compile with a backend that counts graphs and runs them as they are."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize("remat", ["none", "full", "every:2", "selective"])
def test_the_block_compiles_once_per_kind(counter, remat):
    batches = [model_batch(seed) for seed in range(3)]
    plain, _ = run(MODEL_LOSS, adamw(1e-2), model_params(), batches)
    block, _ = run(MODEL_LOSS, adamw(1e-2), model_params(), batches, compile="block", remat=remat)
    assert 1 <= counter.frame_count <= 2  # dynamo sees that both kinds make the same graph
    assert_close(block.params, plain.params, atol=1e-5)


def test_sixteen_layers_are_one_graph(counter):
    config = llama.Config(37, 16, 24, 16, 4, 2)
    params = tree.map(lambda leaf: torch.randn(leaf.shape) * 0.1, llama.spec(config))
    loss = functools.partial(next_token_loss, config=config)
    run(loss, adamw(1e-2), params, [model_batch(seed, packed=False) for seed in range(3)], compile="block")
    assert counter.frame_count == 1


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_whole_loss_is_one_graph(counter, remat):
    config = dataclasses.replace(MODEL, num_hidden_layers=2, layer_kinds=MODEL.layer_kinds[:2])
    loss, batches = functools.partial(next_token_loss, config=config), [model_batch(seed) for seed in range(3)]
    plain, _ = run(loss, adamw(1e-2), model_params(config), batches)
    whole, _ = run(loss, adamw(1e-2), model_params(config), batches, compile="whole", remat=remat)
    assert counter.frame_count == 1
    assert_close(whole.params, plain.params, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["block", "whole"])
def test_inductor(compile):
    config = llama.Config(37, 16, 24, 1, 4, 2)  # more layers are more C++
    batches = [model_batch(seed, packed=False) for seed in range(3)]
    loss = functools.partial(next_token_loss, config=config)
    plain, _ = run(loss, sgd(1e-2), model_params(config), batches)
    compiled, _ = run(loss, sgd(1e-2), model_params(config), batches, compile=compile)
    assert_close(compiled.params, plain.params, atol=1e-5)


def logits_loss(params, batch):
    """A loss of a user's own, which names no option."""
    given = {name: batch[name] for name in ("positions", "segment_ids")}
    prepared = fnmodels.prepare(MODEL, batch["tokens"], **given)
    logits = fnmodels.forward(params, *prepared, config=MODEL)
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


def cast_loss(params, batch):
    """What a tree.map makes of the params is run as they are."""
    return next_token_loss(tree.map(lambda p: p.to(p.dtype), params), batch, config=MODEL)


FORMS = {
    "partial": MODEL_LOSS,
    "lambda": lambda params, batch: next_token_loss(params, batch, config=MODEL),
    "cast": cast_loss,
    "own": logits_loss,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_loss_gets_layouts_and_wrappers(form, monkeypatch):
    """The layout of packed rows, and remat, reach the layers of losses that name neither."""
    seen, prepared = [], select.materialize
    noted = lambda *args, **more: seen.append(args[2]) or prepared(*args, **more)  # noqa: E731
    monkeypatch.setattr(fnmodels.stack.ready, "materialize", noted)
    batches = [model_batch(), model_batch(packed=False)]
    run(FORMS[form], sgd(0.1), model_params(), batches)
    assert seen[0].rows == fnmodels.inputs.document_layout(batches[0]["positions"], batches[0]["segment_ids"]).rows
    assert not seen[0].plain and seen[-1].plain
    monkeypatch.undo()
    plain, _ = run(FORMS[form], sgd(0.1), model_params(), batches)
    wrapped, _ = run(FORMS[form], sgd(0.1), model_params(), batches, remat="full")
    assert same_bits(wrapped.params, plain.params)
    expected, _ = run(MODEL_LOSS, sgd(0.1), model_params(), batches)
    assert_close(plain.params, expected.params, atol=0.0 if form != "own" else 1e-5)


def test_a_loss_that_copies_its_params_to_a_dict_is_warned_of_the_lost_layout():
    copying = lambda params, batch: next_token_loss({**params}, batch, config=MODEL)  # noqa: E731
    with pytest.warns(UserWarning, match="leaves out the layout of packed rows"):
        run(copying, sgd(0.1), model_params(), [model_batch()])


@pytest.mark.parametrize("begins", [[0, 0, 0], [1, 2, 3], [0, 0, 7, 8]], ids=str)
def test_batches_that_begin_elsewhere_share_a_wrapper(counter, monkeypatch, begins):
    """Blocks are bound to a kind of layer, of which the model has two, and never to a layout."""
    made, real = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **more: made.append(args) or real(*args, **more))
    batches = [model_batch(seed, packed=False) for seed in range(len(begins))]
    for batch, begin in zip(batches, begins, strict=True):
        batch["positions"] = batch["positions"] + begin
    plain, _ = run(MODEL_LOSS, sgd(1e-2), model_params(), batches)
    block, _ = run(MODEL_LOSS, sgd(1e-2), model_params(), batches, compile="block")
    assert len(made) == 2
    assert_close(block.params, plain.params, atol=1e-5)


# Arguments.


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": 2.0}, r"accumulate is 2\.0; it must be a whole number"),
        ({"clip": 0.0}, "clip is 0"),
        ({"clip": float("nan")}, "clip is nan; it must be a number above 0"),
        ({"clip": "1"}, "clip is '1'"),
        ({"balance_rate": -1e-3}, r"balance_rate is -0\.001; it must be a number, at least 0"),
        ({"balance_rate": float("nan")}, "balance_rate is nan"),
        ({"remat": "some"}, "remat is 'some'"),
        ({"remat": "every-0"}, "remat is 'every-0'"),
        ({"remat": "every:\u00b2"}, "remat is 'every:\u00b2'"),
        ({"remat": True}, "remat is True"),
        ({"remat": "every"}, "remat is 'every'"),
        ({"remat": "every:0"}, "remat is 'every:0'"),
        ({"compile": "all"}, "compile is 'all'"),
    ],
)
def test_wrong_options_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        make_step(toy_loss, sgd(1.0), **wrong)


@pytest.mark.parametrize("options", [{"remat": "full"}, {"compile": "block"}])
def test_wrapping_layers_needs_a_loss_that_lets_it(options):
    """Params of another type than the step's carry no options, and a loss of other layers does not read them."""
    step = make_step(lambda params, batch: toy_loss(dict(params), batch), sgd(1.0), **options)
    with pytest.raises(ValueError, match="wrap the model's layers, so the loss must run the model by fnmodels"):
        step(init_state(toy_params(), sgd(1.0)), toy_batch())


@pytest.mark.parametrize("optimizer", [(), (sgd(1.0).init, sgd(1.0).update)])
def test_a_tuple_is_no_optimizer(optimizer):
    for make in (lambda: make_step(toy_loss, optimizer), lambda: init_state(toy_params(), optimizer)):
        with pytest.raises(TypeError, match="is a tuple; it must be a"):
            make()


@pytest.mark.parametrize(
    ("batch", "accumulate", "named"),
    [
        (lambda whole: (part for part in [whole]), 1, "no list must be a dict of tensors; it is a generator"),
        (lambda whole: [whole, None], 1, "Microbatch 1 of the list must be a dict of tensors; it is a NoneType"),
        (lambda whole: whole | {"name": "a"}, 2, "'name' is of type str; entries are tensors"),
        (lambda whole: whole | {"weights": torch.ones(3, 4)}, 2, "differ in them: {'x': 6, 'labels': 6, 'weights': 3}"),
    ],
    ids=["a generator", "a list of others", "a name", "rows"],
)
def test_a_batch_that_is_none_is_named(batch, accumulate, named):
    step = make_step(toy_loss, sgd(1.0), accumulate=accumulate)
    with pytest.raises(ValueError, match=re.escape(named)):
        step(init_state(toy_params(), sgd(1.0)), batch(toy_batch()))


SUM, COUNT = torch.tensor(1.0), torch.tensor(1)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (SUM, "Tensor of shape []"),
        (torch.ones(2), "Tensor of shape [2]"),
        (1.5, "float"),
        ((1.5, COUNT), "float, Tensor of shape []"),
        ((SUM, 4), "Tensor of shape [], int"),
        ((torch.ones(5, 6), COUNT), "Tensor of shape [5, 6], Tensor of shape []"),
        ((SUM, torch.ones(6)), "Tensor of shape [], Tensor of shape [6]"),
        ((SUM, COUNT, {}, {}, {}), "Tensor of shape [], Tensor of shape [], dict, dict, dict"),  # 4 are with outputs
        (None, "NoneType"),
    ],
    ids=str,
)
def test_a_loss_that_returns_something_else_is_named(result, named):
    step = make_step(lambda params, batch: result, sgd(1.0))
    with pytest.raises(ValueError, match=re.escape(f"sum and count 0-d tensors; it returned {named}.")):
        step(init_state(toy_params(), sgd(1.0)), toy_batch())


def test_sums_beside_the_loss_are_tensors():
    step = make_step(lambda params, batch: (*toy_loss(params, batch), {"a": {"kl": 0.5}}), sgd(1.0))
    with pytest.raises(ValueError, match=r"aux must be a tree of tensors.*; a\.kl is a float"):
        step(init_state(toy_params(), sgd(1.0)), toy_batch())


@pytest.mark.parametrize("detached", [True, False], ids=["no graph", "a graph of something else"])
def test_a_loss_without_parameters_is_named(detached):
    other = torch.ones((), requires_grad=not detached)
    step = make_step(lambda params, batch: (other * 2, torch.tensor(1)), sgd(1.0))
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        step(init_state(toy_params(), sgd(1.0)), toy_batch())


def test_leaves_that_no_part_reaches_are_refused_before_they_decay():
    """They are named; one that another part or call reaches is none, and nothing is asked of a batch without tokens."""
    names = ("a", "b", "heads_0")
    params = {name: torch.ones(2) for name in names}

    def loss(params, batch):
        return (params["a"] + params[names[batch["of"]]]).sum() * batch["count"], batch["count"]

    def part(of, count=1):
        return {"of": torch.tensor(names.index(of)), "count": torch.tensor(count)}

    optimizer = adamw(0.1, weight_decay=0.5)
    step, state = make_step(loss, optimizer), init_state(params, optimizer)
    with pytest.raises(ValueError, match=r"does not reach 2 of the trainable parameters: b, heads_0\. Take"):
        step(state, [part("a")] * 2)
    assert same_bits(state.params, params) and int(state.step) == 0
    state, _ = step(state, [part("b"), part("heads_0")])
    step(state, part("a", 0))
    engine = Engine(None, params, optimizer)
    engine.forward_backward([part("b")], loss)
    engine.forward_backward([part("heads_0")], loss)
    assert engine.optim_step()["finite"]
    engine.forward_backward([part("b")], loss)
    with pytest.raises(ValueError, match=r"does not reach 1 of the trainable parameters: heads_0\. Take"):
        engine.optim_step()


def test_nothing_that_trains_is_named():
    optimizer = sgd(1.0, spec=spec_of(toy_params(), lambda p: False))
    with pytest.raises(ValueError, match="No parameter is trainable"):
        make_step(toy_loss, optimizer)(init_state(toy_params(), optimizer), toy_batch())


@pytest.mark.parametrize(
    ("mine", "made", "named"),
    [
        (adamw(1.0), sgd(1.0, momentum=0.9), "exp_avg.head is missing"),
        (sgd(1.0), adamw(1.0), "exp_avg.head is too much"),
        (sgd(1.0, momentum=0.9), sgd(1.0), "momentum.head is missing"),
        (
            adamw(1.0),
            adamw(1.0, spec=spec_of(toy_params(), lambda p: p.shape != (5, 6))),
            "exp_avg.head is missing, one of 2 ",
        ),
    ],
    ids=["adamw", "sgd", "momentum", "frozen"],
)
def test_the_state_of_another_optimizer_is_named_and_stays_usable(mine, made, named):
    step, state = make_step(toy_loss, mine), init_state(toy_params(), made)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"not of this step's optimizer .{named}"):
            step(state, toy_batch())
    make_step(toy_loss, made)(state, toy_batch())


@pytest.mark.parametrize("later", [False, True], ids=["first", "after a step"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.bfloat16(), r"exp_avg.head is bfloat16 \[5, 6\], not float32 \[5, 6\], one of 10 "),
        (lambda t: t[:1] if t.ndim else t, r"exp_avg.head is float32 \[1, 6\], not float32 \[5, 6\], one of 10 "),
    ],
    ids=["dtype", "shape"],
)
def test_moments_of_other_parameters_are_named_before_a_kernel_reads_them(change, named, later):
    step, state = make_step(toy_loss, adamw(1.0)), init_state(toy_params(), adamw(1.0))
    if later:
        state, _ = step(state, toy_batch())
    moments = {name: tree.map(change, values) for name, values in state.opt_state.items() if name != "step"}
    other = State(state.step, state.params, state.opt_state | moments)
    with pytest.raises(ValueError, match=named):
        step(other, toy_batch())
    step(state, toy_batch())
    with pytest.raises(ValueError, match=r"A step takes a State, .* no dict"):
        step(toy_params(), toy_batch())


def test_a_state_that_the_step_returned_is_not_looked_at_again():
    plain, asked = sgd(0.1), []
    optimizer = Optimizer(lambda params: asked.append(1) or plain.init(params), plain.update)
    run(toy_loss, optimizer, toy_params(), [toy_batch()] * 3)
    assert len(asked) == 2  # for the State, and to look at it


def test_an_optimizer_whose_init_reads_values_is_not_asked_for_its_structure():
    plain = sgd(0.1)

    def init(params):
        return plain.init(params) | {"largest": torch.tensor(max(p.abs().max().item() for p in tree.leaves(params)))}

    def update(grads, opt_state, params):
        updates, after = plain.update(grads, opt_state, params)
        return updates, opt_state | after

    state, _ = run(toy_loss, Optimizer(init, update), toy_params(), [toy_batch()] * 2)
    assert int(state.opt_state["step"]) == 2

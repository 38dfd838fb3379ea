"""make_step(compile="step") on CUDA replays one CUDA graph; without a device a recorder is the graph.

Operations run one by one, as in `test_step_graph.py`, so that steps of graphs have the bits of compiled ones.
"""

import functools
import gc

import pytest
import torch

import train
from fnmodels import llama, tree
from tests.support.cases import generic_params
from tests.support.recorded import Recorded, graphs_on_the_cpu
from tests.support.small_steps import BATCHES, assert_close, llama_of, loss, model_batch, params, run, same_bits
from tests.train.test_step_graph import IN_BF16, OPTIMIZERS, rate
from train.checkpoint import saved_steps
from train.state import init_state
from train.step import captured, graph, make_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
SEVEN = [tree.map(lambda t: t.to(DEVICE), batch) for batch in (*BATCHES, *BATCHES, BATCHES[0])]


@pytest.fixture
def replays(graphs, monkeypatch):
    """The graphs that were replayed. Graphs are CUDA's, or on a CPU what stands in for them."""
    replayed = []
    if DEVICE == "cpu":
        graphs_on_the_cpu(monkeypatch)
        for module in (graph, captured):
            monkeypatch.setattr(module, "is_on_cuda", lambda tensor: True)
    real = captured._Capture.replay

    def noted(self):
        replayed.append(self.graph)
        return real(self)

    monkeypatch.setattr(captured._Capture, "replay", noted)
    return replayed


def initial(optimizer, dtype=torch.float32, start=None):
    start = params(dtype) if start is None else start
    return init_state(tree.map(lambda t: t.to(DEVICE), start), optimizer)


def eager(optimizer, batches=SEVEN, start=None):
    return run(make_step(loss, optimizer), initial(optimizer, start=start), batches)


def without_graphs(step, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "is_on_cuda", lambda tensor: False)
        return run(step, *args)


def kept(step):
    return [each for captures in step.one._captures.values() for each in captures._kept]


def equal(found, wanted):
    """Whether all States and metrics of two runs have the same bits."""
    one, other = tree.leaves(found), tree.leaves(wanted)
    return len(one) == len(other) and all(map(torch.equal, one, other))


def check_steps(replays, optimizer, dtype=torch.float32, atol=1e-5, **options):
    """Seven steps, of which five are replays, while the rate and the step's number change."""
    step = make_step(loss, optimizer, compile="step", clip=1.0, **options)
    found = run(step, initial(optimizer, dtype), SEVEN)
    assert len(replays) == 5 and len(set(replays)) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "WARM_UPS", captured.WARM_UPS + len(SEVEN))  # calls of the compiled code alone
        bits = run(step, initial(optimizer, dtype), SEVEN)
    assert len(replays) == 5
    assert equal(found, bits)
    assert_close(found, run(make_step(loss, optimizer, clip=1.0, **options), initial(optimizer, dtype), SEVEN), atol)


@pytest.mark.parametrize("name", ["adamw", "muon", "ema", "small", "rounded"])
def test_steps_of_a_graph_are_compiled_steps(replays, name):
    dtype = torch.bfloat16 if name in IN_BF16 else torch.float32
    check_steps(replays, OPTIMIZERS[name](), dtype, atol=0.05 if name in IN_BF16 else 1e-4)


def test_steps_of_microbatches(replays):
    check_steps(replays, train.adamw(rate, eps=1e-3), accumulate=3)


MOMENTUM = train.sgd(lambda step: 0.1 * rate(step), momentum=0.9)


def stale_batch(held, given):
    """The batch is not copied in."""


def aliased(self):
    self.graph.replay()
    return self.outputs


def frozen(run, stream, pool=None, real=captured.capture):
    """The step's number, which the rate is computed of, is that of the capture."""
    compiled, inputs = (cell.cell_contents for cell in run.__closure__)
    fixed = [t.clone() if t.ndim == 0 else t for t in inputs]
    made, outputs = real(lambda: compiled(*fixed), stream, pool)
    return made, (fixed, outputs)[1]


def unreplayed(self):
    return [value.clone() for value in self.outputs]


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (captured, "fill", stale_batch),
        (captured._Capture, "replay", aliased),
        (captured._Capture, "replay", unreplayed),
        (captured, "capture", frozen),
    ],
)
def test_planted_bugs_are_found(replays, monkeypatch, place, name, fault):
    monkeypatch.setattr(place, name, fault)
    optimizer = MOMENTUM
    step = make_step(loss, optimizer, compile="step")
    found = run(step, initial(optimizer), SEVEN)
    assert len(kept(step)) == 1
    with pytest.raises(AssertionError):
        assert_close(found, eager(optimizer))


def test_a_state_of_a_checkpoint_is_used(replays, tmp_path):
    """And one whose entry the caller replaces, and one that moves to other memory."""
    step, state = make_step(loss, MOMENTUM, compile="step"), initial(MOMENTUM)
    for number in range(7):
        if number == 4:
            saved_steps.save(tmp_path, 4, state)
        state, _ = step(state, SEVEN[number])
    loaded = saved_steps.load(saved_steps.latest(tmp_path), initial(MOMENTUM))
    again, _ = run(step, loaded, SEVEN[4:])
    assert_close((state, again), [eager(MOMENTUM)[0]] * 2)
    assert equal(state, again) and len(kept(step)) == 2
    for change in (lambda p: p.update(b=torch.ones(5, device=DEVICE)), lambda p: setattr(p["w"], "data", p["w"] * 2)):
        change(again.params["one"])
        other = tree.map(torch.clone, again)
        again, metrics = step(again, SEVEN[0])
        assert_close((again, metrics), make_step(loss, MOMENTUM)(other, SEVEN[0]))


def members():
    """Two States that take turns in one step, and a third in another step of the same functions."""
    step, own = (make_step(loss, MOMENTUM, compile="step") for _ in range(2))
    starts = [tree.map(lambda t, k=k: t * k, params()) for k in (1, 2, 3)]
    states, metrics = [initial(MOMENTUM, start=start) for start in starts], [[], [], []]
    for number in range(7):
        for k in range(3):
            states[k], found = (own if k == 2 else step)(states[k], SEVEN[number - k])
            metrics[k].append(found)
    for k in range(3):
        batches = [SEVEN[number - k] for number in range(7)]
        assert_close((states[k], metrics[k]), eager(MOMENTUM, batches, starts[k]))
    return step


def test_members_of_an_ensemble_share_nothing(replays):
    assert len(kept(members())) == 2


def test_a_graph_of_another_state_is_found(replays, monkeypatch):
    """Planted bug: the first State's graph is that of all."""
    monkeypatch.setattr(captured._Capture, "is_of", lambda self, compiled, inputs, places: self.compiled is compiled)
    with pytest.raises(AssertionError):
        members()


def test_many_steps_are_replays(replays):
    optimizer = MOMENTUM
    step = make_step(loss, optimizer, compile="step")
    after, singles = run(step, initial(optimizer), SEVEN)
    for batches in (SEVEN, tree.stack(SEVEN)):
        replays.clear()
        state, metrics = step.many(initial(optimizer), batches)
        assert same_bits(state, after) and same_bits(metrics, tree.stack(singles)) and len(replays) == 7


def test_each_size_of_a_batch_has_a_graph_and_few_are_kept(replays, monkeypatch):
    monkeypatch.setattr(captured, "KEPT", 2)
    step, sizes = make_step(loss, MOMENTUM, compile="step"), (12, 5, 12, 5, 12, 5, 7, 7, 7, 12, 5, 7, 7)
    batches = [tree.map(lambda t, n=n: t[:n], batch) for n, batch in zip(sizes, [*SEVEN, *SEVEN], strict=False)]
    assert_close(run(step, initial(MOMENTUM), batches), eager(MOMENTUM, batches))
    assert len(kept(step)) == 2 and len(replays) == 7 and len(set(replays)) == 6


def test_batches_in_other_strides_are_copied_in(replays):
    step = make_step(loss, MOMENTUM, compile="step")
    turned = [{name: t.mT.contiguous().mT for name, t in batch.items()} for batch in SEVEN]
    turned[3]["x"] = turned[3]["x"][:1].expand(12, 4)
    assert_close(run(step, initial(MOMENTUM), turned), eager(MOMENTUM, turned))
    assert len(kept(step)) == 1


def test_graphs_go_with_their_state_and_with_their_step(replays):
    step = make_step(loss, MOMENTUM, compile="step")
    (one, _), (other, _) = (run(step, initial(MOMENTUM), SEVEN) for _ in range(2))
    (captures,) = step.one._captures.values()
    held = captures._kept
    assert len(held) == 2
    for each in held if DEVICE == "cpu" else ():  # a recorder keeps the tensors of its calls, which a graph does not
        each.graph.calls.clear()
        each.graph.before.clear()
    del one
    gc.collect()
    assert len(held) == 1
    del step
    gc.collect()
    assert not held and int(other.step) == 7


FACTOR = 1.0


def test_a_global_that_a_loss_reads_is_not_frozen(replays, monkeypatch):
    def scaled(params, batch):
        total, count = loss(params, batch)
        return FACTOR * total, count

    optimizer = train.sgd(0.0)
    step = make_step(scaled, optimizer, compile="step")
    state, metrics = run(step, initial(optimizer), SEVEN[:1] * 4)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    _, after = run(step, state, SEVEN[:1] * 4)
    assert len(replays) == 4
    assert_close([each["loss"] for each in after], [3 * each["loss"] for each in metrics])


def test_a_rate_that_the_caller_writes_is_read(replays):
    lr = torch.tensor(0.1, device=DEVICE)
    optimizer = train.adamw(lr)
    step, other = (make_step(loss, optimizer, compile=how) for how in ("step", "none"))
    found, wanted = (run(each, initial(optimizer), SEVEN[:4])[0] for each in (step, other))
    lr.mul_(0.5)
    found, wanted = (run(each, state, SEVEN[4:]) for each, state in ((step, found), (other, wanted)))
    assert_close(found, wanted)
    assert found[1][-1]["lr"] == 0.05


def test_tensors_on_the_host_are_refused(replays, monkeypatch):
    """A rate, whose value the graph would keep, and a counter in the optimizer's state."""
    lr = torch.tensor(0.1)
    on_host = []
    monkeypatch.setattr(captured, "is_on_cuda", lambda tensor: tensor.is_cuda or not any(tensor is t for t in on_host))
    optimizer = train.adamw(lr)
    state = initial(optimizer)
    on_host.append(lr if DEVICE == "cpu" else None)
    with pytest.raises(ValueError, match=r"and a tensor \[\] that they read is not on the device \(one of 1 such"):
        make_step(loss, optimizer, compile="step")(state, SEVEN[0])
    assert int(state.step) == 0
    if DEVICE == "cpu":
        optimizer = train.adamw(0.1)
        state = initial(optimizer)
        on_host.append(state.opt_state["step"])
        with pytest.raises(ValueError, match=r"and opt_state\.step is not on the device"):
            make_step(loss, optimizer, compile="step")(state, SEVEN[0])


def test_a_step_that_cannot_be_captured_is_named(replays, monkeypatch):
    """By an operator that waits for the device, as one of the caller's own can; the State is not used up."""

    @torch.library.custom_op("captured_steps::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        if capturing or (DEVICE == "cuda" and float(x) < 0):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return x.clone()

    waits.register_fake(torch.empty_like)
    waits.register_autograd(lambda ctx, grad: grad)
    capturing, real = [], Recorded.__enter__
    if DEVICE == "cpu":
        monkeypatch.setattr(Recorded, "__enter__", lambda self: (capturing.append(1), real(self))[1])
    optimizer = train.adamw(0.1)
    step = make_step(lambda p, b: (waits(loss(p, b)[0]), loss(p, b)[1]), optimizer, compile="step")
    state, _ = run(step, initial(optimizer), SEVEN[:2])
    before = tree.map(torch.clone, state)
    with pytest.raises(ValueError, match=r"torch cannot capture it: .*not permitted when stream is capturing\. What"):
        step(state, SEVEN[2])
    assert same_bits(state, before) and not replays


def test_a_state_that_is_not_donated_has_no_graph(replays):
    optimizer = MOMENTUM
    step = make_step(loss, optimizer, compile="step", inplace=False)
    assert_close(run(step, initial(optimizer), SEVEN), eager(optimizer))
    assert not replays and not kept(step)


def test_a_batch_that_raises_in_between_hands_the_state_back(replays):
    optimizer = MOMENTUM
    step = make_step(loss, optimizer, compile="step")
    state, _ = run(step, initial(optimizer), SEVEN[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorded if DEVICE == "cpu" else torch.cuda.CUDAGraph, "replay", failing(2))
        with pytest.raises(RuntimeError, match="out of luck"):
            step.many(state, SEVEN[3:])
    assert int(state.step) == 5
    state, _ = run(step, state, SEVEN[5:])
    assert_close(state, eager(optimizer)[0])


def failing(after):
    """CUDAGraph.replay, which raises in its call of this number."""
    real, taken = (Recorded if DEVICE == "cpu" else torch.cuda.CUDAGraph).replay, []

    def replay(self):
        taken.append(1)
        if len(taken) > after:
            raise RuntimeError("out of luck")
        real(self)

    return replay


@pytest.mark.parametrize("packed", [False, True])
def test_a_model(replays, packed):
    config = llama_of()
    optimizer = train.sgd(rate, momentum=0.9, spec=llama.spec(config))
    of_model = functools.partial(train.next_token_loss, config=config, z_loss=1e-3)
    batches = [tree.map(lambda t: t.to(DEVICE), each) for each in [drawn(config, packed, seed) for seed in range(5)]]
    step, plain = (make_step(of_model, optimizer, compile=how, clip=1.0) for how in ("step", "none"))
    weights = generic_params(config)
    found = run(step, initial(optimizer, start=weights), batches)
    assert_close(found, run(plain, initial(optimizer, start=weights), batches), atol=1e-3)
    assert len(replays) == 3


def drawn(config, packed, seed):
    batch = model_batch(config, packed)
    shift = lambda ids: torch.where(ids >= 0, (ids + seed) % config.vocab_size, ids)  # noqa: E731
    return batch | {name: shift(batch[name]) for name in ("tokens", "labels")}


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_code_as_a_graph(dtype):
    config = llama_of(hidden_size=64, num_hidden_layers=2)
    optimizer = train.adamw(rate, spec=llama.spec(config))
    of_model = functools.partial(train.next_token_loss, config=config)
    weights = tree.map(lambda t: t.to(DEVICE), generic_params(config))
    batches = [tree.map(lambda t: t.to(DEVICE), drawn(config, True, seed)) for seed in range(8)]
    options = {"clip": 1.0, "dtype": dtype}
    step, plain = (make_step(of_model, optimizer, compile="step", **options) for _ in range(2))
    found = run(step, init_state(weights, optimizer), batches)
    bits = without_graphs(plain, init_state(weights, optimizer), batches)
    assert equal(found, bits) and len(kept(step)) == 1
    wanted = run(make_step(of_model, optimizer, **options), init_state(weights, optimizer), batches)
    assert_close(found, wanted, atol=1e-3 if dtype == torch.float32 else 0.05)

"""Lion, Muon, Adafactor and the combinations, against torch.optim or a loop, over 50 steps."""

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fnmodels import llama, tree
from tests.support.cases import batch_of, cases, generic_params, segments
from train import (
    State,
    adafactor,
    adamw,
    apply_updates,
    chain,
    checkpoint,
    init_state,
    lion,
    make_step,
    muon,
    next_token_loss,
    partition,
    sgd,
    with_ema,
)
from train.optim import averaged, clip_norm, masked, with_master, with_stochastic_rounding
from train.optim.muon import orthogonalize

CONFIG = next(case.config for case in cases() if case.name == "llama")


def _params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"wide": (4, 6), "tall": (7, 3), "square": (5, 5)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def _gradient(param: Tensor, step: int) -> Tensor:
    """Of a bowl whose center moves, the same for both sides."""
    return param - torch.sin(torch.arange(param.numel()).reshape(param.shape) + 0.3 * step).to(param.dtype)


def _ours(optimizer, params, steps: int = 50):
    state = optimizer.init(params)
    for step in range(steps):
        grads = tree.map(lambda p, step=step: _gradient(p, step), params)
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
    return params, state


def _theirs(make, params, steps: int = 50):
    params = tree.map(lambda p: p.clone().requires_grad_(), params)
    optimizer = make(tree.leaves(params))
    for step in range(steps):
        for param in tree.leaves(params):
            param.grad = _gradient(param.detach(), step)
        optimizer.step()
    return tree.map(Tensor.detach, params)


def _assert_close(ours, theirs, **tolerance) -> None:
    for path, value in tree.flatten(ours).items():
        torch.testing.assert_close(value, tree.flatten(theirs)[path], **tolerance)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adafactor_is_torchs(weight_decay: float) -> None:
    params = _params() | {"bias": torch.linspace(-1, 1, 5)}
    ours, _ = _ours(adafactor(0.05, weight_decay=weight_decay), params)
    theirs = _theirs(lambda ps: torch.optim.Adafactor(ps, lr=0.05, weight_decay=weight_decay), params)
    _assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "numbers",
    [
        {"lr": 1.0},  # above 1/sqrt(step), which then rules
        {"lr": 0.05, "beta2_decay": -0.5, "eps": (None, 0.5)},
        {"lr": 0.05, "eps": (0.3, 1e-3), "weight_decay": 0.1},
        {"lr": 0.05, "d": 3.0},
    ],
    ids=str,
)
def test_adafactors_numbers_are_torchs(numbers: dict) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"stack": (3, 5, 4), "row": (1, 7), "column": (13, 1), "number": (), "vector": (5,)}
    params = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    ours, _ = _ours(adafactor(**{"clip" if name == "d" else name: x for name, x in numbers.items()}), params)
    _assert_close(ours, _theirs(lambda ps: torch.optim.Adafactor(ps, **numbers), params), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("match_adamw", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_what_is_around_muons_iteration_is_torchs(nesterov: bool, match_adamw: bool, monkeypatch) -> None:
    """With an exact polar factor on both sides nothing is left of bf16's noise, which would hide a wrong momentum."""

    def exact(matrix: Tensor, *_, **__) -> Tensor:
        left, _, right = torch.linalg.svd(matrix.bfloat16().double(), full_matrices=False)
        return left @ right

    start = _params(torch.float64)  # so that what is rounded to bf16 is the same on both sides
    monkeypatch.setattr(sys.modules["train.optim.muon"], "orthogonalize", exact)  # train.muon itself is the function
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", exact)
    ours, _ = _ours(muon(0.02, momentum=0.8, nesterov=nesterov, match_adamw=match_adamw), start)
    adjust = "match_rms_adamw" if match_adamw else "original"
    how = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.8, "nesterov": nesterov, "adjust_lr_fn": adjust}
    _assert_close(ours, _theirs(lambda ps: torch.optim.Muon(ps, **how), start), rtol=0, atol=1e-6)


def test_stacks_of_matrices_are_updated_one_by_one() -> None:
    draw = torch.Generator().manual_seed(0)
    stack = torch.randn(2, 3, 8, 5, generator=draw)
    grad = torch.randn(2, 3, 8, 5, generator=draw) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    for match_adamw in (True, False):
        optimizer = muon(0.02, match_adamw=match_adamw)
        whole, _ = optimizer.update({"w": grad}, optimizer.init({"w": stack}), {"w": stack})
        for i in ((0, 0), (0, 1), (1, 2)):
            one, g = {"w": stack[i]}, {"w": grad[i]}
            alone, _ = optimizer.update(g, optimizer.init(one), one)
            torch.testing.assert_close(whole["w"][i], alone["w"], rtol=0, atol=5e-4)


def test_muons_steps_and_eps_are_used() -> None:
    matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(orthogonalize(matrix, steps=1), orthogonalize(matrix, steps=5))
    torch.testing.assert_close(orthogonalize(matrix, eps=1e6), torch.zeros(6, 6).bfloat16(), rtol=0, atol=0.01)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("match_adamw", [True, False])
def test_muon_is_torchs(nesterov: bool, match_adamw: bool) -> None:
    params = _params()
    ours, _ = _ours(muon(0.02, nesterov=nesterov, match_adamw=match_adamw), params)
    adjust = "match_rms_adamw" if match_adamw else "original"
    theirs = _theirs(
        lambda ps: torch.optim.Muon(ps, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust), params
    )
    # bf16 iterations: each update has 8 bits, and the roundings of 50 of them add up
    _assert_close(ours, theirs, rtol=0, atol=0.02)
    first, reference = (
        _ours(muon(0.02, nesterov=nesterov), params, 1)[0],
        _theirs(lambda ps: torch.optim.Muon(ps, lr=0.02, weight_decay=0.1, nesterov=nesterov), params, 1),
    )
    _assert_close(first, reference, rtol=0, atol=5e-4)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    stack = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(1))
    for form in (stack, stack.mT):
        values = torch.linalg.svdvals(orthogonalize(form).float())
        assert values.min() > 0.5 and values.max() < 1.3
    alone = torch.stack([orthogonalize(m) for m in stack])
    torch.testing.assert_close(orthogonalize(stack), alone, rtol=0, atol=0.02)


def test_muon_names_the_way_out_for_vectors() -> None:
    with pytest.raises(ValueError, match="partition"):
        muon(0.1).init({"norm": torch.ones(3)})


def test_lion_is_its_loop() -> None:
    params = _params()
    ours, _ = _ours(lion(0.01, betas=(0.8, 0.95), weight_decay=0.1), params)
    theirs, moments = dict(params), {name: torch.zeros_like(p) for name, p in params.items()}
    for step in range(50):
        for name, param in theirs.items():
            grad = _gradient(param, step)
            sign = torch.sign(0.8 * moments[name] + 0.2 * grad)
            theirs[name] = param - 0.01 * (sign + 0.1 * param)
            moments[name] = 0.95 * moments[name] + 0.05 * grad
    _assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


EACH = {
    "adamw": adamw(0.01),
    "momentum": sgd(0.01, momentum=0.9),
    "lion": lion(0.01),
    "adafactor": adafactor(0.01),
    "muon": muon(0.01),
    "partition": partition({"t*": muon(0.01), "*": adamw(0.01)}),
    "ema": with_ema(adamw(0.01), 0.9),
    "master": with_master(adamw(0.01)),
    "stochastic": with_stochastic_rounding(adamw(0.01)),
    "chain": chain(masked(clip_norm(0.1), "wide"), adamw(0.01)),
}


def _once(optimizer, grads, state, params, *, inplace: bool):
    if not inplace:
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state
    params, state = tree.map(torch.clone, params), tree.map(torch.clone, state)
    optimizer.apply_(grads, state, params)
    return params, state


@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "in place"])
@pytest.mark.parametrize("name", EACH)
def test_a_leaf_without_a_gradient_keeps_its_state(name: str, inplace: bool) -> None:
    """As in torch: a branch that was not used in a step is taught again in the next one."""
    optimizer, params = EACH[name], _params(torch.bfloat16)
    grads = tree.map(lambda p: _gradient(p, 0), params)
    before, state = _once(optimizer, grads, optimizer.init(params), params, inplace=inplace)
    after, passed = _once(optimizer, grads | {"tall": None}, state, before, inplace=inplace)
    assert tree.flatten(passed).keys() == tree.flatten(state).keys()
    for path, leaf in tree.flatten((before, state)).items():
        if path.endswith("tall") and "ema" not in path:  # the average goes on towards the weights
            assert torch.equal(tree.flatten((after, passed))[path], leaf), path
    assert not torch.equal(after["wide"], before["wide"])
    last, _ = _once(optimizer, grads, passed, after, inplace=inplace)
    assert not torch.equal(last["tall"], after["tall"])


@pytest.mark.parametrize("name", ["adamw", "sgd", "momentum", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("wrap", [lambda o: o, with_master, with_stochastic_rounding, lambda o: with_ema(o, 0.9)])
def test_a_frozen_leaf_has_no_state_and_its_gradient_teaches_nothing(name: str, wrap) -> None:
    """torch.func.grad makes one for every leaf."""
    spec = {n: SimpleNamespace(decay=True, trainable=n != "tall") for n in _params()}
    make = {"adamw": adamw, "sgd": sgd, "momentum": partial(sgd, momentum=0.9), "lion": lion, "muon": muon}
    optimizer = wrap(make.get(name, adafactor)(0.01, spec=spec))
    params = _params(torch.bfloat16)
    grads, state = tree.map(torch.ones_like, params), optimizer.init(params)
    assert not [path for path in tree.flatten(state) if path.endswith("tall")]
    for inplace in (False, True):
        after, _ = _once(optimizer, grads, state, params, inplace=inplace)
        assert torch.equal(after["tall"], params["tall"]) and not torch.equal(after["wide"], params["wide"])


@pytest.mark.parametrize("name", EACH)
def test_leaves_without_numbers_go_along(name: str) -> None:
    """As a process has them where a mesh divides few rows between many."""
    params = _params() | {"none": torch.ones(0, 3), "t_none": torch.ones(2, 3, 0)}
    alone = _once(EACH[name], tree.map(torch.ones_like, _params()), EACH[name].init(_params()), _params(), inplace=True)
    for inplace in (False, True):
        optimizer = EACH[name]
        after, state = _once(
            optimizer, tree.map(torch.ones_like, params), optimizer.init(params), params, inplace=inplace
        )
        assert all(leaf.isfinite().all() for leaf in tree.leaves((after, state)))
        _assert_close({n: after[n] for n in _params()}, alone[0])


@pytest.mark.parametrize("name", EACH)
def test_a_saved_state_goes_on_bit_by_bit(name: str, tmp_path) -> None:
    optimizer, held = EACH[name], {}

    def on(params, state, steps):
        for step in steps:
            grads = tree.map(lambda p, step=step: _gradient(p, step), params)
            params, state = _once(optimizer, grads, state, params, inplace=True)
        return params, state

    start = init_state(_params(torch.bfloat16), optimizer)
    held = on(start.params, start.opt_state, range(5))
    middle = on(start.params, start.opt_state, range(3))
    checkpoint.save(tmp_path, 3, State(torch.tensor(3), *middle))
    found = checkpoint.load(checkpoint.latest(tmp_path), like=start)
    again = on(found.params, found.opt_state, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(held), tree.leaves(again), strict=True))


def test_what_is_fp32_needs_no_master() -> None:
    params = {"small": torch.ones(3, dtype=torch.bfloat16), "norm": torch.ones(3), "table": torch.arange(3)}
    optimizer = with_master(adamw(0.01))
    state = optimizer.init(params)
    assert list(tree.flatten(state["master"])) == ["small"]
    assert {leaf.dtype for path, leaf in tree.flatten(state).items() if "step" not in path} == {torch.float32}
    grads = {"small": torch.ones(3), "norm": torch.ones(3), "table": None}
    for inplace in (False, True):
        after, _ = _once(optimizer, grads, state, params, inplace=inplace)
        torch.testing.assert_close(after["norm"], torch.full((3,), 0.99 - 1e-4), rtol=1e-6, atol=0)
        torch.testing.assert_close(after["small"].float(), after["norm"], rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: muon(0.02, momentum=1.0), "momentum is 1.0; it must be a number, at least 0 and below 1"),
        (lambda: muon(0.02, steps=0), "steps is 0; it must be a whole number, at least 1"),
        (lambda: muon(0.02, steps=2.5), "steps is 2.5; it must be a whole number, at least 1"),
        (lambda: muon(-0.02), "lr is -0.02; it must be a number, at least 0"),
        (lambda: lion(0.02, betas=(0.9, 1.0)), "betas are .*, at least 0 and below 1"),
        (lambda: adafactor(clip=0.0), "clip is 0.0; it must be above 0"),
        (lambda: adafactor(beta2_decay=0.8), "beta2_decay is 0.8; it must be at most 0"),
        (lambda: adafactor(eps=(-1.0, 1e-3)), r"eps\[0\] is -1.0; it must be a number, at least 0"),
        (lambda: adafactor(eps=(None, -1.0)), r"eps\[1\] is -1.0; it must be a number, at least 0"),
        (lambda: with_ema(sgd(0.1), 1.0), "decay is 1.0; it must be a number, at least 0 and below 1"),
        (lambda: with_ema(sgd(0.1), "0.9"), "decay is '0.9'; it must be a number, at least 0 and below 1"),
    ],
)
def test_wrong_numbers_are_named(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_partition_is_each_optimizer_on_its_own_leaves() -> None:
    params = _params()
    ours, state = _ours(partition({"t*": sgd(0.1, momentum=0.9), "square": None, "*": adamw(0.01)}), params)
    _assert_close(ours["tall"], _ours(sgd(0.1, momentum=0.9), {"tall": params["tall"]})[0]["tall"])
    _assert_close(ours["wide"], _ours(adamw(0.01), {"wide": params["wide"]})[0]["wide"])
    assert torch.equal(ours["square"], params["square"])
    assert "square" not in str(tree.flatten(state).keys())


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"wide": sgd(0.1)}, "No pattern .* matches (tall|square)"),
        ({"*": sgd(0.1), "wide": sgd(0.1)}, "'wide' gets no leaf"),
        ({"*": None}, "at least one"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(groups, words) -> None:
    with pytest.raises(ValueError, match=words):
        partition(groups).init(_params())


def test_an_average_of_the_weights() -> None:
    params = _params(torch.bfloat16)
    optimizer = with_ema(sgd(0.1), 0.9)
    average, state = tree.map(Tensor.float, params), optimizer.init(params)
    for step in range(50):
        grads = tree.map(lambda p, step=step: _gradient(p, step), params)
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
        average = tree.map(lambda a, p: 0.9 * a + 0.1 * p.float(), average, params)
    assert all(e.dtype == torch.float32 for e in tree.leaves(state["ema"]))
    _assert_close(state["ema"], average, rtol=1e-5, atol=1e-5)
    some = with_ema(partition({"tall": None, "*": sgd(0.1)}), 0.9).init(params)["ema"]
    assert some["tall"] == {}
    whole = averaged(params, some)
    assert whole["tall"] is params["tall"] and whole["wide"] is some["wide"]


def test_a_master_copy_keeps_updates_that_bf16_would_lose() -> None:
    params = {"w": torch.ones(64, dtype=torch.bfloat16)}
    grads = {"w": torch.full((64,), 1.0, dtype=torch.bfloat16)}
    found = {}
    for name, optimizer in (("plain", sgd(1e-4)), ("master", with_master(sgd(1e-4)))):
        p, state = dict(params), optimizer.init(params)
        for _ in range(100):
            updates, state = optimizer.update(grads, state, p)
            p = apply_updates(p, updates)
        found[name] = p["w"]
    assert torch.equal(found["plain"], params["w"])
    assert found["master"].dtype == torch.bfloat16
    torch.testing.assert_close(found["master"].float(), torch.full((64,), 0.99), rtol=0, atol=2e-3)


def test_only_bf16_leaves_that_train_have_a_master_copy() -> None:
    """What somebody else moves, as the step moves a router's bias, stays where it was put."""
    params = _params(torch.bfloat16) | {"fp32": torch.ones(3), "frozen": torch.ones(3, dtype=torch.bfloat16)}
    optimizer = with_master(partition({"frozen": None, "*": sgd(0.1)}))
    state = optimizer.init(params)
    assert set(tree.flatten(state["master"])) == {"wide", "tall", "square"}
    params["frozen"].fill_(2.0)
    grads = tree.map(torch.ones_like, params) | {"frozen": None}
    expected = {path: (p.float() - 0.1).to(p.dtype) for path, p in params.items() if path != "frozen"}
    updates, _ = optimizer.update(grads, state, params)
    pure = apply_updates(params, updates)
    optimizer.apply_(grads, state, params)
    for found in (params, pure):
        assert torch.equal(found.pop("frozen"), torch.full((3,), 2.0, dtype=torch.bfloat16))
        assert all(torch.equal(found[path], expected[path]) for path in found)


def test_the_pure_update_of_a_master_copy_gives_the_bits_of_the_one_in_place() -> None:
    # far from the parameter: added to it, the difference would be rounded once before it is rounded to bf16
    masters = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 1e-2 + 1e-3
    params, optimizer = {"w": torch.ones(4096, dtype=torch.bfloat16)}, with_master(sgd(1.0))
    state, grads = optimizer.init(params) | {"master": {"w": masters}}, {"w": torch.zeros_like(params["w"])}
    updates, after = optimizer.update(grads, state, params)
    pure = apply_updates(params, updates)
    optimizer.apply_(grads, state, params)
    assert torch.equal(pure["w"], params["w"]) and torch.equal(after["master"]["w"], state["master"]["w"])


COMBINED = {
    "partition": lambda: partition({"layers.*_proj": sgd(0.05), "*norm*": None, "*": adamw(0.01)}),
    # beside Muon nothing fused: its iterations in bf16 make much of the last bit of a gradient
    "muon": lambda: partition({"layers.*_proj": muon(0.01), "*": adafactor(0.01)}),
    "ema": lambda: with_ema(adamw(0.01, spec=llama.spec(CONFIG)), 0.9),
    "master": lambda: with_master(adamw(0.01, spec=llama.spec(CONFIG))),
    "lion": lambda: lion(0.001, spec=llama.spec(CONFIG)),
    "adafactor": lambda: adafactor(0.01),
}


@pytest.mark.parametrize("name", COMBINED)
def test_the_step_takes_them_in_place_and_pure(name: str) -> None:
    made = batch_of(CONFIG, segments((7, 5), (12,)))
    batch = made.batch()
    optimizer = COMBINED[name]()
    assert optimizer.bind is not None
    # of bf16 a last bit of a sum may decide about a rounding
    dtype, near = (torch.bfloat16, 0.02) if name == "master" else (torch.float32, 1e-5)
    results = []
    for form, inplace in ((optimizer, True), (replace(optimizer, bind=None), False)):
        step = make_step(lambda p, b: next_token_loss(p, b, config=CONFIG), form, inplace=inplace, clip=1.0)
        state = init_state(generic_params(CONFIG, dtype), form)
        storages, losses = {leaf.data_ptr() for leaf in tree.leaves(state)}, []
        for _ in range(4):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0]
        assert ({leaf.data_ptr() for leaf in tree.leaves(state)} == storages) == inplace
        results.append((state.params, state.opt_state))
    _assert_close(results[0], results[1], rtol=1e-4, atol=near)


SKIPPING = COMBINED | {
    "rounding": lambda: with_stochastic_rounding(adamw(0.01)),
    "ema of masters": lambda: with_ema(with_master(partition({"*norm*": None, "*": adamw(0.01)})), 0.9),
    "masters of an ema": lambda: with_master(with_ema(chain(clip_norm(1.0), sgd(0.01, momentum=0.9)), 0.9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.parametrize("pure", [False, True])
def test_a_step_that_is_not_finite_keeps_every_bit(name: str, pure: bool, dtype: torch.dtype) -> None:
    optimizer = replace(SKIPPING[name](), bind=None) if pure else SKIPPING[name]()

    def loss(params, batch):
        total = sum((p * p).sum() for p in tree.leaves(params))
        return total * batch["factor"].sum(), torch.tensor(1)

    def bits(state):
        return [leaf.clone().reshape(-1).view(torch.uint8) for leaf in tree.leaves((state.params, state.opt_state))]

    step = make_step(loss, optimizer)
    state, _ = step(init_state(generic_params(CONFIG, dtype), optimizer), {"factor": torch.ones(1)})
    for leaf in tree.leaves((state.params, state.opt_state)):  # zeros have signs too
        if leaf.ndim and leaf.dtype in (torch.float32, torch.bfloat16):
            leaf.view(-1)[:1] = -0.0
    for ema in tree.leaves([found["ema"] for found in _states(state.opt_state) if "ema" in found]):
        ema.view(-1)[1:2] = -0.0
    before = bits(state)
    state, metrics = step(state, {"factor": torch.full((1,), torch.nan)})
    assert not metrics["finite"] and int(state.step) == 2
    for a, b in zip(before, bits(state), strict=True):
        assert torch.equal(a, b)


def _states(opt_state):
    """The state and those within."""
    return [opt_state, *(_states(opt_state["inner"]) if "inner" in opt_state else [])]


def test_every_group_has_its_rate_in_the_metrics() -> None:
    made = batch_of(CONFIG, segments((7, 5), (12,)))
    batch = made.batch()
    groups = {"layers.*": adamw(lambda n: 0.1 / n), "*norm*": None, "*": sgd(0.5)}
    before = generic_params(CONFIG)
    for wrap in (lambda o: o, with_master, lambda o: with_ema(o, 0.9)):
        optimizer = wrap(partition(groups))
        step, state = make_step(lambda p, b: next_token_loss(p, b, config=CONFIG), optimizer), None
        for made_steps in (1, 2):
            state, metrics = step(state or init_state(before, optimizer), batch)
            assert {n: float(rate) for n, rate in metrics["lr_of"].items()} == pytest.approx(
                {"layers.*": 0.1 / made_steps, "*": 0.5}
            )
            assert float(metrics["lr"]) == pytest.approx(0.1 / made_steps)
    assert all(rate.shape == () for rate in metrics["lr_of"].values())


def test_rates_by_path_are_each_leafs_own_rate() -> None:
    """A rate of its own per group is the update times the ratio of the rates, whatever the optimizer."""
    params = _params()
    plain, _ = _ours(sgd(0.1), params, 1)
    ours, _ = _ours(partition({"t*": sgd(0.02), "*": sgd(0.1)}), params, 1)
    _assert_close({n: ours[n] for n in ("wide", "square")}, {n: plain[n] for n in ("wide", "square")}, rtol=0, atol=0)
    torch.testing.assert_close(ours["tall"] - params["tall"], (plain["tall"] - params["tall"]) / 5)

import copy
from types import SimpleNamespace

import pytest
import torch

from fnmodels import tree
from train.optim.adafactor import adafactor
from train.optim.adamw import adamw, sgd
from train.optim.base import apply_updates, clip_by_global_norm, global_norm, trainable_mask
from train.optim.lion import lion
from train.optim.muon import muon
from train.optim.wrappers import with_ema

STEPS = 50


def toy(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=draw).to(dtype)  # noqa: E731
    return {"embed": make(7, 5), "layers": [{"w": make(5, 5), "b": make(5)}, {"w": make(5, 5), "b": make(5)}]}


def gradients(step, like):
    draw = torch.Generator().manual_seed(100 + step)
    return tree.map(lambda p: torch.randn(p.shape, generator=draw).to(p.dtype), like)


def leaf(decay=True, trainable=True):
    return SimpleNamespace(decay=decay, trainable=trainable)


SPEC = {"embed": leaf(), "layers": [{"w": leaf(), "b": leaf(decay=False)} for _ in range(2)]}

OURS = {
    "adamw": lambda **k: adamw(1e-2, betas=(0.9, 0.95), weight_decay=0.1, **k),
    "sgd": lambda **k: sgd(1e-2, weight_decay=0.1, **k),
    "momentum": lambda **k: sgd(1e-2, momentum=0.9, weight_decay=0.1, **k),
    "nesterov": lambda **k: sgd(1e-2, momentum=0.9, nesterov=True, **k),
}
THEIRS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, weight_decay=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
}


def run_ours(optimizer, params, *, inplace, steps=STEPS):
    params = tree.map(torch.clone, params)
    state = optimizer.init(params)
    for step in range(steps):
        grads = gradients(step, params)
        if inplace:
            optimizer.apply_(grads, state, params)
        else:
            updates, state = optimizer.update(grads, state, params)
            params = apply_updates(params, updates)
    return params, state


def run_theirs(make, params, *, no_decay=(), steps=STEPS):
    params = tree.map(lambda p: torch.nn.Parameter(p.clone()), params)
    flat = tree.flatten(params)
    without = [path for path in flat if path.rpartition(".")[2] in no_decay]
    groups = [{"params": [p for path, p in flat.items() if path not in without]}]
    if without:
        groups.append({"params": [flat[path] for path in without], "weight_decay": 0.0})
    optimizer = make(groups)
    for step in range(steps):
        for p, g in zip(tree.leaves(params), tree.leaves(gradients(step, params)), strict=True):
            p.grad = g
        optimizer.step()
    return tree.map(torch.Tensor.detach, params)


def assert_close(ours, theirs, **tolerance):
    for path, value in tree.flatten(ours).items():
        other = tree.flatten(theirs)[path]
        torch.testing.assert_close(value, other, **tolerance, msg=lambda m, path=path: f"{path}: {m}")


def assert_same_bits(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(ours), tree.leaves(theirs), strict=True))


@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "in place"])
@pytest.mark.parametrize("name", OURS)
def test_50_steps_equal_torch(name, inplace):
    ours, state = run_ours(OURS[name](), toy(), inplace=inplace)
    assert_close(ours, run_theirs(THEIRS[name], toy()), rtol=1e-6, atol=1e-6)
    assert state["step"].dtype == torch.int64 and int(state["step"]) == STEPS


@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "in place"])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_decay_follows_the_spec(name, inplace):
    ours, _ = run_ours(OURS[name](spec=SPEC), toy(), inplace=inplace)
    assert_close(ours, run_theirs(THEIRS[name], toy(), no_decay=("b",)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_fp64_stays_fp64(name):
    pure, _ = run_ours(OURS[name](), toy(torch.float64), inplace=False)
    assert {t.dtype for t in tree.leaves(pure)} == {torch.float64}
    assert_close(pure, run_theirs(THEIRS[name], toy(torch.float64)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OURS)
def test_half_a_word_pure_and_in_place_agree_within_one_rounding(name, dtype):
    """Leaves are longer than a vector of the kernels: of those torch's own SGD writes the rest alone, on the CPU."""
    start = toy(dtype) | {"long": torch.linspace(-1, 1, 100).to(dtype)}
    pure, _ = run_ours(OURS[name](), start, inplace=False, steps=3)
    inplace, state = run_ours(OURS[name](), start, inplace=True, steps=3)
    assert_close(pure, inplace, rtol=2**-7, atol=1e-3)
    assert {leaf.dtype for leaf in tree.leaves(state) if leaf.ndim} <= {dtype}
    wide, _ = run_ours(OURS[name](), tree.map(torch.Tensor.float, start), inplace=False, steps=3)
    assert_close(tree.map(torch.Tensor.float, inplace), wide, rtol=2**-6, atol=5e-3)


@pytest.mark.parametrize("name", OURS)
def test_a_transposed_leaf_is_updated_in_place_as_any_other(name):
    start = toy()
    turned = tree.map(torch.clone, start) | {"embed": start["embed"].t().contiguous().t()}
    assert not turned["embed"].is_contiguous()
    optimizer = OURS[name]()
    state = optimizer.init(turned)
    for step in range(3):
        optimizer.apply_(gradients(step, turned), state, turned)
    assert not turned["embed"].is_contiguous()
    assert_close(turned, run_ours(optimizer, start, inplace=True, steps=3)[0], rtol=0, atol=0)


@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "in place"])
def test_the_rate_is_a_function_of_the_update_counted_from_1(inplace):
    rate = lambda step: 1e-2 / step  # noqa: E731
    optimizer = adamw(rate, weight_decay=0.1)
    ours, state = run_ours(optimizer, toy(), inplace=inplace, steps=5)
    seen = []

    def theirs(groups):
        optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1e-2 / (n + 1))
        optimizer.register_step_post_hook(lambda *_: (seen.append(schedule.get_last_lr()[0]), schedule.step()))
        return optimizer

    assert_close(ours, run_theirs(theirs, toy(), steps=5), rtol=1e-6, atol=1e-6)
    assert seen == pytest.approx([1e-2 / n for n in range(1, 6)])
    assert float(optimizer.traits.lr(state)) == pytest.approx(1e-2 / 6)


def test_update_is_pure():
    params, grads = toy(), gradients(0, toy())
    for make in OURS.values():
        optimizer = make()
        state = optimizer.init(params)
        before = copy.deepcopy((params, grads, state))
        optimizer.update(grads, state, params)
        assert_same_bits((params, grads, state), before)


@pytest.mark.parametrize("name", OURS)
def test_skip_keeps_every_bit(name):
    optimizer = OURS[name]()
    params, state = run_ours(optimizer, toy(), inplace=True, steps=2)
    before = copy.deepcopy((params, state))
    poison = tree.map(lambda p: torch.full_like(p, torch.nan), params)
    optimizer.apply_(poison, state, params, skip=torch.tensor(True))
    assert_same_bits((params, state), before)
    optimizer.apply_(gradients(2, params), state, params, skip=torch.tensor(False))
    expected, _ = run_ours(optimizer, toy(), inplace=True, steps=3)
    assert_close(params, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "in place"])
def test_frozen_leaves_have_no_state_and_do_not_move(name, inplace):
    spec = SPEC | {"embed": leaf(trainable=False)}
    params = toy() | {"table": torch.arange(4)}
    optimizer = OURS[name](spec=spec | {"table": leaf()})
    mask = trainable_mask(params, optimizer.traits.trainable)
    assert [path for path, on in tree.flatten(mask).items() if not on] == ["embed", "table"]
    state = optimizer.init(params)
    grads = tree.map(lambda p, on: torch.ones_like(p) if on else None, params, mask)
    before = copy.deepcopy(params)
    if inplace:
        optimizer.apply_(grads, state, params)
    else:
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
    assert torch.equal(params["embed"], before["embed"]) and torch.equal(params["table"], before["table"])
    assert not torch.equal(params["layers"][0]["w"], before["layers"][0]["w"])
    assert not [path for path in tree.flatten(state) if "embed" in path or "table" in path]


def test_update_under_vmap_equals_a_loop():
    optimizer = OURS["adamw"]()
    params = tree.map(lambda p: torch.stack([p, 2 * p]), toy())
    grads = tree.map(lambda p: torch.stack([p, -p]), gradients(0, toy()))
    states = torch.func.vmap(optimizer.init)(params)
    updates, _ = torch.func.vmap(optimizer.update)(grads, states, params)
    for i in range(2):
        one = tree.map(lambda t, i=i: t[i], params)
        expected, _ = optimizer.update(tree.map(lambda t, i=i: t[i], grads), optimizer.init(one), one)
        assert_close(tree.map(lambda t, i=i: t[i], updates), expected)


def test_clip_equals_torch():
    grads = gradients(0, toy())
    theirs = [torch.nn.Parameter(torch.zeros_like(g)) for g in tree.leaves(grads)]
    for p, g in zip(theirs, tree.leaves(grads), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    clipped, ours = clip_by_global_norm(grads, 0.5)
    torch.testing.assert_close(ours, norm)
    for p, g in zip(theirs, tree.leaves(clipped), strict=True):
        torch.testing.assert_close(g, p.grad)
    small, _ = clip_by_global_norm(grads, 1e6)
    assert_same_bits(small, grads)
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"limit is {limit}; it must be above 0"):
            clip_by_global_norm(grads, limit)


def test_global_norm_of_bf16_is_in_fp32_and_of_nothing_is_0():
    grads = {"a": torch.full((1000,), 0.1, dtype=torch.bfloat16)}
    expected = grads["a"].double().norm()
    assert global_norm(grads).dtype == torch.float32
    torch.testing.assert_close(global_norm(grads).double(), expected, rtol=1e-6, atol=0)
    assert float(global_norm({"a": None})) == 0.0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((adamw, name) for name in ("lr", "eps", "weight_decay")),
        *((sgd, name) for name in ("lr", "momentum", "weight_decay")),
    ],
)
@pytest.mark.parametrize("value", [-1e-3, float("nan"), "0.1"])
def test_wrong_numbers_are_named(make, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be a number, at least 0"):
        make(**{"lr": 1e-3, name: value})


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, 0.99, 0.999), 0.9, ("0.9", 0.99)])
def test_wrong_betas_are_named(betas):
    with pytest.raises(ValueError, match=r"betas are .*two numbers, at least 0 and below 1"):
        adamw(1e-3, betas=betas)


def test_an_update_without_parameters_is_refused():
    optimizer, params = adamw(0.1), toy()
    with pytest.raises(TypeError, match="params is None"):
        optimizer.update(gradients(0, params), optimizer.init(params), None)


def test_updates_of_other_leaves_or_shapes_are_refused():
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    assert torch.equal(apply_updates(params, {"a": torch.ones(3)})["a"], torch.full((3,), 2.0))
    with pytest.raises(ValueError, match=r"an update of 'c', and no such leaf"):
        apply_updates(params, {"c": torch.ones(3)})
    with pytest.raises(ValueError, match=r"The update of 'a' is \[2, 3\], and the parameter is \[3\]"):
        apply_updates(params, {"a": torch.ones(2, 3)})


def test_nesterov_needs_a_momentum():
    with pytest.raises(ValueError, match="momentum"):
        sgd(1e-3, nesterov=True)


def test_zeros_are_right_as_in_torch():
    adamw(0, betas=(0.0, 0.0), eps=0, weight_decay=0)
    sgd(0, momentum=0, weight_decay=0)


def test_a_rate_may_be_a_tensor_whose_value_nobody_reads():
    rates, params, grads = torch.tensor([0.1, 0.2]), toy(), gradients(0, toy())

    def after(rate):
        optimizer = sgd(rate)
        return apply_updates(params, optimizer.update(grads, optimizer.init(params), params)[0])["embed"]

    both = torch.func.vmap(after)(rates)
    torch.testing.assert_close(both[1], params["embed"] - 0.2 * grads["embed"])


HYPER = {
    "adamw": (lambda h: adamw(h[0], betas=(h[1], h[2]), eps=h[3], weight_decay=h[4]), [0.01, 0.9, 0.99, 1e-3, 0.1]),
    "sgd": (lambda h: sgd(h[0], momentum=h[1], nesterov=True, weight_decay=h[2]), [0.01, 0.9, 0.1]),
    "lion": (lambda h: lion(h[0], betas=(h[1], h[2]), weight_decay=h[3]), [0.001, 0.9, 0.99, 0.1]),
    "muon": (lambda h: muon(h[0], momentum=h[1], eps=h[2], weight_decay=h[3]), [0.01, 0.9, 1e-3, 0.1]),
    "adafactor": (
        lambda h: adafactor(h[0], beta2_decay=-h[1], eps=(h[2], h[3]), clip=h[4], weight_decay=h[5]),
        [0.01, 0.8, 1e-6, 1e-3, 0.5, 0.1],
    ),
    "with_ema": (lambda h: with_ema(sgd(h[0]), h[1]), [0.01, 0.9]),
}


@pytest.mark.parametrize("name", HYPER)
def test_hyperparameters_as_tensors_are_those_as_numbers(name):
    """In place, pure, mapped, and with a gradient of each that finite differences confirm where the maths has one."""
    make, values = HYPER[name]
    params = toy(torch.float64)["layers"]
    params = [{"w": layer["w"]} for layer in params] if name == "muon" else params
    hyper = torch.tensor(values, dtype=torch.float64)
    exact = {"rtol": 1e-9, "atol": 1e-9} if name != "muon" else {"rtol": 0.02, "atol": 0.02}  # its iteration is bf16

    def total(h):
        after, state = run_ours(make(h), params, inplace=False, steps=3)
        return sum(leaf.square().sum() for leaf in tree.leaves([after, state.get("ema", [])]))

    for inplace in (False, True):
        wanted = run_ours(make(values), params, inplace=inplace, steps=3)
        found = run_ours(make(hyper), params, inplace=inplace, steps=3)
        for ours, number in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
            torch.testing.assert_close(ours, number, rtol=1e-12, atol=1e-12)
    mapped = torch.func.vmap(total, randomness="same")(torch.stack((hyper, 0.9 * hyper)))
    torch.testing.assert_close(mapped, torch.stack((total(values), total(0.9 * hyper))), **exact)
    if name != "muon":
        small = 1e-6 * hyper
        differences = [total(hyper + e) - total(hyper - e) for e in torch.diag(small)]
        found = torch.func.grad(total)(hyper) * small * 2
        torch.testing.assert_close(found, torch.stack(differences), rtol=1e-5, atol=1e-12)


def test_the_gradient_of_beta2_is_finite_where_a_gradient_is_zero():
    def after(beta2):
        optimizer, params = adamw(0.1, betas=(0.9, beta2)), {"w": torch.ones(2)}
        return optimizer.update({"w": torch.tensor([0.0, 1.0])}, optimizer.init(params), params)[0]["w"].sum()

    assert torch.func.grad(after)(torch.tensor(0.99)).isfinite()


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_a_tensor_of_several_hyperparameters_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name} is a tensor \[2\]; it must be 0-d: torch.func.vmap maps"):
        adamw(**{"lr": 0.1, name: torch.tensor([0.1, 0.2])})
    with pytest.raises(ValueError, match=r"weight_decay is tensor.*must be a number, at least 0"):
        sgd(0.1, weight_decay=torch.tensor(-0.1))

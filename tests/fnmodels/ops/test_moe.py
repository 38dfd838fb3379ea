"""Routers, dispatch and experts, each against a few lines that do it token by token."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from fnmodels import tree
from fnmodels.models.common.spec import moe_leaves
from fnmodels.ops.cpu.dispatch import combine_cpu, dispatch_cpu
from fnmodels.ops.mlp import glu
from fnmodels.ops.moe.choice import choose_experts
from fnmodels.ops.moe.dispatch import combine, dispatch, virtual_padding
from fnmodels.ops.moe.experts import (
    _most_gathered,
    compiled_experts,
    dense_experts,
    few_experts,
    gathered_experts,
    grouped_experts,
    loop_experts,
)
from fnmodels.ops.moe.layer import moe
from fnmodels.ops.moe.router import (
    RouterDtypes,
    choose,
    sigmoid_top_k,
    softmax_top_k,
    sparse_mixer,
    top_k_sigmoid,
    top_k_softmax,
)
from tests.support.cases import generic, off

E, D, F, K = 5, 8, 16, 2
SILU = functools.partial(glu, activation="silu")


def grouped_statically(*given: Any, **how: Any) -> Tensor:
    """As on CUDA, where the number of rows that experts own is not read."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("choice", "experts"):
            patch.setattr(f"fnmodels.ops.moe.{module}.readable", lambda tensor: False)
        return grouped_experts(*given, **how)


PATHS = {"loop": loop_experts, "grouped": grouped_experts, "dense": dense_experts, "static": grouped_statically}


def leaves(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    spec = tree.flatten(moe_leaves(D, E, F, std=0.02, **options))
    return tree.unflatten({p: generic(p, torch.empty(leaf.shape)).to(dtype) for p, leaf in spec.items()})


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ routers


def test_a_softmax_over_all() -> None:
    logits = noise(3, 4, E)
    weights, indices = softmax_top_k(logits, k=K)
    assert weights.dtype == torch.float64 and indices.dtype == torch.int64
    for b in range(3):
        for s in range(4):
            p = logits[b, s].exp() / logits[b, s].exp().sum()
            best = sorted(range(E), key=lambda e, p=p: -float(p[e]))[:K]
            assert indices[b, s].tolist() == best
            assert torch.allclose(weights[b, s], p[best])
            share, _ = softmax_top_k(logits, k=K, renormalize=True, scale=2.5)
            assert torch.allclose(share[b, s], 2.5 * p[best] / p[best].sum())


def test_scores_of_the_chosen_only() -> None:
    logits = noise(6, E)
    best = logits.topk(K).indices
    weights, indices = top_k_softmax(logits, k=K)
    assert torch.equal(indices, best) and torch.allclose(weights, logits.gather(1, best).softmax(-1))
    weights, indices = top_k_sigmoid(logits, k=K)
    assert torch.equal(indices, best) and torch.allclose(weights, 1 / (1 + (-logits.gather(1, best)).exp()))


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_a_sparse_mixer_is_the_loop_over_tokens(jitter: float) -> None:
    logits = noise(7, E)
    weights, indices = sparse_mixer(logits, jitter=jitter)
    for row, found, chosen in zip(logits.tolist(), weights.tolist(), indices.tolist(), strict=True):
        left = dict(enumerate(row))
        for weight, expert in zip(found, chosen, strict=True):
            top = max(left.values())
            assert left[expert] == top
            near = [s for s in left.values() if (top - s) / max(abs(s), top) <= 2 * jitter]
            assert weight == pytest.approx(1 / sum(math.exp(s - top) for s in near), abs=1e-12)
            del left[expert]


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = noise(50, E), torch.tensor([0.0, 3.0, 0.0, -3.0, 0.1], dtype=torch.float64)
    weights, indices = sigmoid_top_k(logits, k=K, bias=bias, renormalize=True, scale=1.5)
    scores = logits.sigmoid()
    assert (indices == 1).any(-1).all() and not (indices == 3).any()
    picked = scores.gather(1, (scores + bias).topk(K).indices)
    assert torch.allclose(weights, 1.5 * picked / (picked.sum(-1, keepdim=True) + 1e-20))
    plain, _ = sigmoid_top_k(logits, k=K)
    assert torch.allclose(plain, scores.topk(K).values)


@pytest.mark.parametrize("best", [1, 2])
def test_experts_of_the_best_groups(best: int) -> None:
    scores = noise(40, 12).sigmoid()
    got = choose(scores, 4, groups=(4, 2), best=best)
    for row, indices in zip(scores.tolist(), got.tolist(), strict=True):
        groups = [sum(sorted(row[3 * g : 3 * g + 3])[-best:]) for g in range(4)]
        kept = sorted(range(4), key=lambda g, groups=groups: -groups[g])[:2]
        allowed = [e for e in range(12) if e // 3 in kept]
        assert indices == sorted(allowed, key=lambda e, row=row: -row[e])[:4]


def test_experts_outside_of_the_groups_may_count() -> None:
    """As in A.X K2: negative biases leave less inside of the best groups than the number outside."""
    logits, bias = noise(40, 12), torch.tensor([-0.9, -0.9, 0.1] * 4, dtype=torch.float64)
    got = choose(logits.sigmoid() + bias, 4, groups=(4, 2), best=2, outside=0.0)
    for row, indices in zip((logits.sigmoid() + bias).tolist(), got.tolist(), strict=True):
        groups = [sum(sorted(row[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        kept = sorted(range(4), key=lambda g, groups=groups: -groups[g])[:2]
        counted = [score if e // 3 in kept else 0.0 for e, score in enumerate(row)]
        assert sorted(counted[e] for e in indices) == sorted(sorted(counted)[-4:])
    assert not got.equal(sigmoid_top_k(logits, k=4, bias=bias, groups=(4, 2))[1])


def test_group_scores_of_softmax_and_sigmoid_routing_differ() -> None:
    logits = torch.tensor([[3.0, -9.0, 1.0, 0.9]], dtype=torch.float64)  # a best expert, and a best pair
    assert softmax_top_k(logits, k=1, groups=(2, 1))[1].tolist() == [[0]]
    assert sigmoid_top_k(logits, k=1, groups=(2, 1))[1].tolist() == [[2]]


ROUTERS: dict[str, Callable[..., Any]] = {
    "softmax": functools.partial(softmax_top_k, k=K, renormalize=True),
    "sigmoid": functools.partial(sigmoid_top_k, k=K, bias=torch.linspace(-1, 1, E), renormalize=True),
    "chosen softmax": functools.partial(top_k_softmax, k=K),
    "chosen sigmoid": functools.partial(top_k_sigmoid, k=K),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_replay_reads_the_live_scores(name: str) -> None:
    """Its own choice gives the same bits and gradients; another choice the weights of those experts."""
    route, logits = ROUTERS[name], noise(7, E)
    weights, indices = route(logits)
    again, same = route(logits, indices)
    assert torch.equal(again, weights) and same is indices
    other = (indices + 1) % E
    assert not torch.allclose(route(logits, other)[0], weights)
    first, second = (grad(lambda x, i=i: route(x, i)[0].square().sum())(logits) for i in (None, indices))
    assert torch.equal(first, second) and first.any()


@pytest.mark.parametrize("name", ROUTERS)
def test_nothing_is_cast_before_the_choice(name: str) -> None:
    """M4: logits one part in 10^4 apart, which bf16 takes for equal; weights are fp32 at least."""
    logits = torch.full((2, E), -2.0)
    logits[0, 4], logits[0, 3] = logits[1, 3], logits[1, 4] = 2.0002, 2.0001
    route = functools.partial(ROUTERS[name], **({"bias": None} if name == "sigmoid" else {}))
    assert route(logits)[1].tolist() == [[4, 3], [3, 4]]
    assert ROUTERS[name](logits.bfloat16())[0].dtype == torch.float32
    assert torch.equal(ROUTERS[name](torch.zeros(1, E))[1], ROUTERS[name](torch.zeros(1, E), None)[1])


# ------------------------------------------------------------------------------------------------ dispatch


@pytest.mark.parametrize("tokens", [1, 2, 7, 12])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("spread", ["random", "one expert", "empty experts"])
@pytest.mark.parametrize("padded", ["none", "some", "all"])
def test_there_and_back(tokens: int, k: int, spread: str, padded: str) -> None:
    """M2: identity experts and weights that add up to 1 give the tokens back; padding, of NaN here, 0."""
    x = noise(tokens, D)
    choice = {"random": torch.randint(E, (tokens, k), generator=torch.Generator().manual_seed(1))}
    choice |= {"one expert": torch.full((tokens, k), 3), "empty experts": 2 * torch.randint(2, (tokens, k))}
    indices = choice[spread]
    valid = torch.ones(tokens, dtype=torch.bool) & (padded == "none")
    if padded == "some":
        valid[::2] = True
    given = torch.where(valid[:, None], x, torch.nan)
    rows, sent = dispatch(given, torch.where(valid[:, None], indices, -7), valid, E)
    kept = int(sent.counts.sum())
    assert kept == int(valid.sum()) * k and rows.shape == (tokens * k, D)
    assert not rows[:kept].isnan().any() and rows[kept:].isnan().all()
    of_row = indices.flatten()[sent.order[:kept]]
    assert (of_row.diff() >= 0).all() and torch.equal(of_row.bincount(minlength=E), sent.counts)
    back = combine(rows, sent, torch.full((tokens, k), 1 / k, dtype=torch.float64))
    assert off(back, torch.where(valid[:, None], x, 0)) < 1e-15
    for multiple in (1, 4):
        packed_rows, packed = dispatch_cpu(given, torch.where(valid[:, None], indices, -7), valid, E, multiple=multiple)
        assert torch.equal(packed.counts, sent.counts + -sent.counts % multiple)
        assert torch.equal(packed_rows[packed.real], rows[:kept]) and len(packed_rows) == int(packed.counts.sum())
        # a copy is a row of its own expert, and what becomes of it is not looked at
        of_row = indices.flatten()[packed.choice]
        assert torch.equal(of_row, torch.arange(E).repeat_interleave(packed.counts))
        weights = torch.full((tokens, k), 1 / k, dtype=torch.float64).where(valid[:, None], torch.nan)
        again = combine_cpu(packed_rows.where(packed.real[:, None], torch.nan), packed, weights)
        assert off(again, torch.where(valid[:, None], x, 0)) < 1e-15


@pytest.mark.parametrize(("tokens", "ranks"), [(8, 4), (7, 4), (1, 4), (5, 4), (9, 4), (0, 3), (10, 3), (3, 1)])
def test_tokens_over_ranks_that_do_not_divide_them(tokens: int, ranks: int) -> None:
    """M2: each rank sends its own tokens, in slots of one size; what comes back is every token, once."""
    pad, ranges = virtual_padding(tokens, ranks)
    slots, rest = divmod(tokens + pad, ranks)
    assert not rest and 0 <= pad < ranks and len(ranges) == ranks
    assert all(0 <= hi - lo <= slots for lo, hi in ranges)
    assert [t for lo, hi in ranges for t in range(lo, hi)] == list(range(tokens))
    x, indices = noise(tokens, D), torch.arange(tokens * K).view(tokens, K) % E
    back, counts = [], torch.zeros(E, dtype=torch.int64)
    for lo, hi in ranges:
        missing = slots - (hi - lo)
        mine = torch.cat((x[lo:hi], torch.full((missing, D), torch.nan, dtype=x.dtype)))
        choice = torch.cat((indices[lo:hi], torch.zeros(missing, K, dtype=torch.int64)))
        rows, sent = dispatch(mine, choice, torch.arange(slots) < hi - lo, E)
        counts += sent.counts
        back.append(combine(rows, sent, torch.full((slots, K), 0.5, dtype=x.dtype))[: hi - lo])
    assert torch.equal(torch.cat(back), x) and int(counts.sum()) == tokens * K


def test_the_first_ranks_are_full() -> None:
    assert virtual_padding(5, 4) == (3, ((0, 2), (2, 4), (4, 5), (5, 5)))


def test_ranks_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="8 tokens over 0 ranks"):
        virtual_padding(8, 0)


# ------------------------------------------------------------------------------------------------ experts


def one_by_one(experts: Any, x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, inputs: bool) -> Tensor:
    """The reference: token by token, choice by choice."""
    out = []
    for t in range(len(x)):
        y = torch.zeros(D, dtype=x.dtype)
        for w, e in zip(weights[t], indices[t].tolist(), strict=True):
            if valid[t]:
                part = {name: leaf[e] for name, leaf in experts.items()}
                given = x[t] * w if inputs else x[t]
                gate, up = (part[f"{n}_proj"] @ given + part.get(f"{n}_bias", 0) for n in ("gate", "up"))
                inner = gate * gate.sigmoid() * up
                y = y + (part["down_proj"] @ inner + part.get("down_bias", 0)) * (1 if inputs else w)
        out.append(y)
    return torch.stack(out)


def problem(dtype: torch.dtype, biases: bool, tokens: int = 9) -> tuple[Any, ...]:
    x, logits = noise(tokens, D).to(dtype), noise(tokens, E, seed=1)
    logits[:, 2] = -9  # an expert without tokens
    weights, indices = softmax_top_k(logits, k=K)
    valid = torch.arange(tokens) % 4 != 1
    return leaves(dtype, biases=biases)["experts"], x, weights.to(dtype), indices, valid


@contextlib.contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_path_is_the_loop_over_tokens(path: str, biases: bool, inputs: bool, dtype: torch.dtype) -> None:
    """M3: values and every gradient; with NaN at padding, and in memory that nobody has written."""
    if path in ("grouped", "static") and dtype == torch.float64:
        return  # it has no such kernel, and says so: below
    experts, x, weights, indices, valid = problem(dtype, biases)
    inputs_of = {"experts": experts, "x": x, "weights": weights}
    grad_output = noise(*x.shape, seed=2).to(dtype)

    def run(given: Any, function: Callable[..., Tensor], poison: bool) -> tuple[Tensor, Any]:
        if poison:
            given = {**given, **{n: torch.where(valid[:, None], given[n], torch.nan) for n in ("x", "weights")}}
        flat = {p: t.detach().clone().requires_grad_() for p, t in tree.flatten(given).items()}
        values = tree.unflatten(flat)
        y = function(values["experts"], values["x"], values["weights"], indices, valid)
        found = torch.autograd.grad((y * grad_output).sum(), list(flat.values()))
        return y.detach(), dict(zip(flat, found, strict=True))

    want, want_grads = run(inputs_of, functools.partial(one_by_one, inputs=inputs), False)
    with unwritten_memory_is_nan():
        got, grads = run(inputs_of, functools.partial(PATHS[path], act=SILU, input_weighted=inputs), True)
    assert not got[~valid].any()
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert off(got, want) < bound
    for name, gradient in grads.items():
        assert off(gradient, want_grads[name]) < bound, name
    assert not grads["experts.down_proj"][2].any()


def test_half_precision_sums_its_choices_in_single() -> None:
    """The paths agree in bf16 to its rounding, and weights in fp32 stay so until the sum."""
    experts, x, weights, indices, valid = problem(torch.bfloat16, False)
    want = one_by_one(*(tree.map(Tensor.double, t) for t in (experts, x, weights)), indices, valid, False)
    for path in PATHS.values():
        for w in (weights, weights.float()):
            got = path(experts, x, w, indices, valid, act=SILU)
            assert got.dtype == torch.bfloat16
            assert float((got.double() - want).abs().max()) < 0.02 * float(want.abs().max())
    # Two experts that are each other's opposite: what is left is the difference of weights that are one in bf16.
    opposed = {name: leaf[[0, 0]] for name, leaf in experts.items()}
    opposed["down_proj"][1].neg_()
    w, both = torch.tensor([[0.5007, 0.4994]]).expand(len(x), 2), torch.tensor([[0, 1]]).expand(len(x), 2)
    want = one_by_one(tree.map(Tensor.double, opposed), x.double(), w.double(), both, valid, False)
    for path in PATHS.values():
        got = path(opposed, x, w, both, valid, act=SILU)
        assert float((got.double() - want).abs().max()) < 0.02 * float(want.abs().max())


@pytest.mark.parametrize("path", ["loop", "grouped"])
@pytest.mark.parametrize("inputs", [False, True])
def test_products_in_half_precision_have_few_shapes(path: str, inputs: bool) -> None:
    """Each expert's rows are filled up to 16 n; values and gradients are those of plain dispatch and double precision.

    Fewer than 16 rows for each expert, as in decoding, stay as they are.
    """
    shapes: list[int] = []
    act = lambda gate, up: shapes.append(gate.shape[0]) or SILU(gate, up)  # noqa: E731

    def run(function: Callable[..., Tensor], dtype: torch.dtype, tokens: int = 67) -> list[Tensor]:
        experts, x, weights, indices, valid = problem(torch.bfloat16, True, tokens)
        given = [x, weights.float(), *experts.values()]
        flat = [t.to(torch.promote_types(dtype, t.dtype)).requires_grad_() for t in given]
        leaves = dict(zip(experts, flat[2:], strict=True))
        y = function(leaves, *flat[:2], indices, valid, act=act, input_weighted=inputs)
        grad_output = noise(*y.shape, seed=2).bfloat16().to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, flat, grad_output)]

    got = run(PATHS[path], torch.bfloat16)
    rows = [size for size in shapes if size]
    assert rows and all(size % 16 == 0 for size in rows)
    want, plain = run(dense_experts, torch.float64), run(grouped_statically, torch.bfloat16)
    for ours, exact, other in zip(got, want, plain, strict=True):
        error, before = ((t.double() - exact).norm() / exact.norm() for t in (ours, other))
        assert error < 0.01 and error < 1.25 * before
    shapes.clear()
    run(PATHS[path], torch.bfloat16, 9)
    assert any(size % 16 for size in shapes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_no_token_and_few(path: str, tokens: int) -> None:
    experts, x, weights, indices, _ = problem(torch.float32, True, tokens)
    nobody = torch.zeros(tokens, dtype=torch.bool)
    y = PATHS[path](experts, x, weights, indices, nobody, act=SILU)
    assert y.shape == (tokens, D) and not y.any()
    everybody = PATHS[path](experts, x, weights, indices, ~nobody, act=SILU)
    assert off(everybody, dense_experts(experts, x, weights, indices, ~nobody, act=SILU)) < 1e-5


@pytest.mark.parametrize("path", ["loop", "grouped"])
def test_second_derivatives_and_forward_mode_name_the_path_that_has_them(path: str) -> None:
    experts, x, weights, indices, valid = problem(torch.float32, True)
    run = functools.partial(PATHS[path], indices=indices, valid=valid, act=SILU)
    with pytest.raises(NotImplementedError, match=f'experts="{path}" does not .*experts="dense" supports all'):
        jvp(lambda x: run(experts, x, weights), (x,), (x,))
    with pytest.raises(NotImplementedError, match=f'experts="{path}" does not .*experts="dense" supports all'):
        jvp(
            lambda down: run({**experts, "down_proj": down}, x, weights),
            (experts["down_proj"],) * 1,
            (experts["down_proj"],),
        )
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(run(experts, leaf, weights).sin().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=f'experts="{path}" does not'):
        torch.autograd.grad(first.sum(), leaf)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("learn", ["x", "weights", "gate_proj", "up_bias", "down_proj"])
def test_one_leaf_learns_alone(path: str, learn: str) -> None:
    """Frozen experts, or all but one leaf, as in adapters and probes; with autograd and with torch.func."""
    experts, x, weights, indices, valid = problem(torch.float32, True)
    flat = {"x": x, "weights": weights, **experts}

    def loss(leaf: Tensor, function: Callable[..., Tensor]) -> Tensor:
        given = {**flat, learn: leaf}
        x, weights = given.pop("x"), given.pop("weights")
        return function(given, x, weights, indices, valid).sin().sum()

    ours, naive = functools.partial(PATHS[path], act=SILU), functools.partial(one_by_one, inputs=False)
    want = grad(loss)(flat[learn], naive)
    assert want.any() and off(grad(loss)(flat[learn], ours), want) < 1e-5
    leaf = flat[learn].clone().requires_grad_()
    assert off(torch.autograd.grad(loss(leaf, ours), leaf)[0], want) < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_an_activation_that_learns(path: str) -> None:
    """Its own tensors get their gradient, or the path says that it has none for them."""
    experts, x, weights, indices, valid = problem(torch.float32, True)

    def loss(grad_output: Tensor, function: Callable[..., Tensor]) -> Tensor:
        act = lambda gate, up: gate.sigmoid() * up * grad_output  # noqa: E731
        return function(experts, x, weights, indices, valid, act=act).sin().sum()

    grad_output = torch.tensor(1.5, requires_grad=True)
    if path == "loop":
        for call in (lambda: loss(grad_output, loop_experts), lambda: grad(loss)(grad_output.detach(), loop_experts)):
            with pytest.raises(ValueError, match='experts="loop" gives no gradient to tensors that `act` takes'):
                call()
        with torch.no_grad():
            assert off(loss(grad_output, loop_experts), loss(grad_output, dense_experts)) < 1e-5
        return
    got, want = (torch.autograd.grad(loss(grad_output, run), grad_output)[0] for run in (PATHS[path], dense_experts))
    assert want and off(got, want) < 1e-5


def test_what_an_unchosen_expert_makes_of_a_token_is_not_seen() -> None:
    """Static shapes compute every expert; one that overflows on tokens of others must not spoil them."""
    experts, x, weights, indices, valid = problem(torch.float32, False)
    huge = {name: leaf.clone() for name, leaf in experts.items()}
    huge["gate_proj"][2], huge["up_proj"][2] = 1e30, 1e30
    flat = [leaf.requires_grad_() for leaf in huge.values()]
    y = dense_experts(huge, x, weights, indices, valid, act=SILU)
    assert y.isfinite().all() and all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), flat))


def test_static_shapes_go_through_every_transform() -> None:
    experts, x, weights, indices, valid = problem(torch.float64, True)

    def f(experts: Any, x: Tensor, weights: Tensor) -> Tensor:
        return dense_experts(experts, x, weights, indices, valid, act=SILU).sin().sum()

    given = (experts, x, weights)
    direction = tree.map(lambda t: generic("direction", torch.empty(t.shape)).double(), given)
    grad_output = jvp(f, given, direction)[1]
    step = 1e-6
    hi, lo = (f(*tree.map(lambda t, d, s=s: t + s * d, given, direction)) for s in (step, -step))
    assert off(grad_output, (hi - lo) / (2 * step)) < 1e-7
    twice = jvp(lambda *a: grad(f, argnums=1)(*a), given, direction)[1]
    assert twice.isfinite().all() and twice.any()
    each = vmap(lambda x, w, i, v: dense_experts(experts, x, w, i, v, act=SILU))(
        x[:, None], weights[:, None], indices[:, None], valid[:, None]
    )
    assert off(each[:, 0], dense_experts(*given, indices, valid, act=SILU)) < 1e-12


FEW = {
    "few": few_experts,
    "gathered": gathered_experts,
    "lowered": torch.compile(compiled_experts, dynamic=False, backend="aot_eager"),
    "compiled": torch.compile(compiled_experts, dynamic=False),
}
# Code is generated for both options at once; for neither, its operations run one by one.
_OPTIONS = [
    *itertools.product(("few", "gathered"), (False, True), (False, True)),
    ("lowered", False, False),
    ("compiled", True, True),
]


@pytest.mark.parametrize(("path", "bias", "weighted"), _OPTIONS)
def test_few_tokens_go_through_the_experts_they_chose(path: str, bias: bool, weighted: bool) -> None:
    """Also where all are padding, whose NaN and whose choice reach nothing."""
    experts, x, weights, indices, valid = problem(torch.float64, bias)
    with torch.no_grad():
        for real in (valid, torch.zeros_like(valid)):
            given = experts, x.masked_fill(~real[:, None], torch.nan), weights, indices.where(real[:, None], E), real
            wanted = dense_experts(experts, x, weights, indices, real, act=SILU, input_weighted=weighted)
            for t in (len(x), 2):
                tokens = (experts, *(value[:t] for value in given[1:]))
                torch.testing.assert_close(FEW[path](*tokens, act=SILU, input_weighted=weighted), wanted[:t])


def test_compiled_code_reads_the_chosen_weights_of_few_tokens() -> None:
    """Without gradients and transforms: then no product of all experts is in the graph."""
    experts, *_ = problem(torch.float32, False)
    products: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        names = [str(node.target) for node in graph.graph.nodes]
        products.append(sum("matmul" in name or "bmm" in name for name in names))
        return graph.forward

    def few(x: Tensor) -> Tensor:
        weights, indices = torch.ones(len(x), 2), torch.tensor([[0, 1]]).expand(len(x), 2)
        valid = torch.ones(len(x), dtype=torch.bool)
        return choose_experts("auto", x, *experts.values())(experts, x, weights, indices, valid, act=SILU)

    def run(tokens: int, function: Callable[[Tensor], Tensor], unknown: bool = False) -> int:
        torch._dynamo.reset()
        x = torch.ones(tokens, D)
        if unknown:
            torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.compile(function, backend=backend, fullgraph=True)(x)
        return products.pop()

    with torch.no_grad():
        assert run(1, few) == run(2 * E, few) == 0
        assert run(1, few, unknown=True) == 3
        assert run(2 * E + 1, few) == 3
        assert run(3, lambda x: vmap(few)(x[:, None])) == 3
    assert run(1, few) == 3


def test_large_experts_are_gathered_for_fewer_tokens() -> None:
    for dtype, most in ((torch.float32, 2), (torch.bfloat16, 1), (torch.float64, 4)):
        assert _most_gathered(torch.empty(8, 4096, 4096, dtype=dtype, device="meta")) == 8 * most
        assert _most_gathered(torch.empty(8, 16, 16, dtype=dtype, device="meta")) == 8 * 4


def test_who_is_chosen_and_who_says_no() -> None:
    experts, x, weights, indices, valid = problem(torch.float32, False)
    assert choose_experts("auto", x, *experts.values()) is grouped_experts
    assert choose_experts("auto", x.double()) is loop_experts
    assert choose_experts("auto", x, experts["gate_proj"][..., :6]) is loop_experts
    assert choose_experts("auto", x.to("meta")) is dense_experts
    assert choose_experts(grouped_experts, x) is grouped_experts
    with torch.no_grad():
        assert choose_experts("auto", x[:1], *experts.values()) is few_experts
        assert choose_experts("auto", x[:2], *experts.values()) is grouped_experts
        many = {name: leaf.repeat(7, 1, 1) for name, leaf in experts.items()}
        assert choose_experts("auto", x[:2], *many.values()) is few_experts
    with pytest.raises(ValueError, match="experts is 'quick'; it must be auto, loop, grouped, dense"):
        choose_experts("quick", x)
    seen = []
    vmap(lambda row: seen.append(choose_experts("auto", row)) or row)(x)
    grad(lambda x: seen.append(choose_experts("auto", x)) or x.sum())(x)
    vmap(lambda leaf: seen.append(choose_experts("auto", x, leaf)) or leaf)(experts["gate_proj"])
    assert seen == [dense_experts, grouped_experts, dense_experts]
    with pytest.raises(NotImplementedError, match='experts="loop" does not support this transform'):
        vmap(lambda leaf: loop_experts({**experts, "gate_proj": leaf}, x, weights, indices, valid, act=SILU))(
            torch.stack((experts["gate_proj"], experts["gate_proj"]))
        )
    with pytest.raises(NotImplementedError, match='experts="dense" has static shapes'):
        vmap(lambda *row: loop_experts(experts, *row, act=SILU))(*(t[:, None] for t in (x, weights, indices, valid)))
    with pytest.raises(NotImplementedError, match='experts="dense" supports all'):
        jvp(lambda x: grouped_experts(experts, x, weights, indices, valid, act=SILU), (x,), (x,))
    torch.compiler.reset()
    compiled = torch.compile(functools.partial(grouped_experts, act=SILU), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'experts="grouped" is compiled in bf16 only.*float32'):
        compiled(experts, x, weights, indices, valid)
    half = problem(torch.bfloat16, False)
    assert off(compiled(*half), grouped_experts(*half, act=SILU)) < 2e-2  # products are rounded, or only sums
    narrow = {name: leaf[..., :6].contiguous() for name, leaf in experts.items()}
    with pytest.raises(ValueError, match="takes fp32 and half precision, not torch"):
        grouped_experts(*problem(torch.float64, False), act=SILU)
    with pytest.raises(ValueError, match="those of gate_proj hold 6 elements of 4 bytes"):
        grouped_experts(narrow, x[:, :6], weights, indices, valid, act=SILU)


# ------------------------------------------------------------------------------------------------ the whole


def test_the_whole_layer() -> None:
    layer = leaves(shared=7, biases=True)
    layer["shared_expert_gate"] = generic("shared_expert_gate", torch.empty(1, D)).double()
    x, valid = noise(2, 6, D), torch.tensor([[False, True, True, True, True, False], [True] * 6])
    route = functools.partial(softmax_top_k, k=K)
    y, aux = moe(layer, x, route, valid=valid, act=SILU)
    logits = x @ layer["router"].T + layer["router_bias"]
    weights, indices = route(logits)
    shared = layer["shared_expert"]
    flat = (x.flatten(0, 1), weights.flatten(0, 1), indices.flatten(0, 1), valid.flatten())
    want = one_by_one(layer["experts"], *flat, False).view(2, 6, D)
    inner = SILU(x @ shared["gate_proj"].T, x @ shared["up_proj"].T)
    want += (x @ layer["shared_expert_gate"].T).sigmoid() * (inner @ shared["down_proj"].T)
    assert off(y[valid], want[valid]) < 1e-12 and y[~valid].isfinite().all()
    assert off(aux["router_logits"][valid], logits[valid]) < 1e-12
    assert torch.equal(aux["expert_indices"][valid], indices[valid])
    assert torch.equal(aux["counts"], indices[valid].flatten().bincount(minlength=E))
    again, _ = moe(layer, x, route, valid=valid, routing=torch.where(valid[..., None], indices, -1), act=SILU)
    assert torch.equal(again, y)
    own = []
    moe(layer, x, route, valid=valid, act=SILU, experts=lambda *a, **o: own.append(o) or loop_experts(*a, **o))
    assert own == [{"act": SILU}]


@pytest.mark.parametrize("wrong", [-1, E, E + 7])
def test_a_replayed_expert_that_there_is_not(wrong: int) -> None:
    layer, x = leaves(), noise(1, 4, D)
    valid, routing = torch.tensor([[True, True, True, False]]), torch.tensor([[[0, 1], [3, 4], [1, 2], [wrong, 99]]])
    run = functools.partial(moe, layer, x, functools.partial(softmax_top_k, k=K), valid=valid, act=SILU)
    assert run(routing=routing)[0].isfinite().all()  # at padding it is not read
    with pytest.raises(ValueError, match="routing names expert 3 twice at a token that is no padding"):
        run(routing=torch.where(routing == 4, 3, routing))
    for form in (routing.int(), routing[:, :3], routing[0], routing[..., None]):
        with pytest.raises(ValueError, match=r"routing must be int64 \[B, S, k\] = \[1, 4\] and k, not torch.int"):
            run(routing=form)
    routing[0, 1, 1] = wrong
    for call in (lambda: run(routing=routing), lambda: grad(lambda x: run(routing=routing)[0].sum())(x)):
        with pytest.raises(
            ValueError, match=f"routing holds {wrong} at a token that is no padding; the experts are 0 to 4"
        ):
            call()


def test_widths_that_grouped_products_refuse_are_no_error_of_auto() -> None:
    """Nobody asked for "grouped"; whatever is not of 16 bytes, rows or the steps between them, goes elsewhere."""
    experts, x, weights, indices, valid = problem(torch.float32, False)
    wide = {name: torch.cat((leaf, leaf[..., :1]), -1)[..., :-1] for name, leaf in experts.items()}
    for given in (wide, {**experts, "up_proj": wide["up_proj"]}):
        run = choose_experts("auto", x, *given.values())
        assert run is loop_experts
        want = dense_experts(experts, x, weights, indices, valid, act=SILU)
        assert off(run(given, x, weights, indices, valid, act=SILU), want) < 1e-5
        with pytest.raises(ValueError, match='experts="loop" takes any width'):
            grouped_experts(given, x, weights, indices, valid, act=SILU)
    flipped = {name: leaf.mT.contiguous().mT for name, leaf in experts.items()}
    assert choose_experts("auto", x, *flipped.values()) is grouped_experts
    assert off(grouped_experts(flipped, x, weights, indices, valid, act=SILU), want) < 1e-5


WIDE = RouterDtypes(param="model", projection="wide", score="wide", output="wide")


def test_a_wide_router() -> None:
    layer = leaves(torch.bfloat16)
    x, valid = noise(1, 6, D).bfloat16(), torch.ones(1, 6, dtype=torch.bool)
    _, narrow = moe(layer, x, functools.partial(softmax_top_k, k=K), valid=valid, act=SILU)
    _, wide = moe(layer, x, functools.partial(softmax_top_k, k=K), valid=valid, act=SILU, dtypes=WIDE)
    assert narrow["router_logits"].dtype == torch.bfloat16
    assert torch.equal(wide["router_logits"], x.float() @ layer["router"].float().T)


def expert_parallel(
    experts: Any,
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    ranks: int,
    act: Any,
    input_weighted: bool = False,
) -> Tensor:
    """Tokens in equal slots on each rank, rows sent to the rank that owns their expert, and back; loops for wires.

    What is in a slot without a token, or comes back for padding, is NaN.
    """
    assert not input_weighted
    tokens, count = len(x), len(experts["gate_proj"])
    pad, ranges = virtual_padding(tokens, ranks)
    slots = torch.arange((tokens + pad) // ranks)
    sent, wire = [], []
    for lo, hi in ranges:
        # the slots beyond a rank's own tokens read a token of another's, which `own` says is not there
        own = slots < hi - lo
        at = (slots + lo).clamp(max=tokens - 1)
        mine = torch.where(own[:, None], x[at], torch.nan)
        rows, where = dispatch(mine, indices[at], valid[at] & own, count)
        sent.append((where, torch.where(own[:, None], weights[at], torch.nan)))
        kept = int(where.counts.sum())
        wire.append(list(rows[:kept].split(where.counts.tolist())))
    for first, last in virtual_padding(count, ranks)[1]:  # the rank that owns these experts
        part = {name: leaf[first:last] for name, leaf in experts.items()}
        mixed = [torch.cat([rank[e] for rank in wire]) for e in range(first, last)]
        sizes = [len(rows) for rows in mixed]
        if not sum(sizes):
            continue
        owner = torch.repeat_interleave(torch.tensor(sizes))[:, None]
        one = torch.ones_like(owner, dtype=x.dtype)
        out = loop_experts(part, torch.cat(mixed), one, owner, owner[:, 0] >= 0, act=act)
        for e, rows in zip(range(first, last), out.split(sizes), strict=True):
            for rank, back in zip(wire, rows.split([len(rank[e]) for rank in wire]), strict=True):
                rank[e] = back
    home = []
    for rank, (where, share), (lo, hi) in zip(wire, sent, ranges, strict=True):
        rows = torch.cat(rank)
        rows = torch.cat((rows, rows.new_full((len(where.order) - len(rows), x.shape[1]), torch.nan)))
        home.append(combine(rows, where, share)[: hi - lo])
    return torch.cat(home)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5), (3, 4), (2, 7)])
@pytest.mark.parametrize("spread", ["routed", "two experts"])
def test_experts_over_ranks(ranks: int, batch: int, length: int, spread: str) -> None:
    """M2: layer, counts and gradients are those of one process, whatever the ranks divide; NaN stands at padding."""
    layer, x = leaves(shared=7), noise(batch, length, D)
    valid = torch.ones(batch, length, dtype=torch.bool)
    valid[1:, -2:] = False
    x = torch.where(valid[..., None], x, torch.nan)
    routing = None if spread == "routed" else torch.tensor([3, 1]).expand(batch, length, K)

    def run(experts: Any) -> tuple[Tensor, Tensor, Any]:
        flat = {path: leaf.detach().clone().requires_grad_() for path, leaf in tree.flatten(layer).items()}
        route = functools.partial(softmax_top_k, k=K)
        y, aux = moe(tree.unflatten(flat), x, route, valid=valid, routing=routing, act=SILU, experts=experts)
        found = torch.autograd.grad(y[valid].sin().sum(), list(flat.values()))
        return y.detach(), aux["counts"], tree.unflatten(dict(zip(flat, found, strict=True)))

    want, got = run("loop"), run(functools.partial(expert_parallel, ranks=ranks))
    assert off(got[0], want[0]) < 1e-12 and torch.equal(got[1], want[1])
    assert off(got[2], want[2]) < 1e-12


@pytest.mark.parametrize("valid", [None, torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 6)])
def test_a_layer_without_a_padding_mask_is_refused(valid: Tensor | None) -> None:
    with pytest.raises(ValueError, match="pass `valid`" if valid is None else r"valid must be bool \[2, 6\]"):
        moe(leaves(), noise(2, 6, D), functools.partial(softmax_top_k, k=K), valid=valid, act=SILU)

"""Hyper-connections against loops over tokens and streams, with and without Sinkhorn's iterations."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.ops.streams import hyper
from fnmodels.ops.streams.hyper import HyperConnection, Maps
from tests.support.cases import generic

N, D = 3, 5
HOW = HyperConnection(iterations=4, eps=1e-3, norm_eps=1e-2)
WITHOUT = replace(HOW, iterations=0, post_scale=1.5, post_eps=1e-2)
X = generic("x", torch.empty(2, 4, N, D)).double()
Y = generic("y", torch.empty(2, 4, D)).double()


def drawn(rows: int, scales: int) -> dict[str, Tensor]:
    shapes = {"fn": (rows, N * D), "base": (rows,), "scale": (scales,)}
    return {name: generic(name, torch.empty(shape)).double() for name, shape in shapes.items()}


WEIGHTS = {HOW: drawn(2 * N + N * N, 3), WITHOUT: drawn(2 * N, 2)}


def by_loops(weights: dict[str, Tensor], x: Tensor, y: Tensor, how: HyperConnection) -> tuple[Tensor, Tensor]:
    """(what the sublayer reads [D], the streams after it [N, D]) of one token: x [N, D], y [D]."""
    raw = weights["fn"] @ (x.flatten() / (x.square().mean() + how.norm_eps).sqrt())
    of = [weights["scale"][min(i // N, 2)] * raw[i] + weights["base"][i] for i in range(len(raw))]
    pre = [torch.sigmoid(of[j]) + how.eps for j in range(N)]
    post = [how.post_scale * torch.sigmoid(of[N + k]) + how.post_eps for k in range(N)]
    comb = torch.eye(N, dtype=x.dtype)
    if how.iterations:
        comb = torch.stack(of[2 * N :]).view(N, N).softmax(-1) + how.eps
        for step in range(2 * how.iterations - 1):  # columns, rows, columns, ..., columns
            comb = comb / (comb.sum(step % 2, keepdim=True) + how.eps)
    mixed = [post[k] * y + sum(comb[j, k] * x[j] for j in range(N)) for k in range(N)]
    return sum(pre[j] * x[j] for j in range(N)), torch.stack(mixed)


def difference(how: HyperConnection, given: HyperConnection | None = None) -> float:
    """The largest between the op, with settings `given`, and loops."""
    found = hyper.maps(WEIGHTS[how], X, given or how)
    read, after = hyper.collapse(X, found.pre), hyper.connect(X, Y, found)
    worst = 0.0
    for b in range(2):
        for t in range(4):
            expected_read, expected_after = by_loops(WEIGHTS[how], X[b, t], Y[b, t], how)
            worst = max(worst, float((read[b, t] - expected_read).abs().max()))
            worst = max(worst, float((after[b, t] - expected_after).abs().max()))
    return worst


@pytest.mark.parametrize("how", [HOW, WITHOUT], ids=["sinkhorn", "without"])
@pytest.mark.parametrize("invariant", [False, True])
def test_streams_are_those_of_loops(how: HyperConnection, invariant: bool) -> None:
    with invariant_rows(invariant):
        assert difference(how) < 1e-12


def test_another_number_of_iterations_is_found() -> None:
    """A planted bug: Sinkhorn's iterations off by one."""
    assert difference(HOW, replace(HOW, iterations=5)) > 1e-4
    assert difference(HOW, replace(HOW, iterations=3)) > 1e-4


def test_comb_becomes_doubly_stochastic() -> None:
    comb = hyper.maps(WEIGHTS[HOW], X, replace(HOW, iterations=30, eps=1e-9)).comb
    assert comb is not None
    for dim in (-1, -2):
        assert torch.allclose(comb.sum(dim), torch.ones(2, 4, N).double(), atol=1e-6)


def test_fold_is_that_of_loops() -> None:
    weights = {name: generic(name, torch.empty(shape)).double() for name, shape in _FOLD.items()}
    got = hyper.fold(weights, X, HOW)
    for b in range(2):
        for t in range(4):
            x = X[b, t]
            flat = x.flatten() / (x.square().mean() + HOW.norm_eps).sqrt()
            pre = torch.sigmoid(weights["fn"] @ flat * weights["scale"] + weights["base"]) + HOW.eps
            assert torch.allclose(got[b, t], pre @ x, atol=1e-12)


_FOLD = {"fn": (N, N * D), "base": (N,), "scale": (1,)}


def test_an_edit_of_the_mean_moves_every_stream() -> None:
    changed = hyper.with_mean(X, Y)
    assert torch.allclose(hyper.mean(changed), Y)
    assert torch.allclose(changed - X, (Y - X.mean(-2)).unsqueeze(-2).expand_as(X))
    assert torch.equal(hyper.with_mean(Y, Y * 2), Y * 2) and torch.equal(hyper.mean(Y), Y)
    assert torch.equal(hyper.mean(hyper.opened(Y, N)), Y.unsqueeze(-2).expand(2, 4, N, D).mean(-2))


@pytest.mark.parametrize("how", [HOW, WITHOUT], ids=["sinkhorn", "without"])
def test_gradients_of_every_kind(how: HyperConnection) -> None:
    """First and second derivatives, and the same under vmap."""
    leaves = tuple(w.detach().requires_grad_() for w in WEIGHTS[how].values())

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        found: Maps = hyper.maps(dict(zip(("fn", "base", "scale"), weights, strict=True)), x, how)
        return hyper.connect(x, hyper.collapse(x, found.pre), found)

    x = X[:1, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *leaves), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *leaves), atol=1e-4, fast_mode=True)
    rows = torch.func.vmap(lambda row: run(row[None], *leaves)[0])(X)
    assert torch.allclose(rows, run(X, *leaves), atol=1e-12)


def in_a_single_pass(x: Tensor) -> Tensor:
    """A stack of three sublayers of streams x, folded by the last pre."""
    pre = hyper.first_pre(x)
    for sublayer in (torch.sin, torch.exp, torch.cos):
        x, pre = hyper.connect_late(WEIGHTS[HOW], x, pre, sublayer, HOW)
    return hyper.collapse(x, pre)


def single_pass_by_loops(x: Tensor) -> Tensor:
    """Of one token [N, D]: each sublayer reads by what the maps of the one before it say."""
    pre = [1.0, *[0.0] * (N - 1)]
    for sublayer in (torch.sin, torch.exp, torch.cos):
        read = sum(pre[j] * x[j] for j in range(N))
        raw = WEIGHTS[HOW]["fn"] @ (x.flatten() / (x.square().mean() + HOW.norm_eps).sqrt())
        pre = [torch.sigmoid(WEIGHTS[HOW]["scale"][0] * raw[j] + WEIGHTS[HOW]["base"][j]) + HOW.eps for j in range(N)]
        x = by_loops(WEIGHTS[HOW], x, sublayer(read), HOW)[1]
    return sum(pre[j] * x[j] for j in range(N))


def test_maps_that_are_read_one_sublayer_late() -> None:
    """With gradients; a sublayer that reads by its own maps, as in V4, is found."""
    x = (X / 4).requires_grad_()
    found, expected = in_a_single_pass(x), torch.stack([torch.stack(list(map(single_pass_by_loops, row))) for row in x])
    both = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    assert (found - expected).abs().max() < 1e-10 and (both[0] - both[1]).abs().max() < 1e-9
    with pytest.MonkeyPatch.context() as patch:
        own = hyper.maps(WEIGHTS[HOW], X / 4, HOW).pre
        patch.setattr(hyper, "first_pre", lambda x: own)
        assert (in_a_single_pass(x) - expected).abs().max() > 1e-3

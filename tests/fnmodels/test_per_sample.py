"""Per-sample gradients in one backward pass equal vmap(grad) over rows, for every family; what is refused says why."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import fnmodels
from fnmodels import per_sample, tree
from fnmodels.models.common.family import traits_of
from fnmodels.ops.cpu import linear as linear_module
from fnmodels.ops.cpu import product_table
from tests.support.cases import (
    Case,
    batch_of,
    cases,
    forward,
    generic_params,
    is_routed,
    layer_structures,
    richest,
    segments,
    short,
    summed_loss,
)

# All layers read a table of distances.
BIASED = [case for case in cases() if case.family in ("mpnet", "deberta_v2")]
DENSE = [case for case in cases() if not is_routed(case.config) and case not in BIASED]
# An operation and a family's own block may each read a parameter in a way that is not recorded.
_STRUCTURES = {case.name: case for case in (*map(short, richest()), *layer_structures())}.values()
_NAMES = {case.name for case in DENSE}
DENSE_STRUCTURES = [case for case in _STRUCTURES if case.name in _NAMES]
every_dense_family = pytest.mark.parametrize("case", [case for case in richest() if case in DENSE], ids=str)
ROWS = segments((7,), (3, 4), (-2, 5))


def problem(case: Case, kernel: str = "math", dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Any]:
    """(params, batch, loss)."""
    drawn = batch_of(case.config, ROWS)

    def loss(params: Any, batch: Any) -> Tensor:
        prepared, labels = batch
        return summed_loss(forward(params, prepared, config=case.config, kernel=kernel), labels)

    return generic_params(case.config, dtype), (drawn.prepared(), drawn.labels), loss


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    for (path, a), b in zip(tree.flatten(got).items(), tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, path
        assert float((a.double() - b.double()).detach().abs().max()) <= tolerance * max(1.0, float(b.abs().max())), path


@pytest.mark.parametrize("case", [*(case for case in layer_structures() if is_routed(case.config)), *BIASED], ids=str)
def test_what_mixes_samples_is_refused(case: Case) -> None:
    """Tokens of different samples meet in an expert's product, and in the table of relative biases."""
    params, batch, loss = problem(case)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.vmap\(torch\.func\.grad"):
        fnmodels.per_sample_gradients(loss, params, batch)


@pytest.mark.parametrize("case", DENSE_STRUCTURES, ids=str)
def test_equals_vmap_grad(case: Case) -> None:
    params, batch, loss = problem(case)
    want = vmap(grad(loss), in_dims=(None, 0))(params, fnmodels.rows(batch))
    # every number of an earlier result is overwritten
    old = tree.map(lambda t: t.new_full((len(ROWS), *t.shape), float("nan")), params)
    got, value = fnmodels.per_sample_gradients(loss, params, batch, out=old)
    assert got is old and not value.requires_grad
    assert_same(got, want, 1e-10)
    torch.testing.assert_close(value, loss(params, batch))
    assert_same(fnmodels.per_sample_gradients(loss, params, batch)[0], want, 1e-10)


@every_dense_family
def test_any_kernel_with_the_layout_of_the_whole_batch(case: Case) -> None:
    if traits_of(fnmodels.family_of(case.config)).sinks:  # fused kernels make keys of them
        with pytest.raises(NotImplementedError, match=r"attention\.sinks'.*torch\.func\.vmap\(torch\.func\.grad"):
            fnmodels.per_sample_gradients(*_ordered(problem(case, "auto")))
        return
    want = fnmodels.per_sample_gradients(*_ordered(problem(case)))[0]
    assert_same(fnmodels.per_sample_gradients(*_ordered(problem(case, "auto")))[0], want, 1e-9)


@every_dense_family
def test_low_precision(case: Case) -> None:
    """As near to vmap(grad) as sums in another order, or to the gradients in fp64 as that: bf16 has 8 bits."""
    params, batch, loss = problem(case, dtype=torch.bfloat16)
    want = vmap(grad(loss), in_dims=(None, 0))(params, fnmodels.rows(batch))
    got = fnmodels.per_sample_gradients(loss, params, batch)[0]
    exact = tree.flatten(fnmodels.per_sample_gradients(loss, tree.map(Tensor.double, params), batch)[0])
    for (path, a), b in zip(tree.flatten(got).items(), tree.leaves(want), strict=True):
        assert a.dtype is torch.bfloat16
        pairs = (a, b), (a, exact[path]), (b, exact[path])
        off, ours, theirs = (float((x.double() - y.double()).norm()) for x, y in pairs)
        assert off <= 0.1 * float(b.double().norm()) + 0.05 or ours <= 3 * theirs, path


def _ordered(problem: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    params, batch, loss = problem
    return loss, params, batch


def test_a_parameter_the_loss_does_not_read_gets_zeros() -> None:
    params = {"used": torch.randn(3, 2), "unused": torch.randn(4)}
    old = {"used": torch.full((5, 3, 2), float("nan")), "unused": torch.full((5, 4), float("nan"))}
    got, _ = fnmodels.per_sample_gradients(lambda p, x: F.linear(x, p["used"]).sum(), params, torch.ones(5, 2), out=old)
    assert torch.equal(got["unused"], torch.zeros(5, 4)) and torch.equal(got["used"], torch.ones(5, 3, 2))


def _written_over(p: Any, b: Any) -> Tensor:
    h = F.linear(b["x"], p["A"])
    h += 1
    return F.linear(h, p["B"]).square().sum()


BASE = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
ABOVE_A_GRAPH = {
    "a base that is trained elsewhere": lambda p, b: F.linear(F.embedding(b["t"], BASE), p["A"]).square().sum(),
    "and one parameter before it": lambda p, b: (
        F.linear(F.linear(F.embedding(b["t"], p["E"]), BASE[:4]) * F.embedding(b["t"], BASE), p["A"]).square().sum()
    ),
    "two branches, one above it": lambda p, b: (
        F.linear(F.embedding(b["t"], BASE), p["A"]).square().sum() + F.embedding(b["t"], p["E"]).exp().sum()
    ),
    "the rows themselves": lambda p, b: F.linear(F.linear(b["x"], p["A"]), p["B"]).square().sum(),
    "an operation that nothing reads": lambda p, b: (
        F.linear(b["x"], p["A"]).square().sum() + 0 * len(F.linear(b["x"], p["B"]))
    ),
    "a result that is written over": _written_over,
    "arguments by name": lambda p, b: (
        F.linear(
            input=F.rms_norm(input=F.embedding(input=b["t"], weight=p["E"]), normalized_shape=(4,), weight=p["n"]),
            weight=p["A"],
        )
        .add(other=p["n"])
        .mul(other=p["n"])
        .square()
        .sum()
    ),
}


@pytest.mark.parametrize("name", ABOVE_A_GRAPH)
def test_activations_that_have_a_graph_of_their_own(name: str) -> None:
    """The way back to every parameter is gone, also where activations need a gradient without one."""
    generator, loss = torch.Generator().manual_seed(1), ABOVE_A_GRAPH[name]
    shapes = {"A": (4, 4), "B": (4, 4), "E": (7, 4), "n": (4,)}
    params = {k: torch.randn(shape, generator=generator) for k, shape in shapes.items()}
    x = torch.randn(3, 2, 4, generator=generator, requires_grad=True)
    batch = {"t": torch.randint(7, (3, 2), generator=generator), "x": x}
    want = vmap(grad(loss), in_dims=(None, 0))(params, fnmodels.rows(batch))
    assert any(g.any() for g in tree.leaves(want))
    assert_same(fnmodels.per_sample_gradients(loss, params, batch)[0], want, 1e-5)
    assert x.grad is None and BASE.grad is None


@pytest.mark.parametrize("case", DENSE_STRUCTURES[:1], ids=str)
def test_soft_prompts_that_are_learned_too(case: Case) -> None:
    params, (((inputs, *rest), labels)), loss = problem(case)
    size = (*inputs["tokens"].shape, case.config.hidden_size)
    soft = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = vmap(grad(loss), in_dims=(None, 0))(params, fnmodels.rows((({**inputs, "tokens": soft}, *rest), labels)))
    learned = (({**inputs, "tokens": soft.requires_grad_()}, *rest), labels)
    assert_same(fnmodels.per_sample_gradients(loss, params, learned)[0], want, 1e-10)


def test_a_batch_of_no_rows() -> None:
    params = {"w": torch.randn(4, 4), "n": torch.randn(4)}
    got, loss = fnmodels.per_sample_gradients(
        lambda p, x: F.rms_norm(F.linear(x, p["w"]) * p["n"], (4,), p["n"]).sum(), params, torch.ones(0, 2, 4)
    )
    assert got["w"].shape == (0, 4, 4) and got["n"].shape == (0, 4) and loss == 0


class _Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum().expand(4, 4)


def _again(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.double(), weight).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda p, x: (x @ p["w"]).sum(), "matmul reads the parameters \\['w'\\]"),
        (lambda p, x: F.linear(x, p["w"].T).sum(), "reads the parameters"),
        (lambda p, x: torch.stack([p["w"]]).sum() + x.sum(), "stack reads the parameters"),
        (lambda p, x: F.linear(x, p["w"] * 2).sum(), "mul reads the parameters \\['w'\\]"),
        (lambda p, x: F.linear(x, 2 * p["w"]).sum(), "mul.* reads the parameters \\['w'\\]"),
        (lambda p, x: F.linear(x[None], p["w"]).sum(), "does not have the 3 rows in dimension 0"),
        (lambda p, x: F.embedding(torch.ones(3, 1).long(), p["w"], padding_idx=0).sum(), "embedding reads"),
        (lambda p, x: _Unseen.apply(x, p["w"]).sum(), "'w' is read by an operation that cannot be seen"),
        # each of these reads it in a way that is seen as well
        (lambda p, x: _Unseen.apply(F.linear(x, p["w"]), p["w"]).sum(), r"cannot be seen \(_UnseenBackward"),
        (lambda p, x: (F.linear(x, p["w"]) + _Unseen.apply(x, p["w"])).sum(), r"cannot be seen \(_UnseenBackward"),
        (lambda p, x: _Unseen.apply(F.linear(x, 1 + p["w"]), 1 + p["w"]).sum(), r"cannot be seen \(_UnseenBackward"),
        (lambda p, x: _Unseen.apply(x, p["w"]).sum() + _again(x, p["w"].to(torch.float64)), "'w' is read by an"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        fnmodels.per_sample_gradients(function, {"w": torch.randn(4, 4)}, torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("case", DENSE_STRUCTURES[:2], ids=str)
def test_through_rematerialized_layers(case: Case) -> None:
    params, batch, loss = problem(case)

    def saving(params: Any, batch: Any) -> Tensor:
        prepared, labels = batch
        logits = fnmodels.forward(
            params,
            *prepared,
            config=case.config,
            kernel="math",
            layer_fn=lambda block: partial(checkpoint, block, use_reentrant=False),
        )
        return summed_loss(logits, labels)

    want, _ = fnmodels.per_sample_gradients(loss, params, batch)
    assert_same(fnmodels.per_sample_gradients(saving, params, batch)[0], want, 1e-12)


def test_wrong_arguments() -> None:
    params = {"w": torch.randn(4, 4)}
    with pytest.raises(ValueError, match="does not depend on the parameters"):
        fnmodels.per_sample_gradients(lambda p, x: x.sum(), params, torch.randn(3, 4))
    with pytest.raises(ValueError, match="sum over the rows"):
        fnmodels.per_sample_gradients(lambda p, x: F.linear(x, p["w"]).sum(1), params, torch.randn(3, 4))
    with pytest.raises(ValueError, match="the sizes are \\[2, 3\\]"):
        fnmodels.per_sample_gradients(lambda p, b: b[0].sum(), params, [torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(ValueError, match="the sizes are \\[None\\]"):
        fnmodels.per_sample_gradients(lambda p, b: b.sum(), params, torch.ones(()))


@pytest.mark.parametrize("bias", [False, True])
def test_large_products_by_the_faster_library(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that oneDNN multiplies, of a weight that is read twice, with an activation in place after one."""
    monkeypatch.setattr(product_table, "ONEDNN", frozenset(product_table.FORMS))
    calls: list[tuple[int, ...]] = []
    ours = per_sample.product
    monkeypatch.setattr(per_sample, "product", lambda *args: calls.append(args[0].shape) or ours(*args))
    draws = torch.Generator().manual_seed(0)
    params = {name: torch.randn(384, 384, generator=draws).mul(0.05) for name in ("first", "second")}
    params |= {"bias": torch.randn(384, generator=draws)} if bias else {}
    batch = {"x": torch.randn(3, 128, 384, generator=draws)}

    def loss(params: Any, batch: Any) -> Tensor:
        x = F.relu(F.linear(batch["x"], params["first"], params.get("bias")), inplace=True)
        for name in ("second", "first"):
            x = F.linear(x, params[name], params.get("bias"))
            x *= 2
        return x.square().sum()

    found = fnmodels.per_sample_gradients(loss, params, batch)[0]
    assert len(calls) == 9 and set(calls) == {(384, 128)}
    for row in range(3):
        leaves = {name: leaf.double().requires_grad_() for name, leaf in params.items()}
        value = loss(leaves, {"x": batch["x"][row : row + 1].double()})
        wanted = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
        for name, grads in found.items():
            off = (grads[row] - wanted[name]).abs().max() / wanted[name].abs().max()
            assert off < 1e-5, (name, row, float(off))


def test_the_gradient_of_a_weight_is_not_summed_over_the_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_table, "ONEDNN", frozenset(product_table.FORMS))
    weights = [torch.randn(384, 384).mul(0.05) for _ in range(3)]
    of_weights: list[bool] = []
    forward = linear_module._Linear.forward
    monkeypatch.setattr(
        linear_module._Linear, "forward", lambda x, w, b: of_weights.append(w.requires_grad) or forward(x, w, b)
    )

    def loss(params: Any, x: Tensor) -> Tensor:
        for weight in params:
            x = F.linear(x, weight)
        return x.square().sum()

    fnmodels.per_sample_gradients(loss, weights, torch.randn(3, 128, 384))
    assert of_weights == [True, False, False]

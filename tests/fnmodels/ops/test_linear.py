"""Products by another library, or widened: the numbers of F.linear, and only where nothing but autograd looks on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import params as P
from fnmodels.ops.cpu import linear as ops_linear
from fnmodels.ops.cpu import onednn, product_table
from fnmodels.ops.cpu.linear import _Times
from fnmodels.ops.linear import linear, linear_gelu
from fnmodels.ops.torch_internals import onednn_layout, onednn_linear
from params import weight_forms
from tests.support.processor import needs_bf16_products

BF16 = pytest.param("bf16", marks=needs_bf16_products)
ROWS, IN, OUT = 256, 384, 320  # large enough for a product of its own kind
X, W, BIAS = torch.randn(2, ROWS // 2, IN), torch.randn(OUT, IN), torch.randn(OUT)


@pytest.fixture(autouse=True)
def onednn_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD processors, whatever this one is."""
    monkeypatch.setattr(product_table, "ONEDNN", frozenset(product_table.FORMS))
    monkeypatch.setattr(product_table, "WIDENS", False)
    monkeypatch.setattr(product_table, "BF16", True)


def ours(y: Tensor) -> bool:
    return y.grad_fn is not None and y.grad_fn.name() == "_LinearBackward"


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("transposed", [False, True])
def test_values_and_gradients_are_those_of_exact_products(bias: Tensor | None, transposed: bool) -> None:
    """Also of a weight and an input that lie transposed in memory, and of the gradient of a gradient."""
    weight = W.t().contiguous().t() if transposed else W
    x = X.transpose(0, 1).contiguous().transpose(0, 1) if transposed else X
    leaves = [t.clone().requires_grad_() for t in (x, weight) + (() if bias is None else (bias,))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]

    def all_of(function: Callable[..., Tensor], ins: list[Tensor]) -> list[Tensor]:
        y = function(*ins)
        first = torch.autograd.grad(y.square().sum() / 2, ins, create_graph=True)
        return [
            y,
            *first,
            *torch.autograd.grad(first[0].square().sum(), ins, allow_unused=True, materialize_grads=True),
        ]

    assert ours(linear(*leaves))
    for got, want in zip(all_of(linear, leaves), all_of(F.linear, exact), strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("onednn_forms", [frozenset(), frozenset(product_table.FORMS)], ids=["torch", "oneDNN"])
def test_bf16_is_widened_where_that_is_faster(
    native: bool, onednn_forms: frozenset[product_table.Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are exact products, rounded once; both arguments are widened in parts."""
    assert not ours(linear(X.bfloat16().requires_grad_(), W.bfloat16()))
    monkeypatch.setattr(product_table, "ONEDNN", onednn_forms)
    monkeypatch.setattr(product_table, "WIDENS", True)
    monkeypatch.setattr(product_table, "BF16", native)
    monkeypatch.setattr(onednn, "_WIDENED", 100 * IN)
    leaves = [t.bfloat16().requires_grad_() for t in (X, W, BIAS)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y, want = linear(*leaves), F.linear(*exact)
    assert ours(y)
    grad_output = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, grad_output)[:2]
    expected = torch.autograd.grad(want, exact, grad_output.double())[:2]
    for got, right in zip((y, *found), (want, *expected), strict=True):
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.double(), right, rtol=2**-8, atol=1e-3)
    few = 127 if native else 15
    assert not ours(linear(leaves[0][:1, :few], leaves[1].repeat(10, 1)))
    assert ours(linear(leaves[0][:1, : few + 1], leaves[1].repeat(10, 1)))


@needs_bf16_products
def test_a_bf16_bias_is_added_by_onednn_in_eager_mode() -> None:
    """torch's own product copies the bias into each row of the result first; without a bias it is the same product."""
    leaves = [t.bfloat16().requires_grad_() for t in (X, W, BIAS)]
    y = linear(*leaves)
    assert ours(y) and not ours(linear(*leaves[:2]))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want, grad_output = F.linear(*exact), torch.randn_like(y)
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-3)
    found = torch.autograd.grad(y, leaves, grad_output)
    for got, one in zip(found, torch.autograd.grad(want, exact, grad_output.double()), strict=True):
        assert got.dtype is torch.bfloat16 and (got - one).norm() <= 4e-3 * one.norm()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize(
    "form", ["fp32", BF16, "packed", "one slice", "packed slice", "torch's own", "widened", "transposed", "small"]
)
def test_gelu_with_its_product(
    form: str, bias: Tensor | None, approximate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against exact arithmetic; in one product of oneDNN but where that is not the faster one, and for few numbers."""
    calls: list[str | None] = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None = None) -> Tensor:
        calls.extend(() if gelu is None else (gelu,))
        assert x.is_contiguous() or gelu is None  # oneDNN takes a hundred times as long with other strides
        return onednn_linear(x, weight, bias, gelu)

    for module in (ops_linear, weight_forms):
        monkeypatch.setattr(module, "onednn_linear", recorded)
    dtype = torch.bfloat16 if form in ("bf16", "widened") else torch.float32
    monkeypatch.setattr(product_table, "WIDENS", form == "widened")
    x, weight, added = (None if t is None else t.to(dtype) for t in (X, W / IN**0.5, bias))
    assert x is not None and weight is not None
    x = torch.cat((x, x), -1)[..., :IN] if "slice" in form else x[:1, :8] if form == "small" else x
    if form == "torch's own":
        monkeypatch.setattr(product_table, "ONEDNN", frozenset())
    if form == "transposed":
        weight = weight.t().contiguous().t()
        monkeypatch.setattr(product_table, "ONEDNN", frozenset({(False, False), (True, True)}))
    given: Any = weight_forms.PackedWeight(onednn_layout(weight)) if "packed" in form else weight
    with torch.no_grad():
        got = linear_gelu(x, given, added, approximate=approximate)
    if "packed" in form:
        with pytest.raises(ValueError, match="has no gradient"):
            linear_gelu(x.clone().requires_grad_(), given, added, approximate=approximate)
    want = F.gelu(F.linear(*(None if t is None else t.double() for t in (x, weight, added))), approximate=approximate)
    bound = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)
    alone = form == "bf16" and bias is None  # torch's own product is the same one
    assert calls == ([] if alone or form in ("torch's own", "widened", "transposed", "small") else [approximate])


@pytest.mark.parametrize("form", ["fp32", BF16, "packed"])
def test_a_bias_may_have_any_strides(form: str) -> None:
    """oneDNN reads past the memory of a bias with other strides."""
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    x, weight = X.to(dtype), (W / IN**0.5).to(dtype)
    given: Any = weight_forms.PackedWeight(onednn_layout(weight)) if form == "packed" else weight
    for bias in (torch.randn(1).expand(OUT), torch.randn(2 * OUT)[::2], torch.randn(OUT, 4)[:, 1]):
        want, added = F.linear(x, weight).double() + bias.to(dtype).double(), bias.to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(linear(x, given, added).double(), want, rtol=2**-7, atol=2**-6)
            got = linear_gelu(x, given, added, approximate="none")
        torch.testing.assert_close(got.double(), F.gelu(want), rtol=2**-7, atol=2**-6)
    if form != "packed":  # shapes that F.linear takes too
        for bias in (torch.randn(1, dtype=dtype), torch.randn(ROWS // 2, OUT, dtype=dtype)):
            assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_each_form_takes_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, bool]] = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append((not x.is_contiguous(), not weight.is_contiguous()))
        return onednn_linear(x, weight, bias)

    monkeypatch.setattr(onednn, "onednn_linear", recorded)
    for form in product_table.FORMS:
        monkeypatch.setattr(product_table, "ONEDNN", frozenset({form}))
        leaves = [t.clone().requires_grad_() for t in (X, W)]
        y = linear(*leaves)
        found = torch.autograd.grad(y, leaves, torch.ones_like(y))
        wanted = torch.autograd.grad(F.linear(*leaves), leaves, torch.ones_like(y))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
        assert calls == [form]
        calls.clear()
    monkeypatch.setattr(product_table, "ONEDNN", frozenset())
    assert not ours(linear(X.clone().requires_grad_(), W))


def test_slices_and_the_gradient_of_a_sum_are_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN computes with their strides too, in a hundred times as long."""
    seen: list[Tensor] = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.extend((x, weight))
        return onednn_linear(x, weight, bias)

    monkeypatch.setattr(onednn, "onednn_linear", recorded)
    x, weight = torch.cat((X, X), -1).requires_grad_(), W.clone().requires_grad_()
    y = linear(x[..., :IN], weight)
    found = torch.autograd.grad(y.sum(), (x, weight))
    wanted = torch.autograd.grad(F.linear(x[..., :IN], weight).sum(), (x, weight))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert len(seen) == 6 and all(t.is_contiguous() or t.t().is_contiguous() for t in seen)


def test_a_frozen_weight_or_input_gets_no_gradient() -> None:
    weight, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    grad_output = torch.randn(2, ROWS // 2, OUT)
    (of_weight,) = torch.autograd.grad(linear(X, weight), weight, grad_output)
    (of_x,) = torch.autograd.grad(linear(x, W), x, grad_output)
    torch.testing.assert_close(of_weight, torch.einsum("bto,bti->oi", grad_output, X), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(of_x, grad_output @ W, rtol=1e-4, atol=1e-3)


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:TF32")  # torch's own flags set it too
def test_whoever_else_looks_on_sees_torchs_own_product() -> None:
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    assert ours(linear(x, weight))
    with Seen() as seen:
        assert not ours(linear(x, weight))
    assert F.linear in seen.calls
    with FlopCounterMode(display=False) as counter:
        linear(x, weight)
    assert counter.get_total_flops() == 2 * ROWS * IN * OUT
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype is torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert not ours(linear(x, weight))
    with forward_ad.dual_level():
        moved = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, X), weight)).tangent
        torch.testing.assert_close(moved, F.linear(X, W))
    for other in (x[:, :1], x.double(), x.half()):
        assert not ours(linear(other, weight.to(other.dtype)))
    node = P.lora.Lora(weight, torch.randn(4, IN), torch.randn(OUT, 4))
    torch.testing.assert_close(linear(x, node), F.linear(x, node.merged()), rtol=1e-4, atol=1e-3)


def test_transforms_go_through_torchs_own_product() -> None:
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return linear(x, weight).sin().sum()

    def want(weight: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, weight).sin().sum()

    def product(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda weight, x: torch.func.jvp(lambda w: torch.func.grad(f)(w, x), (weight,), (weight,))[1]

    def per_row(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.func.vmap(torch.func.grad(f), in_dims=(None, 0))

    for transform in (torch.func.grad, per_row, product):
        assert torch.equal(transform(loss)(W, X), transform(want)(W, X))


def test_grad_outputs_side_by_side() -> None:
    """autograd's own vmap meets the backward of a product that was recorded before."""
    x = X.clone().requires_grad_()
    grad_outputs = torch.randn(3, 2, ROWS // 2, OUT)
    (got,) = torch.autograd.grad(linear(x, W), x, grad_outputs, is_grads_batched=True)
    torch.testing.assert_close(got, grad_outputs @ W, rtol=1e-4, atol=1e-3)


def test_gradients_that_vmap_batches_are_rows_of_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph was made outside of vmap; also of a gradient's gradient, by batched and by dual vectors."""
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    y, grad_outputs = linear(x, weight), torch.randn(3, 2, ROWS // 2, OUT)
    rows: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return onednn.product(x, weight, bias)

    monkeypatch.setattr("fnmodels.ops.cpu.linear.product", counted)
    got = torch.func.vmap(lambda g: torch.autograd.grad(y, x, g, retain_graph=True)[0])(grad_outputs)
    torch.testing.assert_close(got, grad_outputs @ W, rtol=1e-4, atol=1e-3)
    assert rows == [3 * ROWS]
    times = torch.func.vmap(_Times.apply, in_dims=(None, 0))(grad_outputs[0], torch.stack((W, 2 * W)))
    torch.testing.assert_close(times[1], 2 * grad_outputs[0] @ W, rtol=1e-4, atol=1e-3)

    of_x, of_weight = torch.autograd.grad(y, (x, weight), y, create_graph=True)  # y W and y^T x
    vectors, matrices = torch.randn(3, 2, ROWS // 2, IN), torch.randn(3, OUT, IN)

    def second(vector: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((of_x, of_weight), (x, weight), (vector, matrix), retain_graph=True)

    found = torch.func.vmap(second)(vectors, matrices)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = F.linear(*wide)
    firsts = exact @ wide[1], exact.flatten(0, 1).T @ wide[0].flatten(0, 1)
    for one, vector, matrix in zip(zip(*found, strict=True), vectors, matrices, strict=True):
        cotangents = (vector.double(), matrix.double())
        for got, want in zip(one, torch.autograd.grad(firsts, wide, cotangents, retain_graph=True), strict=True):
            assert (got - want).norm() <= 1e-6 * want.norm()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad_outputs[0], grad_outputs[1])
        moved = torch.autograd.grad(y, x, dual, create_graph=True)[0]
        torch.testing.assert_close(forward_ad.unpack_dual(moved).tangent, grad_outputs[1] @ W, rtol=1e-4, atol=1e-3)


def test_shapes_that_do_not_fit_meet_torchs_words() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(X, W[:, :-1])


def test_in_a_graph_it_is_an_operator() -> None:
    """Not under a transform inside of the graph, and not in an exported one, whose sizes may be open."""
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    def traced(function: Callable[..., Tensor], *args: Tensor) -> tuple[bool, Tensor]:
        backend = AotEagerAndRecordGraphs()
        torch._dynamo.reset()
        out = torch.compile(function, backend=backend, fullgraph=True)(*args)
        graphs = backend.graphs + backend.fw_graphs + backend.bw_graphs
        return any("fnmodels.linear" in str(graph.graph) for graph in graphs), out

    leaves = [t.clone().requires_grad_() for t in (X, W, BIAS)]
    used, y = traced(linear, *leaves)
    assert used
    grad_output = torch.randn_like(y)
    exact = [t.double() for t in torch.autograd.grad(F.linear(*leaves), leaves, grad_output)]
    for got, want in zip(torch.autograd.grad(y, leaves, grad_output), exact, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
    assert not traced(torch.func.grad(lambda x: linear(x, W).sum()), X)[0]
    rows = torch.export.Dim("rows")
    module = torch.nn.Module()
    module.forward = lambda x: linear(x, W)  # type: ignore[method-assign]
    exported = torch.export.export(module, (X[0],), dynamic_shapes=({0: rows},))
    assert "fnmodels" not in str(exported.graph)

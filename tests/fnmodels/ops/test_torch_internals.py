"""Private names of torch: which of them this torch has, and that without any one of them results stay right."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
from fnmodels import tree
from fnmodels.inputs.values import aside, batched_gradient, has_values, readable, unwrapped
from fnmodels.ops import torch_compilation, torch_internals
from fnmodels.ops.cpu import product_table
from fnmodels.ops.cpu.tiled import causal_tiles
from fnmodels.ops.float8 import cast
from fnmodels.ops.float8 import product as eighths
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import glu
from fnmodels.ops.moe.experts import grouped_experts, loop_experts
from fnmodels.ops.torch_compilation import full_graph
from fnmodels.ops.torch_internals import (
    COSTLY,
    PRIVATE,
    costly_operators,
    fused_adamw_,
    is_plain_eager,
    quiet,
    softmax_backward,
    undisturbed,
    vector_norms,
    version,
)
from tests.project.test_readme import ROOT
from train.remat import layer_fn

NAMES = {
    "_C._aoti.AOTIModelPackageLoader",
    "_functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "_C._functorch.get_interpreter_stack",
    "_C._functorch.peek_interpreter_stack",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "_foreach_norm",
    "_fused_adamw_",
    "_grouped_mm",
    "_scaled_mm",
    "_softmax_backward_data",
    "Tensor._version",
    "_convert_weight_to_int4pack_for_cpu",
    "_weight_int4pack_mm_for_cpu",
    "_weight_int8pack_mm",
    "cpu.get_capabilities",
    "distributed.distributed_c10d._get_default_store",
    "ops.aten._unsafe_view",
    "ops.mkldnn._is_mkldnn_bf16_supported",
    "ops.mkldnn._linear_pointwise",
    "ops.mkldnn._reorder_linear_weight",
}
torch.manual_seed(0)
X, W = torch.randn(2, 256, 256), torch.randn(256, 256)  # large enough for oneDNN
PARTS, PATHS = ("gate", "up", "down"), (grouped_experts, loop_experts)
Q, K = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 2, 16)


@pytest.fixture(autouse=True)
def onednn_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD processors, whatever this one is."""
    monkeypatch.setattr(product_table, "ONEDNN", frozenset(product_table.FORMS))


def test_the_installed_torch_has_all_of_them() -> None:
    """Where this fails after an upgrade, look for the new name: until then all is right, and something is slower."""
    assert PRIVATE.keys() == NAMES
    assert not [name for name, found in PRIVATE.items() if found is None]
    assert not [name for name in COSTLY if not hasattr(torch.ops.aten, name)]
    assert version(torch.zeros(1)) == 0 and version(torch.zeros(1).add_(1)) == 1


class Modes(TorchDispatchMode):
    """Counts what is dispatched."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def product(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w).square().sum()


def plain_product(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).square().sum()


def tiled(q: Tensor, k: Tensor) -> Tensor:
    return causal_tiles(q, k, k, scale=0.25).square().sum()


def fused(q: Tensor, k: Tensor) -> Tensor:
    heads = (t.transpose(1, 2) for t in (q, k, k))
    return F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.25, enable_gqa=True).square().sum()


def routed(path: Callable[..., Tensor]) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The sum of squares of 16 tokens through two of four experts each, computed by `path`."""
    indices = torch.stack((torch.arange(16) % 4, (torch.arange(16) + 1) % 4), dim=-1)
    weights, valid = torch.full((16, 2), 0.5), torch.arange(16) < 13

    def loss(experts: dict[str, Tensor], x: Tensor) -> Tensor:
        y = path(experts, x, weights, indices, valid, act=functools.partial(glu, activation="silu"))
        return y[:13].square().sum()

    return loss


def rows_apart(*lengths: int) -> Any:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    segments = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(lengths)])[None]
    return fnmodels.inputs.build_mask(fnmodels.inputs.Causal(), positions, segments)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_without_one_of_them_results_stay_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRIVATE, name, None)
    for ours, torchs, args in ((product, plain_product, (X, W)), (tiled, fused, (Q, K))):
        torch._dynamo.reset()
        compiled = torch.compile(ours, backend="aot_eager")
        for run, wanted in ((ours, torchs), (grad(ours, (0, 1)), grad(torchs, (0, 1))), (compiled, torchs)):
            for one, other in zip(tree.leaves(run(*args)), tree.leaves(wanted(*args)), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    experts = {f"{part}_proj": W[:32, :32].repeat(4, 1, 1) * torch.arange(1, 5)[:, None, None] for part in PARTS}
    found, want = (tree.leaves(grad(routed(path), (0, 1))(experts, X[0, :16, :32])) for path in PATHS)
    for one, other in zip(found, want, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3 * float(other.abs().max()))
    eight = [cast(t, torch.float8_e4m3fn) for t in (X[0], W)]
    wanted = (eight[0][0].float() * eight[0][1]) @ (eight[1][0].float() * eight[1][1]).T
    torch.testing.assert_close(eighths(*eight, torch.float32), wanted, rtol=1e-4, atol=1e-3)
    each = vmap(grad(product), in_dims=(0, None))(X, W)
    torch.testing.assert_close(each, grad(plain_product)(X, W), rtol=1e-4, atol=1e-2)
    mask, other = rows_apart(24, 40), fnmodels.layout({"": rows_apart(40, 24)})
    attention = fnmodels.ops.attention.select.attention

    def attend(q: Tensor) -> Tensor:
        return attention(q, K, K, mask, scale=0.25, kernel="blocks", layout=other).sum()

    for call in (attend, grad(attend)):  # a layout of other documents is noticed, inside of a transform too
        with pytest.raises(ValueError, match="describes other documents than the mask"):
            call(Q)


def test_without_a_costly_operator_selective_checkpoints_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).sin()

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (X, W)]
        return list(torch.autograd.grad(function(*leaves).square().sum(), leaves))

    every, want = costly_operators(), gradients(block)
    for name in COSTLY:
        names = tuple(f"missing_{other}" if other == name else other for other in COSTLY)
        monkeypatch.setattr(torch_internals, "COSTLY", names)
        assert costly_operators() == [op for op in every if op is not getattr(torch.ops.aten, name).default]
        wrapper = layer_fn("selective", "none")
        assert wrapper is not None
        assert all(map(torch.equal, gradients(wrapper(block)), want))


def test_a_graph_with_unknown_transforms_uses_operations_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(function: Callable[..., Tensor]) -> tuple[bool, Tensor]:
        graphs: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(str(graph.graph))
            return graph

        torch._dynamo.reset()
        out = torch.compile(function, backend=backend, fullgraph=True)(X, W)
        return any("fnmodels.linear" in graph for graph in graphs), out

    used, want = traced(product)
    assert used
    monkeypatch.setitem(PRIVATE, "_C._functorch.get_interpreter_stack", None)
    used, got = traced(product)
    assert not used
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_gradient_written_out(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    p, grad_output = torch.randn(3, 5, 7).softmax(-1), torch.randn(3, 5, 7)
    want = softmax_backward(grad_output, p, torch.float32)
    monkeypatch.setitem(PRIVATE, "_softmax_backward_data", None)
    found = softmax_backward(grad_output, p, dtype)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), want, rtol=0, atol=1e-6 if dtype is torch.float32 else 4e-3)


def test_who_is_looking_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(quiet() or is_plain_eager(x))
        return x.sum()

    assert quiet() and is_plain_eager(X)
    vmap(look)(X)
    grad(look)(X)
    with Modes():
        look(X)
    with torch.device("cpu"):
        look(X)
    assert seen == [False] * 4
    for name in (
        "_C._functorch.peek_interpreter_stack",
        "_C._len_torch_dispatch_stack",
        "_C._len_torch_function_stack",
    ):
        with monkeypatch.context() as patch:
            patch.setitem(PRIVATE, name, None)
            assert not quiet() and not is_plain_eager(X)


def test_an_undisturbed_call_under_a_transform_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr("fnmodels.ops.torch_internals.aside", fail)
    inner, seen = torch.arange(3), list[Any]()
    vmap(grad(lambda x: (seen.append(undisturbed(lambda: (inner + 1).tolist())), x.sum())[1]))(torch.randn(2, 2))
    assert seen == [[1, 2, 3]]


@pytest.mark.parametrize("missing", [False, True])
def test_fused_adamw_equals_torchs_optimizer(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing:
        monkeypatch.setitem(PRIVATE, "_fused_adamw_", None)
    ours, theirs = ([torch.ones(3), torch.ones(2, 2)] for _ in range(2))
    moments = [[torch.zeros_like(p) for p in ours] for _ in range(2)]
    optimizer = torch.optim.AdamW(theirs, 0.01, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    numbers: dict[str, float] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    for count in (1.0, 2.0):
        for p in theirs:
            p.grad = torch.full_like(p, count)
        optimizer.step()
        lists = ours, [torch.full_like(p, count) for p in ours], *moments
        fused_adamw_(lists, torch.tensor(count), lr=torch.tensor(0.01), found_inf=torch.tensor(0.0), **numbers)
        kept = [p.clone() for p in ours]
        fused_adamw_(lists, torch.tensor(count), lr=0.01, found_inf=torch.tensor(1.0), **numbers)
        assert all(map(torch.equal, ours, kept))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_vector_norms_with_and_without_the_private_name_have_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in ((3, 700), (5,), (0,), ())]
    wide = torch.promote_types(dtype, torch.float32)
    at_once = vector_norms(tensors, wide)
    monkeypatch.setitem(PRIVATE, "_foreach_norm", None)
    assert all(map(torch.equal, at_once, vector_norms(tensors, wide)))
    assert {norm.dtype for norm in at_once} == {wide}


def test_an_undisturbed_call_is_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = torch.arange(3)
    with Modes() as modes:
        assert undisturbed(lambda t: (t + 1).tolist(), inner) == [1, 2, 3]
        assert modes.calls == 0
    found: list[Any] = []

    def inside(x: Tensor) -> Tensor:
        found.append(aside(lambda: inner + 1))
        return x.sum()

    grad(inside)(torch.randn(2))
    assert has_values(found[0]) and found[0].tolist() == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        aside(lambda: 1 // 0)


def test_which_tensors_have_values_to_read() -> None:
    seen: dict[str, tuple[bool, bool]] = {}

    def look(name: str) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            seen[name] = has_values(x), readable(x)
            return x.sum()

        return function

    look("plain")(X)
    look("parameter")(torch.nn.Parameter(X))
    look("meta")(X.to("meta"))
    grad(look("grad"))(X)
    vmap(look("vmap"))(X)
    grad(lambda x: vmap(look("vmap in grad"))(x).sum())(X)
    torch.func.jvp(look("jvp"), (X,), (X,))
    with torch._subclasses.FakeTensorMode() as mode:
        look("fake")(mode.from_tensor(X))
    assert seen == {
        "plain": (True, True),
        "parameter": (True, True),
        "meta": (False, False),
        "grad": (False, True),
        "vmap": (False, False),
        "vmap in grad": (False, False),
        "jvp": (False, True),
        "fake": (False, False),
    }
    assert unwrapped(X) is X and not readable("text")


def test_gradients_side_by_side_are_recognized() -> None:
    seen: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            seen.append(batched_gradient(grad_output))
            return grad_output * 2

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Look.apply(x), x, torch.eye(3), is_grads_batched=True)
    torch.autograd.grad(Look.apply(x), x, torch.ones(3))
    assert seen == [True, False]
    assert not batched_gradient(torch.nn.Parameter(X))


def test_no_other_file_uses_private_names() -> None:
    """Ruff (SLF001, TID251) sees attributes without a noqa and some imports; this sees all of them, and strings."""
    allowed = {Path(module.__file__) for module in (torch_internals, torch_compilation)}
    allowed.add(ROOT / "fnmodels/tree/nodes.py")  # it registers nodes, which has no public way
    ours = _own_names()
    found = [
        f"{path}:{node.lineno}: {name}"
        for path in _files()
        if path not in allowed
        for node in _nodes(path)
        for name in (*_of_torch(node), *_of_objects(node, ours))
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]
    assert not found
    assert any(_of_torch(node) for node in ast.walk(ast.parse("import torch.utils._pytree")))
    for code in ('getattr(x, "_local_tensor", x)', "x.y._version  # noqa: SLF001", "self._buffers_of_torch"):
        assert any(_of_objects(node, ours) for node in ast.walk(ast.parse(code)))


def _files() -> list[Path]:
    return [path for package in ("fnmodels", "params", "train") for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """Those that have a name which may be private."""
    named = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.ClassDef)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, named)]


def _of_torch(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):  # others are written out in vain
        names = [ast.unparse(node)]
    else:
        names = []
    return [name for name in names if name.split(".")[0] in ("torch", "dist", "F")]


# os._exit is documented. The others are used by subclasses of nn.Module and ArgumentParser, which have no public ones.
KNOWN = ("os._exit", "self._modules", "self._parameters", "self._option_string_actions")
OF_NAMED_TUPLES = ("_replace", "_asdict", "_fields")  # public, by the documentation of collections.namedtuple
BY_STRING = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")


def _of_objects(node: ast.AST, ours: set[str]) -> list[str]:
    """Private names of objects that are read as attributes or by a string; `ours` may be read of self and cls."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_STRING:
        names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and ast.unparse(node) not in KNOWN:
        own = ast.unparse(node.value) in ("self", "cls", "super()") and node.attr in ours
        names = [] if own else [node.attr]
    else:
        names = []
    return [
        name for name in names if name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES
    ]


def _own_names() -> set[str]:
    """What the classes of these packages define: methods, fields, and attributes that are assigned to self."""
    found = set()
    for path in _files():
        for node in _nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                methods = ast.FunctionDef | ast.AsyncFunctionDef
                found |= {item.name for item in node.body if isinstance(item, methods)}
                found |= {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
    return found


@pytest.mark.parametrize("setting", [None, False])
def test_compiled_code_skips_the_test_of_the_compiler_unless_it_is_set(setting: bool | None) -> None:
    inductor = torch._inductor.config
    with inductor.patch({"cpp.vec_isa_ok": setting}):
        full_graph(abs, backend="eager")
        assert inductor.cpp.vec_isa_ok is (True if setting is None else setting)


@pytest.mark.parametrize(("held", "width"), [("avx2", 256), (None, None)])
def test_the_width_of_vectors_is_in_the_key_of_compiled_code(
    held: str | None, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process held to AVX2 would run loops over 16 elements, of a process that was not, with vectors of 8."""
    inductor = torch._inductor.config
    if held and not torch.cpu.get_capabilities().get(held):
        pytest.skip(f"this processor has no {held}")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", held) if held else monkeypatch.delenv("ATEN_CPU_CAPABILITY", False)
    with inductor.patch({"cpp.simdlen": None, "cpp.vec_isa_ok": True}):
        before = torch._inductor.cpu_vec_isa.pick_vec_isa()
        full_graph(abs, backend="eager")
        assert inductor.cpp.simdlen == (width or before.bit_width())
        assert torch._inductor.cpu_vec_isa.pick_vec_isa() == before
    with inductor.patch({"cpp.simdlen": 1}):
        full_graph(abs, backend="eager")
        assert inductor.cpp.simdlen == 1


def test_what_a_new_process_imports_and_finds() -> None:
    """Inductor is imported without collecting garbage, and the collector is left as it was, which a second call shows
    as well as an import does. Matrix tiles that oneDNN may not use are none."""
    program = """
import gc, importlib, os, sys, torch
from fnmodels.ops.torch_compilation import full_graph
made = []
gc.callbacks.append(lambda *_: made.append(1))
full_graph(abs)
assert len(made) < 10, len(made)
assert "torch._inductor.compile_fx" in sys.modules
assert gc.isenabled()
gc.disable()
full_graph(abs)
assert not gc.isenabled()
from fnmodels.ops import torch_internals
limits = {"ALL": True, "avx10_1_512_amx": True, "AVX512_CORE_BF16": True, "AVX2": True, "DEFAULT": False}
for limit, tiles in limits.items():
    torch.cpu.get_capabilities = lambda: {"amx_bf16": tiles}
    os.environ["ONEDNN_MAX_CPU_ISA"] = limit
    print(importlib.reload(torch_internals).MATRIX_TILES)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "False", "False", "False"]


def test_one_gradient_is_known_to_be_the_only_derivative_also_under_vmap():
    jvp, vjp = torch.func.jvp, torch.func.vjp

    x, seen = torch.randn(3, 4), []

    def asked(x):
        seen.append(torch_internals.differentiated_once(x))
        return (x * x).sum()

    plain = x.clone().requires_grad_()
    calls = {
        "grad": (lambda: grad(asked)(x), True),
        "vjp": (lambda: vjp(asked, x), True),
        "vmap(grad)": (lambda: vmap(grad(asked))(x), True),
        "grad(vmap)": (lambda: grad(lambda x: vmap(asked)(x).sum())(x), True),
        "vmap(vmap(grad))": (lambda: vmap(vmap(grad(asked)))(x[None]), True),
        "no transform": (lambda: asked(plain), False),
        "vmap": (lambda: vmap(asked)(x), False),
        "grad(grad)": (lambda: grad(lambda x: grad(asked)(x).sum())(x), False),
        "vmap(grad(grad))": (lambda: vmap(grad(lambda x: grad(asked)(x).sum()))(x), False),
        "jvp(grad)": (lambda: jvp(grad(asked), (x,), (x,)), False),
        "grad(jvp)": (lambda: grad(lambda x: jvp(asked, (x,), (x,))[1])(x), False),
        "grad within autograd": (lambda: grad(asked)(plain), False),
        "vmap(grad) within autograd": (lambda: vmap(grad(asked))(plain), False),
    }
    for name, (call, once) in calls.items():
        seen.clear()
        call()
        assert seen == [once], name

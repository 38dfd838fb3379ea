"""The loop over chunks in compiled graphs: one node, with the values and gradients of the loop outside of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from fnmodels.ops.cpu.recurrent import scan_op
from tests.fnmodels.ops.recurrent.test_ops import OPS, Op, call, weighted

FORMS = ("delta", "ssd")  # a decay per channel has no gradient by hand
every_form = pytest.mark.parametrize("op", [OPS[name] for name in FORMS], ids=FORMS)


def documents(rows: int, length: int) -> Tensor:
    """Two documents per row, and padding at its end."""
    ids = torch.ones(rows, length, dtype=torch.long)
    ids[:, length // 3 :], ids[:, length - 3 :] = 2, 0
    return ids


def run(op: Op, length: int, transform: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The outputs of a transformed call, and its gradients by every floating-point argument."""
    along, constants, state = op.arguments(2, length)
    ids, last = documents(2, length), torch.tensor([1, 9])
    leaves = [t.requires_grad_() for t in (*along, *constants, state)]
    count = len(along)
    outputs = transform(
        lambda *t: call(op, t[:count], t[count:-1], ids, t[-1], last, kernel="auto"),
    )(*leaves)
    return outputs, torch.autograd.grad(weighted(outputs, ids > 0), leaves)


@every_form
def test_values_and_gradients(op: Op) -> None:
    for length in (19, 32):
        compiled = run(op, length, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))
        for got, want in zip(compiled, run(op, length, lambda f: f), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@every_form
def test_the_graph_does_not_grow_with_the_row(op: Op) -> None:
    sizes = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph

    for length in (24, 96):
        torch.compiler.reset()
        run(op, length, lambda f: torch.compile(f, fullgraph=True, dynamic=False, backend=counting))
    assert sizes[0] == sizes[1]


@every_form
def test_one_graph_for_every_length(op: Op) -> None:
    torch.compiler.reset()
    counters.clear()
    along, constants, _ = op.arguments(2, 40)
    compiled = torch.compile(
        lambda along, ids: call(op, along, constants, ids, kernel="auto")[0],
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for length in (40, 24, 33):
        part, ids = (
            tuple(t[:, :length].clone(memory_format=torch.contiguous_format) for t in along),
            documents(2, length),
        )
        want = call(op, part, constants, ids, kernel="auto")[0]
        torch.testing.assert_close(compiled(part, ids), want, rtol=1e-12, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1


def test_shapes_without_data() -> None:
    """The shapes and dtypes that a compiler is given are those of the results."""
    B, S, chunk = 2, 20, 8
    q, v = torch.randn(B, S, 2, 6, dtype=torch.bfloat16), torch.randn(B, S, 4, 5, dtype=torch.bfloat16)
    run = torch.zeros(B, S, dtype=torch.long)
    tensors = [torch.zeros(B, 4, 6, 5), q, q, v, -torch.rand(B, S, 4), torch.rand(B, S, 4), run, run]
    arguments = ("delta_per_head", [1.0, 0.5], chunk, 7, 2, torch.bfloat16)
    got = scan_op.compiled_scan(*arguments, tensors)
    with FakeTensorMode() as mode:
        said = scan_op.compiled_scan(*arguments, [mode.from_tensor(t) for t in tensors])
    assert [(t.shape, t.dtype) for t in said] == [(t.shape, t.dtype) for t in got]

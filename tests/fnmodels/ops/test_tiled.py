"""Causal attention in tiles: equal to the written-out form in values, gradients and vmap; bounded error in bf16."""

import functools

import pytest
import torch

import fnmodels
from fnmodels.ops.attention.select import attention
from fnmodels.ops.cpu import product_table, tiled_kernel
from fnmodels.ops.cpu.tiled import _Backward, causal_tiles, tiles_are_faster

SCALE = 0.3


def draw(length, *, heads=4, groups=2, width=8, v_width=8, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    shapes = (heads, width), (groups, width), (groups, v_width)
    return [
        torch.randn(batch, length, n, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for n, h in shapes
    ]


def written_out(q, k, v):
    allowed = torch.ones(1, 1, q.shape[1], q.shape[1], dtype=torch.bool).tril()
    return attention(q, k, v, allowed, kernel="math", scale=SCALE)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 300])
@pytest.mark.parametrize("sizes", [{}, {"groups": 4}, {"groups": 1, "v_width": 5}], ids=["grouped", "plain", "one"])
def test_values_and_gradients(length, sizes):
    inputs = draw(length, **sizes)
    got, want = causal_tiles(*inputs, scale=SCALE), written_out(*inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    grad_output = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, grad_output), torch.autograd.grad(want, inputs, grad_output), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_key_that_is_no_number_reaches_no_earlier_position(bad, dtype):
    q, k, v = (torch.randn(2, 64, heads, 16).to(dtype) for heads in (4, 2, 2))
    wanted = tiled_kernel.tiles_forward(q, k, v, 0.25)
    k[0, 40] = bad
    found = tiled_kernel.tiles_forward(q, k, v, 0.25)
    assert torch.equal(found[0, :40], wanted[0, :40]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 0)])
def test_vmap_of_the_gradient_equals_a_loop(in_dims):
    q, k, v = (t.detach() for t in draw(40))
    stacked = [
        t if d is None else torch.stack([t + 0.1 * i for i in range(3)], dim=d)
        for t, d in zip((q, k, v), in_dims, strict=True)
    ]

    def loss(q, k, v):
        return causal_tiles(q, k, v, scale=SCALE).sin().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    got = torch.func.vmap(gradient, in_dims=in_dims)(*stacked)
    for i in range(3):
        row = [t if d is None else t.select(d, i) for t, d in zip(stacked, in_dims, strict=True)]
        for ours, theirs in zip(got, gradient(*row), strict=True):
            torch.testing.assert_close(ours[i], theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("widens", "fused", "limit"), [(False, False, 1e-2), (True, False, 3e-3), (False, True, 1e-2)]
)  # not widened, scores are rounded to 8 bits
@pytest.mark.parametrize("v_width", [64, 40])
def test_bf16_is_as_near_to_fp64_as_its_rounding_allows(widens, fused, limit, v_width, monkeypatch):
    monkeypatch.setattr(product_table, "WIDENS", widens)
    monkeypatch.setattr(tiled_kernel, "MATRIX_TILES", fused)  # the forward pass of CPUs with AMX
    inputs = draw(512, heads=8, groups=4, width=64, v_width=v_width, batch=1, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    got, want = causal_tiles(*inputs, scale=SCALE), written_out(*exact)
    grad_output = torch.randn_like(got)
    found = got, *torch.autograd.grad(got, inputs, grad_output)
    wanted = want, *torch.autograd.grad(want, exact, grad_output.double())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype is torch.bfloat16
        assert (ours.double() - theirs).norm() < limit * theirs.norm()


def test_a_second_derivative_is_refused_with_our_sentence():
    q, k, v = draw(40, dtype=torch.bfloat16)
    (first,) = torch.autograd.grad(causal_tiles(q, k, v, scale=SCALE).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='kernel="math"'):
        torch.autograd.grad(first.sum(), k)


def test_the_blocks_kernel_uses_them_where_they_pay():
    q, k, v = draw(40, dtype=torch.bfloat16)
    assert (
        tiles_are_faster(q)
        and not tiles_are_faster(q.float())
        and not tiles_are_faster(q[:, :16])
        and not tiles_are_faster(q.half())
        and tiles_are_faster(q.float().repeat(1, 10, 1, 1))
    )
    positions = torch.arange(40).expand(2, 40)
    mask = fnmodels.inputs.build_mask(fnmodels.inputs.Causal(), positions, torch.ones_like(positions))
    layout = fnmodels.layout({"full": mask})
    out = attention(q, k, v, mask, kernel="auto", scale=SCALE, layout=layout)
    assert torch.equal(out, causal_tiles(q, k, v, scale=SCALE))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_compiled_graph_holds_them_as_one_node(dtype):
    inputs = draw(100, dtype=dtype)
    compiled = torch.compile(lambda q, k, v: causal_tiles(q, k, v, scale=SCALE), fullgraph=True, backend="aot_eager")
    got, want = compiled(*inputs), causal_tiles(*inputs, scale=SCALE)
    assert torch.equal(got, want)
    grad_output = torch.ones_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, grad_output), torch.autograd.grad(want, inputs, grad_output), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_mode_without_gradients_is_refused_with_our_sentence(dtype):
    """No guard stands in front where nothing is recorded."""
    q, k, v = (t.detach() for t in draw(300, dtype=dtype))
    with torch.no_grad(), pytest.raises(NotImplementedError, match='kernel="math"'):
        torch.func.jvp(lambda q: causal_tiles(q, k, v, scale=SCALE), (q,), (q,))
    grad_output = torch.ones_like(q)
    with pytest.raises(NotImplementedError, match='kernel="math"'):
        torch.func.jvp(lambda grad_output: _Backward.apply(q, k, v, grad_output, SCALE), (grad_output,), (grad_output,))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 40), (torch.float32, 300)])
def test_transforms_inside_of_compiled_code(dtype, length):
    """They do not see the derivative of the operator that tiles are in a graph: it is not taken there."""
    torch.compiler.reset()
    q, k, v = (t.detach() for t in draw(length, dtype=dtype, batch=1))
    positions = torch.cat([torch.arange(length - 2), torch.arange(2)])[None]
    mask = fnmodels.inputs.build_mask(
        fnmodels.inputs.Causal(), positions, 1 + (torch.arange(length)[None] >= length - 2).long()
    )
    layout = fnmodels.layout({"full": mask})
    assert tiles_are_faster(q[:, :-2])

    def loss(q, kernel="blocks"):
        return attention(q, k, v, mask, kernel=kernel, scale=SCALE, layout=layout).float().square().sum()

    def compiled(function):
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    want, value = torch.func.grad_and_value(lambda q: loss(q, "math"))(q)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=0.1 if dtype == torch.bfloat16 else 1e-4)
    graphs = []
    plain = torch.compile(loss, fullgraph=True, backend=lambda graph, _: graphs.append(graph.code) or graph)
    (got,) = torch.autograd.grad(plain(leaf := q.clone().requires_grad_()), leaf)
    close(got, want)
    assert "causal_tiles" in graphs[0]  # what trains layers that are compiled one by one
    got, total = compiled(torch.func.grad_and_value(loss))(q)
    close(got, want)
    assert abs(total - value) < 1e-2 * value
    close(compiled(torch.func.vmap(torch.func.grad(loss)))(q[None])[0], want)

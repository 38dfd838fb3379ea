"""The attention function against one query at a time. What each kernel does with each mask stands in test_kernels."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fnmodels import layout
from fnmodels.inputs import Causal, build_mask
from fnmodels.ops.attention.kernels import KERNELS, AttentionKernel
from fnmodels.ops.attention.math import math_attention
from fnmodels.ops.attention.relative_bias import RelativeBias
from fnmodels.ops.attention.sdpa import sdpa_attention
from fnmodels.ops.attention.select import attention, materialize


def slow(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for n in range(q.shape[2]):
                keys = [u for u in range(k.shape[1]) if allowed[b % allowed.shape[0], 0, t, u]]
                scores = [scale * float(q[b, t, n] @ k[b, u, n // group]) for u in keys]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                weights = [math.exp(score) for score in scores]
                total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[n])))
                for u, weight in zip(keys, weights, strict=True):
                    out[b, t, n] += weight / total * v[b, u, n // group]
    return out


def draw(batch: int = 2, queries: int = 5, keys: int = 5, heads: int = 4, groups: int = 2, v_width: int = 3) -> tuple:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, queries, heads, 6), (batch, keys, groups, 6), (batch, keys, groups, v_width))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sink", [False, True])
def test_math(groups: int, softcap: float | None, sink: bool) -> None:
    q, k, v = draw(groups=groups)
    segment_ids = torch.tensor([[0, 1, 1, 2, 2], [1, 1, 1, 1, 0]])
    mask = build_mask(Causal(), torch.tensor([[0, 0, 1, 0, 1], [0, 1, 2, 3, 4]]), segment_ids)
    sinks = torch.randn(4, dtype=torch.float64) if sink else None
    got = attention(q, k, v, mask, kernel="math", scale=0.7, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(got, slow(q, k, v, mask.dense(), 0.7, softcap, sinks))
    assert not got[0, 0].any() and not got[1, 4].any()  # a query without keys
    assert torch.equal(got, attention(q, k, v, mask.dense(), kernel="math", scale=0.7, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("kernel", ["math", "sdpa", "auto"])
def test_other_queries_than_keys(kernel: str) -> None:
    """As in decoding: the last two of seven tokens ask."""
    q, k, v = draw(queries=2, keys=7)
    allowed = torch.ones(2, 7, dtype=torch.bool).tril(5)[None, None]
    torch.testing.assert_close(
        attention(q, k, v, allowed, kernel=kernel, scale=0.4), slow(q, k, v, allowed, 0.4, None, None)
    )


@pytest.mark.parametrize("kernel", ["math", "sdpa"])
def test_large_scores_and_no_key(kernel: str) -> None:
    """No overflow, and zero gradient where there is nothing to see."""
    q, k, v = ((1e3 * t).requires_grad_() for t in draw())
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(-1)[None, None]
    out = attention(q, k, v, allowed, kernel=kernel, scale=1.0)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.isfinite().all() and not out[:, 0].any()
    assert all(g.isfinite().all() for g in grads) and not grads[0][:, 0].any() and not grads[2][:, 4].any()


@pytest.mark.parametrize("hides", ["edit", "bias"])
def test_keys_hidden_by_scores_of_minus_infinity_have_no_weight(hides: str) -> None:
    """Though the mask allows them; a query whose keys are all hidden so gives 0, with gradients of 0."""
    q, k, v = (t.requires_grad_() for t in draw())
    allowed, seen = (torch.ones(5, 5, dtype=torch.bool).tril(n) for n in (0, -1))
    hidden = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen & allowed, -torch.inf)
    edits = {"tap": lambda name, x: x + hidden if name == "attention.scores" else x} if hides == "edit" else {}
    bias = None if edits else hidden.expand(1, 4, 5, 5)
    out = math_attention(q, k, v, allowed[None, None], scale=0.7, bias=bias, **edits)
    torch.testing.assert_close(out, slow(q.detach(), k.detach(), v.detach(), seen[None, None], 0.7, None, None))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads) and not grads[0][:, 0].any()


@pytest.mark.parametrize("kernel", ["math", "sdpa"])
def test_sums_in_single_precision(kernel: str) -> None:
    """bf16 in and out, with the softmax in fp32: off by the rounding of what comes in and goes out."""
    q, k, v = draw()
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    low = [t.bfloat16() for t in (q, k, v)]
    out = attention(*low, allowed, kernel=kernel, scale=0.5)
    want = slow(*(t.double() for t in low), allowed, 0.5, None, None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", ["math", "sdpa", "auto"])
@pytest.mark.parametrize("shape", [(1, 1, 5, 1), (1, 1, 1, 5), (1, 1, 5, 6), (3, 1, 5, 5), (1, 2, 5, 5)])
def test_a_dense_mask_of_another_shape_is_refused(kernel: str, shape: tuple[int, ...]) -> None:
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"The mask is \[.*, but q and k need \[2, 4, 5, 5\]"):
        attention(q, k, v, torch.ones(shape, dtype=torch.bool), kernel=kernel, scale=1.0)
    with pytest.raises(ValueError, match=r"need \[1, 4, 5, 5\]"):  # the mask's rows do not become the queries'
        attention(*(t[:1] for t in (q, k, v)), torch.ones(2, 1, 5, 5, dtype=torch.bool), kernel=kernel, scale=1.0)


@pytest.mark.parametrize("shape", [(1, 1, 5, 5), (2, 1, 5, 5), (1, 4, 5, 5), (2, 4, 5, 5)])
def test_a_dense_mask_may_be_one_for_all_rows_or_heads(shape: tuple[int, ...]) -> None:
    q, k, v = draw()
    some = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    whole = some.expand(2, 4, 5, 5)
    for kernel in ("math", "sdpa"):
        got, want = (attention(q, k, v, m, kernel=kernel, scale=1.0) for m in (some, whole))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", ["math", "sdpa", "blocks", "auto"])
def test_a_mask_of_other_tokens_is_refused_and_never_dropped(kernel: str) -> None:
    """Where the layout is plain "sdpa" reads the triangle over indices, and would not look at the mask."""
    positions = torch.arange(8)[None]
    mask = build_mask(Causal(), positions, torch.ones_like(positions))
    found = layout({"full": mask})
    assert found is not None and found.plain
    q, k, v = draw(batch=1)
    with pytest.raises(ValueError, match=r"The mask is \[1, 1, 8, 8\]|describes 1 rows of 8 tokens"):
        attention(q, k, v, mask, kernel=kernel, scale=1.0, layout=found)
    short = draw(batch=1, queries=5, keys=8)
    with pytest.raises(ValueError, match="as many queries as keys, not for 5 and 8"):
        attention(*short, materialize(mask, "sdpa", found), kernel="sdpa", scale=1.0)


def test_heads_that_do_not_divide_are_refused() -> None:
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    for kernel in ("math", "sdpa"):
        with pytest.raises(ValueError, match="q has 4 heads and k has 3"):
            attention(*draw(groups=3), allowed, kernel=kernel, scale=1.0)
        q, k, v = draw()
        with pytest.raises(ValueError, match=r"v \[2, 4, 2, 3\]"):
            attention(q, k, v[:, :4], allowed, kernel=kernel, scale=1.0)


def test_an_unknown_kernel_is_named() -> None:
    q, k, v = draw()
    with pytest.raises(ValueError, match="'quick' is unknown; known are auto, math"):
        attention(q, k, v, torch.ones(1, 1, 5, 5, dtype=torch.bool), kernel="quick", scale=1.0)


@pytest.mark.parametrize("biased", [False, True])
def test_one_compiled_function_for_any_number_of_heads(biased: bool) -> None:
    """Blocks of models of one kind and different heads share code: their heads are symbols to the compiler."""

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        return sdpa_attention(q, k, v, None, scale=1.0, bias=bias)

    compiled = torch.compile(call, backend="aot_eager", dynamic=True, fullgraph=True)
    for groups in (1, 2):
        q, k, v = draw(groups=groups)
        bias = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(2)) if biased else None
        torch.testing.assert_close(compiled(q, k, v, bias), call(q, k, v, bias))


def test_a_kernel_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
    mask = build_mask(Causal(), torch.arange(5)[None], torch.ones(1, 5, dtype=torch.int64))
    negated = replace(KERNELS["math"], run=lambda *args: -KERNELS["math"].run(*args), accepts=frozenset({"sinks"}))
    monkeypatch.setitem(cast("dict[str, AttentionKernel]", KERNELS), "negated", negated)
    wanted = attention(q, k, v, mask, kernel="math", scale=0.5)
    assert torch.equal(attention(q, k, v, mask, kernel="negated", scale=0.5), -wanted)
    with pytest.raises(ValueError, match="math, sdpa, blocks, flex, varlen, sparse, invariant, negated"):
        attention(q, k, v, mask, kernel="spiral", scale=0.5)
    with pytest.raises(ValueError, match='kernel="negated" has no relative position bias'):
        attention(q, k, v, mask, kernel="negated", scale=0.5, bias=cast("RelativeBias", torch.zeros(1)))


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("flex", "varlen")])
def test_a_record_says_which_changes_of_scores_its_kernel_computes(name: str) -> None:
    q, k, v = (torch.randn(1, 6, 2, 16) for _ in range(3))
    positions = torch.arange(6)[None]
    mask = build_mask(Causal(), positions, torch.ones_like(positions))
    bias = RelativeBias(torch.randn(9, 2), positions, positions)
    calls: dict[str, Any] = {"softcap": 2.0, "sinks": torch.randn(2), "bias": bias, "tap": lambda tap, scores: scores}
    for change, value in calls.items():
        how: Any = {"scale": 0.5, "layout": layout({"": mask}), change: value}
        if change in KERNELS[name].accepts:
            want = attention(q, k, v, mask, kernel="math", **how)
            assert_close(attention(q, k, v, mask, kernel=name, **how), want, rtol=1e-4, atol=1e-5)
        else:
            with pytest.raises(ValueError, match=name):
                attention(q, k, v, mask, kernel=name, **how)

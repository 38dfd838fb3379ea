"""Norms against their formula in plain operations, and where each kind rounds."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp

from fnmodels.ops.cpu.norm import _LayerNorm
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.norm import (
    layer_norm,
    rms_norm,
    rms_norm_fp32_weight,
    rms_norm_offset,
    rms_norm_scaled_input,
    rms_norm_zero_centered,
)

EPS = 1e-2
torch.manual_seed(0)
X, W, BIAS = torch.randn(3, 5, 12) * 0.3, torch.randn(12), torch.randn(12)


def unit(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formulas(dtype: torch.dtype) -> None:
    x, w, b = X.to(dtype), W.to(dtype), BIAS.to(dtype)
    centered = x - x.mean(-1, keepdim=True)
    pairs = [
        (rms_norm(x, w, eps=EPS), unit(x) * w),
        (rms_norm(x, None, eps=EPS), unit(x)),
        (rms_norm_fp32_weight(x, w, eps=EPS), unit(x) * w),
        (rms_norm_zero_centered(x, w, eps=EPS), unit(x) * (1 + w)),
        (rms_norm_offset(x, w, eps=EPS), unit(x) * (1 + w)),
        (rms_norm_scaled_input(x, w, eps=EPS), unit(x * (1 + w))),
        (layer_norm(x, w, b, eps=EPS), unit(centered) * w + b),
        (layer_norm(x, None, None, eps=EPS), unit(centered)),
    ]
    for got, want in pairs:
        assert got.dtype == dtype
        torch.testing.assert_close(got, want)


def test_large_rows_as_one_function_and_its_derivatives() -> None:
    """Against exact arithmetic: values, gradients, the gradient of a gradient, and gradients of several outputs."""
    x, w = (torch.randn(shape).requires_grad_() for shape in ((2, 512, 256), (256,)))
    grad_outputs = torch.randn(2, *x.shape)

    def all_of(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
        y, s = function(x, w), grad_outputs.to(x.dtype)
        first = torch.autograd.grad(y, (x, w), s[0], create_graph=True)
        second = torch.autograd.grad((first[0] * s[1]).sum() + first[1].square().sum(), (x, w), retain_graph=True)
        return [y, *first, *second, *torch.autograd.grad(y, (x, w), s, is_grads_batched=True)]

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x, w, eps=EPS)

    assert type(norm(x, w).grad_fn).__name__ == "_RMSNormBackward"
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    for got, want in zip(all_of(norm, x, w), all_of(lambda x, w: unit(x) * w, *exact), strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()
    assert torch.equal(grad(lambda x: norm(x, w).sum())(x), grad(lambda x: F.rms_norm(x, w.shape, w, EPS).sum())(x))
    row = torch.randn(1 << 18)
    torch.testing.assert_close(rms_norm(row, torch.ones(1 << 18), eps=EPS), unit(row))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        rms_norm(x, w[:1], eps=EPS)


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_fp32_weight, rms_norm_zero_centered])
def test_large_bfloat16_rows_round_where_small_ones_do(norm: Callable[..., Tensor]) -> None:
    """Large rows against the same rows a few at a time, and gradients against exact ones; no fp32 copies are saved."""
    torch.manual_seed(1)
    x, w, grad_output = (torch.randn(shape).bfloat16() for shape in ((2, 512, 256), (256,), (2, 512, 256)))
    x, w = x.requires_grad_(), w.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = norm(x, w, eps=EPS)
    assert all(t.dtype is torch.bfloat16 or t.numel() <= x.shape[0] * x.shape[1] for t in kept)
    by_rows = torch.cat([norm(rows, w, eps=EPS) for rows in x.detach().split(64, 1)], 1)
    assert (y != by_rows).float().mean() < 1e-3  # the sums of squares differ in the last bit of fp32
    torch.testing.assert_close(y, by_rows, rtol=2**-6, atol=0)
    mixed = norm(x.detach(), w.float(), eps=EPS)
    parts = [norm(rows, w.float(), eps=EPS) for rows in x.detach().split(64, 1)]
    assert mixed.dtype is parts[0].dtype
    torch.testing.assert_close(mixed, torch.cat(parts, 1), rtol=2**-6, atol=0)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    shift = 1 if norm is rms_norm_zero_centered else 0
    of = functools.partial(torch.autograd.grad, retain_graph=True)
    want = of((unit(exact[0]) * (shift + exact[1])), exact, grad_output.double())
    two = torch.stack((grad_output, grad_output))
    twice = [of(y, t, two, is_grads_batched=True)[0][1] for t in (x, w)]
    for found in (of(y, (x, w), grad_output), of(y, (x, w), grad_output, create_graph=True), twice):
        for got, one in zip(found, want, strict=True):
            assert got.dtype is torch.bfloat16 and (got - one).norm() <= 4e-3 * one.norm()


def test_large_layer_norms_as_one_function_and_their_derivatives() -> None:
    """Against exact arithmetic: as for RMSNorm, with the gradient of the bias; frozen parameters have none."""
    x, w, b = (torch.randn(shape).requires_grad_() for shape in ((2, 512, 256), (256,), (256,)))
    x, grad_outputs = (x.detach() + 3).requires_grad_(), torch.randn(2, 2, 512, 256)

    def all_of(function: Callable[..., Tensor], *at: Tensor) -> list[Tensor]:
        y, s = function(*at), grad_outputs.to(at[0].dtype)
        first = torch.autograd.grad(y, at, s[0], create_graph=True)
        second = torch.autograd.grad((first[0] * s[1]).sum() + first[1].square().sum(), at[:2], retain_graph=True)
        plain = torch.autograd.grad(y, at, s[1], retain_graph=True)
        return [y, *first, *second, *plain, *torch.autograd.grad(y, at, s, is_grads_batched=True)]

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm(x, w, b, eps=EPS)

    def written_out(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return unit(x - x.mean(-1, keepdim=True)) * w + b

    assert type(norm(x, w, b).grad_fn).__name__ == "_LayerNormBackward"
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    for got, want in zip(all_of(norm, x, w, b), all_of(written_out, *exact), strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()
    tangents = tuple(torch.randn_like(t) for t in exact)
    at = tuple(t.detach() for t in exact)
    found = jvp(lambda *at: _LayerNorm.apply(*at, EPS)[0], at, tangents)[1]
    torch.testing.assert_close(found, jvp(written_out, at, tangents)[1])
    frozen = torch.autograd.grad(norm(x, w.detach(), b.detach()), x, grad_outputs[0])
    torch.testing.assert_close(frozen, torch.autograd.grad(norm(x, w, b), x, grad_outputs[0]), rtol=0, atol=0)
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, w, b)]
    exact = [t.detach().double().requires_grad_() for t in narrow]
    y, want = norm(*narrow), written_out(*exact)
    assert type(y.grad_fn).__name__ == "_LayerNormBackward" and y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-5)  # rounded once
    wanted = torch.autograd.grad(want, exact, s := grad_outputs[0].bfloat16().double())
    for again in (False, True):
        found = torch.autograd.grad(y, narrow, s.bfloat16(), create_graph=again, retain_graph=True)
        for got, one in zip(found, wanted, strict=True):
            assert got.dtype is torch.bfloat16 and (got - one).norm() <= 4e-3 * one.norm()


def test_where_bfloat16_rounds() -> None:
    x, w, b = X.bfloat16(), W.bfloat16(), BIAS.bfloat16()
    wide = unit(x.float())
    assert torch.equal(rms_norm(x, w, eps=EPS), wide.bfloat16() * w)  # before the weight
    assert torch.equal(rms_norm_fp32_weight(x, w, eps=EPS), (wide * w.float()).bfloat16())  # after it
    assert torch.equal(rms_norm_zero_centered(x, w, eps=EPS), (wide * (1 + w.float())).bfloat16())
    assert not torch.equal(rms_norm(x, w, eps=EPS), rms_norm_fp32_weight(x, w, eps=EPS))
    centered = unit(x.float() - x.float().mean(-1, keepdim=True))
    assert torch.equal(layer_norm(x, w, b, eps=EPS), (centered * w.float() + b.float()).bfloat16())


def test_upcast_never_narrows() -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert upcast(X.to(dtype)).dtype == wide


def test_layer_norm_has_a_second_derivative() -> None:
    """Reverse over forward equals forward over reverse and the difference of gradients."""
    x, weight, bias, direction = X.double(), W.double(), BIAS.double(), torch.randn_like(X.double())

    def f(x: Tensor) -> Tensor:
        return layer_norm(x, weight, bias, eps=EPS).sin().sum()

    wanted = (grad(f)(x + 1e-5 * direction) - grad(f)(x - 1e-5 * direction)) / 2e-5
    assert torch.allclose(grad(lambda x: jvp(f, (x,), (direction,))[1])(x), wanted, atol=1e-7)
    assert torch.allclose(jvp(grad(f), (x,), (direction,))[1], wanted, atol=1e-7)

"""Comparison of tensors, and of functions of params by values and gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import tree
from ..tree import Tree
from .subject import Subject


def assert_close(got: Tensor, want: Tensor, tolerance: float, sentence: str) -> None:
    """AssertionError, beginning with `sentence`, unless both are finite and within tolerance times max(1, largest)."""
    if got.shape != want.shape:
        raise AssertionError(f"{sentence} (shapes {tuple(got.shape)} against {tuple(want.shape)})")
    if not (got.isfinite().all() and want.isfinite().all()):
        raise AssertionError(f"{sentence} (some values are not finite)")
    if not got.numel():
        return
    scale = max(1.0, float(want.abs().max()))
    worst = float((got - want).abs().max())
    if worst > tolerance * scale:
        raise AssertionError(f"{sentence} (largest difference {worst:.3g}, allowed {tolerance * scale:.3g})")


def assert_same_function(
    subject: Subject, first: Callable[[Tree], Tensor], second: Callable[[Tree], Tensor], sentence: str
) -> None:
    """Compares two functions of params: values, and gradients of a fixed random projection of the values."""
    got, gradient, *_ = torch.func.vjp(first, subject.params)
    want, wanted_gradient, *_ = torch.func.vjp(second, subject.params)
    assert_close(got, want, subject.tolerance, f"{sentence}, in the logits")
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(0), dtype=want.dtype).to(want.device)
    (gradients,), (wanted,) = gradient(weights), wanted_gradient(weights)
    for (path, ours), theirs in zip(tree.flatten(gradients).items(), tree.leaves(wanted), strict=True):
        assert_close(ours, theirs, 10 * subject.tolerance, f"{sentence}, in the gradient of {path!r}")

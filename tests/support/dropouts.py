"""Dropout here and in transformers: with masks that are fixed numbers, and how far two distributions are apart.

Equal results with fixed masks mean that the same tensors are dropped, at the same rates.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fnmodels.ops import dropout
from fnmodels.ops.dropout import Dropout
from tests.support.oracle import assert_close


@functools.cache
def factors(rows: int, features: int, rate: float) -> Tensor:
    """[rows, features], other ones for each rate; from 1 - rate to 1 + rate."""
    generator = torch.Generator().manual_seed(round(rate * 1e6))
    return 1 + rate * (2 * torch.rand(rows, features, generator=generator) - 1)


@contextlib.contextmanager
def fixed_dropout() -> Iterator[None]:
    """Within it both libraries multiply what they would drop by `factors` of its last two dimensions and the rate.

    Rows of a batch and heads share them, which models flatten in their own ways.
    """

    def theirs(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * factors(*x.shape[-2:], p) if training and p else x

    def ours(x: Tensor, hashes: Tensor, rate: float) -> Tensor:
        return x.expand(hashes.shape) * factors(*hashes.shape[-2:], rate)

    before = torch.nn.functional.dropout, dropout._thinned
    torch.nn.functional.dropout, dropout._thinned = theirs, ours
    try:
        yield
    finally:
        torch.nn.functional.dropout, dropout._thinned = before


def check_places(ours: Callable[[Dropout], Tensor], rates: Dropout, theirs: Tensor) -> None:
    """`ours` at the rates equals `theirs`, both within `fixed_dropout`, and planted bugs are found."""
    assert_close(ours(rates), theirs)
    for place in (name for name, rate in dataclasses.asdict(rates).items() if rate):
        for factor in (0, 0.8):  # planted: a place that is forgotten, and a rate that is 20% off
            assert off(ours(scaled(rates, factor, place)), theirs) > 1e-3, (place, factor)


def scaled(rates: Dropout, factor: float, *places: str) -> Dropout:
    """The rates, those of these places, or all, times the factor."""
    of = dataclasses.asdict(rates)
    return Dropout(**of | {place: factor * of[place] for place in places or of})


def off(one: Tensor, other: Tensor) -> float:
    """The largest difference."""
    return float((one - other).abs().max())


def apart(one: Tensor, other: Tensor) -> tuple[float, float]:
    """(root mean square of the means' difference in standard errors, ratio of the variances - 1)."""
    one, other = one.double(), other.double()
    variances = one.var(0), other.var(0)
    errors = (one.mean(0) - other.mean(0)).square() / (sum(variances) / len(one)).clamp(min=1e-12)
    return float(errors.mean().sqrt()), float(variances[0].sum() / variances[1].sum()) - 1

"""Activations side by side: how far apart each is and may be, and the sentence that follows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BOUND = 2e-5  # of an fp32 activation, times max(1, its standard deviation): 5-10x the difference of two correct kernels
ROUNDING = 2.0**-23  # of fp32, relative
ROUNDINGS = 4  # two correct kernels differ by 0.2 to 0.9 of what one rounding of every leaf changes
MOST = 8  # times the plain bound


@dataclass(frozen=True)
class ComparedTap:
    """The comparison of one activation: largest absolute difference (inf if shapes differ) and its plain bound.

    rounded: the largest absolute difference that a rounding of every leaf makes, where that was measured.
    """

    tap: str
    off: float
    bound: float
    rounded: float = 0.0

    @property
    def allowed(self) -> float:
        """The plain bound, or ROUNDINGS roundings where that is more, up to MOST times the plain bound.

        Recurrences and large activations make more of a rounding than BOUND has room for. A choice of experts that a
        rounding turns must not hide a fault, hence MOST.
        """
        return max(self.bound, min(MOST * self.bound, ROUNDINGS * self.rounded))

    @property
    def equal(self) -> bool:
        return self.off <= self.allowed  # False for NaN


def compared(tap: str, ours: Tensor, theirs: Tensor) -> ComparedTap:
    """The row of one activation of both models, of the same shape."""
    return ComparedTap(tap, largest_difference(ours, theirs), BOUND * max(1.0, float(theirs.std())))


def largest_difference(one: Tensor, two: Tensor) -> float:
    """The largest absolute difference; infinite if the shapes differ."""
    return float((one - two).abs().max()) if one.shape == two.shape else math.inf


def nudged_by_rounding(leaf: Tensor) -> Tensor:
    """The leaf with every entry one rounding of fp32 larger or smaller, by a fixed pattern; integers as they are."""
    if not leaf.is_floating_point():
        return leaf
    signs = torch.randint(2, leaf.shape, generator=torch.Generator().manual_seed(leaf.numel())) * 2 - 1
    return leaf * (1 + ROUNDING * signs)


def print_rows(rows: Sequence[ComparedTap]) -> None:
    """Prints a line per activation."""
    width = max(len(row.tap) for row in rows)
    print(f"{'activation':{width}}  difference  allowed")
    for row in rows:
        print(f"{row.tap:{width}}  {row.off:10.1e}  {row.allowed:7.1e}{'' if row.equal else '  differs'}")


def conclusion(rows: Sequence[ComparedTap], values: Mapping[str, float]) -> str:
    """The sentence that names the first difference; values: {path: difference} of leaves with other values."""
    leaves = ", ".join(f"{path} (by {off:.1e})" for path, off in list(values.items())[:5])
    leaves += f" and {len(values) - 5} more" if len(values) > 5 else ""
    first = next((row for row in rows if not row.equal), None)
    if first is not None:
        why = f" Leaves with other values: {leaves}." if values else " All leaves have the same values."
        return f"The first difference is at {first.tap}: {first.off:.1e}, where {first.allowed:.1e} is allowed.{why}"
    if values:
        return f"No activation differs, but these leaves have other values: {leaves}."
    more = f", or {ROUNDINGS} roundings of the leaves" if any(row.rounded for row in rows) else ""
    return f"Equal: all {len(rows)} activations are within {BOUND:.0e} x max(1, std){more}."

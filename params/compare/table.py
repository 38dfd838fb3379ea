"""Activations side by side: how far apart each is and may be, and the sentence that follows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

BOUND = 2e-5  # of an fp32 activation, times max(1, its standard deviation): 5-10x the difference of two correct kernels


@dataclass(frozen=True)
class ComparedTap:
    """The comparison of one activation: largest absolute difference (inf if shapes differ) and the allowed bound."""

    tap: str
    off: float
    bound: float

    @property
    def equal(self) -> bool:
        return self.off <= self.bound  # False for NaN


def compared(tap: str, ours: Tensor, theirs: Tensor) -> ComparedTap:
    """The row of one activation of both models, of the same shape."""
    return ComparedTap(tap, largest_difference(ours, theirs), BOUND * max(1.0, float(theirs.std())))


def largest_difference(one: Tensor, two: Tensor) -> float:
    """The largest absolute difference; infinite if the shapes differ."""
    return float((one - two).abs().max()) if one.shape == two.shape else math.inf


def print_rows(rows: Sequence[ComparedTap]) -> None:
    """Prints a line per activation."""
    width = max(len(row.tap) for row in rows)
    print(f"{'activation':{width}}  difference  allowed")
    for row in rows:
        print(f"{row.tap:{width}}  {row.off:10.1e}  {row.bound:7.1e}{'' if row.equal else '  differs'}")


def conclusion(rows: Sequence[ComparedTap], values: Mapping[str, float]) -> str:
    """The sentence that names the first difference; values: {path: difference} of leaves with other values."""
    leaves = ", ".join(f"{path} (by {off:.1e})" for path, off in list(values.items())[:5])
    leaves += f" and {len(values) - 5} more" if len(values) > 5 else ""
    first = next((row for row in rows if not row.equal), None)
    if first is not None:
        why = f" Leaves with other values: {leaves}." if values else " All leaves have the same values."
        return f"The first difference is at {first.tap}: {first.off:.1e}, where {first.bound:.1e} is allowed.{why}"
    if values:
        return f"No activation differs, but these leaves have other values: {leaves}."
    return f"Equal: all {len(rows)} activations are within {BOUND:.0e} x max(1, std)."

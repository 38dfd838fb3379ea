"""Norms that show their outputs and scales to a tap."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fnmodels.options import Tap

from .cpu.norm import inverse_rms
from .dtypes import upcast

# The norms that the code around this call watches, if any; dynamo cannot read it.
WATCHED: ContextVar[tuple[dict[int, str], Tap] | None] = ContextVar("fnmodels_watched_norms", default=None)


@contextmanager
def watched_norms(weights: Mapping[str, Tensor], tap: Tap) -> Iterator[None]:
    """A scope in which the norms with these weights call `tap` with NAME, their output, and NAME.scale, fp32 [..., 1].

    The scale is what multiplies x (after its mean is subtracted, in a LayerNorm): 1 / rms. The scope is one call of a
    block or a head, which enters it itself, so that it holds in recomputation too. NotImplementedError inside
    torch.compile.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"The taps of norms ({', '.join(weights)}) are read and edited in eager mode: leave torch.compile out."
        )
    before = WATCHED.set(({id(weight): name for name, weight in weights.items()}, tap))
    try:
        yield
    finally:
        WATCHED.reset(before)


def watched(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tap, str] | None:
    """(x times its scale in fp32 at least, tap, name) of a norm that is watched; None of others."""
    found = None if torch.compiler.is_compiling() else WATCHED.get()
    if found is None or id(weight) not in found[0]:
        return None
    name, tap = found[0][id(weight)], found[1]
    wide = upcast(x)
    return wide * tap(f"{name}.scale", inverse_rms(wide, eps)), tap, name

"""Counter-based noise: each value is a function of (seed, row, step, token) alone, in integer tensor operations.

A generator with a state would make a row's draws depend on its neighbours and on the order of the steps. Here nothing
is advanced: the same four numbers give the same value in any batch, on any device, after any resume.
"""

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea and Flood, 2014): the increment and the two multipliers; products wrap around in int64.
_GAMMA, _FIRST, _SECOND = (_signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; that of int64 repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def random_bits(seeds: Tensor, rows: Tensor, steps: Tensor, width: int) -> Tensor:
    """int64 [B, width] of 64 independent bits each, from int64 seeds, rows and steps [B]."""
    keys = _mix(_mix(_mix(seeds + _GAMMA) + rows + _GAMMA) + steps + _GAMMA)
    return _mix(keys[:, None] + _GAMMA * torch.arange(1, width + 1, device=seeds.device))


def exponential(seeds: Tensor, rows: Tensor, steps: Tensor, width: int) -> Tensor:
    """fp32 [B, width] drawn from Exp(1), above 0 and finite.

    53 bits stand behind each value, so the small ones, which decide a race, have the full relative precision of fp32.
    """
    uniform = _shifted(random_bits(seeds, rows, steps, width), 11).float().clamp(min=0.5) * 2.0**-53
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))

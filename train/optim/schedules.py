"""Learning-rate schedules: pure functions of the step, returning a multiplier of the peak rate.

They take a Python number or a 0-d tensor and return the same kind, so that one function serves a plot, a loop and a
compiled step that must not wait for the device.
"""

import math
from numbers import Real
from typing import Any

import torch

SHAPES = ("linear", "sqrt", "cosine")


def warmup_stable_decay(
    step: int | float | torch.Tensor,
    *,
    total: int,
    warmup: int,
    decay_ratio: float | None = None,
    shape: str = "linear",
    floor: float = 0.0,
    base: int = 1,
) -> float | torch.Tensor:
    """Linear warmup, a constant phase at 1, then a decay to `floor`, where it stays past the end (arXiv 2404.06395).

    A constant rate is decay_ratio=0, and a cosine from the warmup to the end is shape="cosine". With base=1 the
    multiplier of step s is that after s full steps of warmup, and the last decay step is one short of the floor: total
    10 and warmup 2 give .5 1 1 .875 ... .125. base=0 begins 0, .5, 1.

    Args:
        step: The update being made, counted from `base`; a number or a tensor.
        total: The steps of the run, warmup and decay included.
        warmup: Steps of warmup; with warmup >= total the whole run is warmup.
        decay_ratio: The decay's share of `total`; None: it begins at the end of the warmup; 0: no decay. A decay that
            would begin inside the warmup begins where the warmup ends.
        shape: The form of the decay: "linear", "sqrt" (1 - sqrt(progress)) or "cosine".
        floor: The multiplier at the end, a share of the peak.
        base: 1 (the first step is never 0), or 0 for parity with trainers whose first step has rate 0.

    Returns:
        The multiplier of the peak rate, 0 to 1; a tensor if `step` is one.

    Raises:
        ValueError: An argument is out of range, or `shape` is another word.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape is {shape!r}; it must be one of {', '.join(SHAPES)}.")
    if base not in (0, 1):
        raise ValueError(f"base is {base!r}; it must be 1 (the first step is step 1) or 0.")
    if not (_is_whole(total, 1) and _is_whole(warmup, 0)):
        raise ValueError(
            f"total is {total!r} and warmup is {warmup!r}; they must be whole numbers of steps, total at least 1 and "
            "warmup at least 0."
        )
    if decay_ratio is not None and not _is_share(decay_ratio):
        raise ValueError(f"decay_ratio is {decay_ratio!r}; it must lie between 0 and 1, or be None.")
    if not _is_share(floor):
        raise ValueError(f"floor is {floor!r}; it must lie between 0 and 1, a share of the peak.")

    warmup = min(warmup, total)
    decay = total - warmup if decay_ratio is None else min(round(total * decay_ratio), total - warmup)
    # Steps before this one count from 0 either way: base moves only the warmup, by one step.
    done = step - base
    rise = _clip((done + base) / warmup) if warmup else _clip(done + 1)
    if decay == 0:
        return rise
    # From the remaining share, not 1 - progress: in fp32 the last steps of a long cosine would round to 0.
    left = _clip((total - done) / decay)
    if shape == "sqrt":
        left = left / (1 + (1 - left) ** 0.5)
    elif shape == "cosine":
        angle = math.pi / 2 * left
        left = (angle.sin() if isinstance(angle, torch.Tensor) else math.sin(angle)) ** 2
    return rise * (floor + (1 - floor) * left)


def _is_whole(number: Any, least: int) -> bool:
    return isinstance(number, Real) and float(number) >= least and float(number).is_integer()


def _is_share(number: Any) -> bool:
    return isinstance(number, Real) and 0.0 <= float(number) <= 1.0


def _clip(value: Any) -> Any:
    return value.clamp(0.0, 1.0) if isinstance(value, torch.Tensor) else min(max(value, 0.0), 1.0)

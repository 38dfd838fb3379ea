"""Training as functions: losses, optimizers, schedules and the step."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "fnmodels" / "siblings.py"))["require"](__file__, "fnmodels", "params")

from .optim import (
    Optimizer,
    adamw,
    apply_updates,
    clip_by_global_norm,
    global_norm,
    sgd,
    trainable_mask,
)
from .schedule import warmup_stable_decay
from .state import State, init_state

__all__ = [
    "Optimizer",
    "State",
    "adamw",
    "apply_updates",
    "clip_by_global_norm",
    "global_norm",
    "init_state",
    "sgd",
    "trainable_mask",
    "warmup_stable_decay",
]

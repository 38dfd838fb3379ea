"""Training as functions: losses, optimizers, schedules and the step."""

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

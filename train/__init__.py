"""Training as functions: losses, optimizers, schedules and the step."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "fnmodels" / "siblings.py"))["require"](__file__, "fnmodels", "params")

from .loss import cross_entropy, head_loss, next_token_loss
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
from .step import make_step

__all__ = [
    "Optimizer",
    "State",
    "adamw",
    "apply_updates",
    "clip_by_global_norm",
    "cross_entropy",
    "global_norm",
    "head_loss",
    "init_state",
    "make_step",
    "next_token_loss",
    "sgd",
    "trainable_mask",
    "warmup_stable_decay",
]

"""Optimizers as pairs of functions: `init(params)` and `update(grads, opt_state, params)`.

base          `Optimizer`, `apply_updates`, global norm and clipping
per_leaf      `leafwise`: an optimizer from the update rule of one leaf (lion, muon, adafactor)
adamw (and sgd), lion, muon, adafactor           one rule per file
transforms    gradient transforms, chained before an optimizer: `clip_norm`, `masked`, `chain`
wrappers      optimizers around optimizers: `partition`, `with_ema`, `with_master`
schedules     learning-rate multipliers as functions of the step
stochastic_rounding   bf16 parameters without an fp32 copy
"""

from .base import clip_by_global_norm, global_norm, trainable_mask
from .small_state import with_small_state
from .stochastic_rounding import stochastic_round, with_stochastic_rounding
from .transforms import clip_norm, masked
from .wrappers import averaged, with_master

__all__ = [
    "averaged",
    "clip_by_global_norm",
    "clip_norm",
    "global_norm",
    "masked",
    "stochastic_round",
    "trainable_mask",
    "with_master",
    "with_small_state",
    "with_stochastic_rounding",
]

"""Training as functions: losses, optimizers, schedules and the step."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "fnmodels" / "siblings.py"))["require"](__file__, "fnmodels", "params")

from . import checkpoint, sharded
from .adafactor import adafactor
from .balance import Balance, balance_loss, router_z_loss, update_bias
from .chain import chain, clip_norm, masked
from .combine import averaged, partition, with_ema, with_master
from .distill import distill, distillation_loss, token_divergence
from .forward import make_eval_step, make_forward_only
from .fused import adamw, sgd
from .head import head_loss
from .lion import lion
from .logprobs import document_sums, head_logprobs, logprobs, routed_logprobs, token_logprobs
from .loss import next_token_loss
from .mtp import look_ahead, mtp_loss
from .muon import muon
from .optim import Optimizer, apply_updates, clip_by_global_norm, global_norm, trainable_mask
from .policy import dpo_loss, group_advantages, policy_loss
from .randomness import random_state, set_random_state
from .rounding import stochastic_round, with_stochastic_rounding
from .saver import Saver
from .schedule import warmup_stable_decay
from .state import State, init_state
from .step import make_step
from .token_loss import cross_entropy

__all__ = [
    "Balance",
    "Optimizer",
    "Saver",
    "State",
    "adafactor",
    "adamw",
    "apply_updates",
    "averaged",
    "balance_loss",
    "chain",
    "checkpoint",
    "clip_by_global_norm",
    "clip_norm",
    "cross_entropy",
    "distill",
    "distillation_loss",
    "document_sums",
    "dpo_loss",
    "global_norm",
    "group_advantages",
    "head_logprobs",
    "head_loss",
    "init_state",
    "lion",
    "logprobs",
    "look_ahead",
    "make_eval_step",
    "make_forward_only",
    "make_step",
    "masked",
    "mtp_loss",
    "muon",
    "next_token_loss",
    "partition",
    "policy_loss",
    "random_state",
    "routed_logprobs",
    "router_z_loss",
    "set_random_state",
    "sgd",
    "sharded",
    "stochastic_round",
    "token_divergence",
    "token_logprobs",
    "trainable_mask",
    "update_bias",
    "warmup_stable_decay",
    "with_ema",
    "with_master",
    "with_stochastic_rounding",
]

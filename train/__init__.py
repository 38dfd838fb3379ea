"""Training as functions: losses, optimizers, schedules and the step.

step         `make_step`, `make_eval_step`, `make_forward_only`
loss         how a run calls the model inside a loss      gradients   sums over microbatches
batch        keys and microbatches of a batch             losses/     the losses
update       from summed gradients to the next State      state       `State`: step, params, optimizer state
remat        `layer_fn`: recomputation and compilation    engine      the same for loops of other programs
offload      tensors of a tree to host memory and back  verl/     the engine as a backend of verl
exports      weights for a rollout                       deltas    what changed in them

generation/                             drawing tokens, with a cache
optim/  data/  checkpoint/              what the step is made of; `comm/` and `parallel/` run it on many processes
job/  commands/  eval/  simulate/       programs on top: `python -m train`, whose command line is `cli`
"""

from train import _interrupt

_interrupt.exit_in_one_line()  # before the imports that take seconds

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "fnmodels" / "_shadowing.py"))["require"](__file__, "fnmodels", "params")

from fnmodels.ops.float8 import float8_layers
from train import checkpoint
from train.batch import Batch
from train.checkpoint import sharded
from train.checkpoint.background import Saver
from train.checkpoint.rng_state import random_state, set_random_state
from train.data.token_budget import token_budget, unpacked
from train.generation.beam import beam_search
from train.generation.loops import generate, serve, stream
from train.generation.requests import Generations, Request, best_of
from train.generation.sampling import Sampling, sample_step
from train.generation.serve import ServeState, serve_step
from train.generation.speculative import speculate
from train.handover.deltas import Delta, apply_deltas, deltas
from train.job.cpu_memory import keep_freed_memory
from train.loss import Balance, ModelLoss, beside, run_options
from train.losses.cross_entropy import cross_entropy
from train.losses.distillation import distill, distillation_loss, token_divergence
from train.losses.documents import (
    answer_loss,
    classification_loss,
    contrastive_loss,
    document_batch,
    token_classification_loss,
)
from train.losses.flow_matching import flow_matching_loss, flow_noise
from train.losses.image_text import image_text_batch, image_text_loss
from train.losses.lm_head import head_loss
from train.losses.logprobs import document_sums, head_logprobs, logprobs, routed_logprobs, token_logprobs
from train.losses.masked_tokens import mask_tokens
from train.losses.moe_balance import balance_loss, router_z_loss, update_bias
from train.losses.multi_token import look_ahead, mtp_loss
from train.losses.next_token import next_token_loss
from train.losses.output_loss import OutputLoss, logprob_loss
from train.losses.pairs import pair_loss
from train.losses.policy import dpo_loss, group_advantages, policy_loss
from train.losses.values import advantages, reward_loss, token_values, value_loss
from train.optim.adafactor import adafactor
from train.optim.adamw import adamw, sgd
from train.optim.base import Optimizer, apply_updates, clip_by_global_norm, global_norm, trainable_mask
from train.optim.lion import lion
from train.optim.muon import muon
from train.optim.schedules import warmup_stable_decay
from train.optim.small_state import with_small_state
from train.optim.stochastic_rounding import stochastic_round, with_stochastic_rounding
from train.optim.transforms import chain, clip_norm, masked
from train.optim.wrappers import averaged, partition, with_ema, with_master
from train.state import State, init_state
from train.step import make_eval_step, make_forward_only, make_step, pure_step

__all__ = ["Batch", "State", "init_state", "make_eval_step", "make_forward_only", "make_step", "pure_step"]
__all__ += ["float8_layers", "keep_freed_memory"]
__all__ += ["ModelLoss", "beside", "run_options", "cross_entropy", "head_loss"]
__all__ += ["next_token_loss", "mtp_loss", "look_ahead", "mask_tokens"]
__all__ += ["Balance", "balance_loss", "router_z_loss", "update_bias"]
__all__ += ["logprob_loss", "logprobs", "head_logprobs", "token_logprobs", "routed_logprobs", "document_sums"]
__all__ += ["OutputLoss", "token_values", "value_loss", "reward_loss", "advantages"]
__all__ += ["answer_loss", "classification_loss", "contrastive_loss", "document_batch", "token_classification_loss"]
__all__ += ["pair_loss", "flow_matching_loss", "flow_noise", "image_text_batch", "image_text_loss"]
__all__ += ["dpo_loss", "policy_loss", "group_advantages", "distill", "distillation_loss", "token_divergence"]
__all__ += ["Optimizer", "adafactor", "adamw", "lion", "muon", "sgd", "warmup_stable_decay"]
__all__ += ["apply_updates", "clip_by_global_norm", "global_norm", "trainable_mask"]
__all__ += ["token_budget", "unpacked", "Delta", "deltas", "apply_deltas"]
__all__ += ["chain", "clip_norm", "masked", "partition", "averaged", "with_ema", "with_master"]
__all__ += ["with_stochastic_rounding", "stochastic_round", "with_small_state"]
__all__ += ["Saver", "checkpoint", "sharded", "random_state", "set_random_state"]
__all__ += ["Generations", "Request", "Sampling", "ServeState", "generate", "stream", "serve", "serve_step"]
__all__ += ["sample_step", "beam_search", "best_of", "speculate"]

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
from train.data.token_budget import token_budget, unpacked
from train.generation.loops import generate, serve, stream
from train.generation.requests import Generations, Request
from train.generation.sampling import Sampling
from train.generation.serve import serve_step
from train.generation.transcribe import transcribe
from train.handover.deltas import Delta, apply_deltas, deltas
from train.job.cpu_memory import keep_freed_memory
from train.losses.cross_entropy import cross_entropy
from train.losses.distillation import distill
from train.losses.documents import classification_loss, contrastive_loss, document_batch
from train.losses.flow_matching import flow_matching_loss
from train.losses.image_text import image_text_loss
from train.losses.logprobs import logprobs, token_logprobs
from train.losses.masked_tokens import mask_tokens
from train.losses.multi_token import mtp_loss
from train.losses.next_token import next_token_loss
from train.losses.output_loss import logprob_loss
from train.losses.policy import dpo_loss, policy_loss
from train.optim.adafactor import adafactor
from train.optim.adamw import adamw, sgd
from train.optim.base import Optimizer, apply_updates
from train.optim.lion import lion
from train.optim.muon import muon
from train.optim.schedules import warmup_stable_decay
from train.optim.transforms import chain
from train.optim.wrappers import partition, with_ema
from train.run_options import Balance
from train.state import State, init_state
from train.step import make_eval_step, make_forward_only, make_step, pure_step

__all__ = ["Batch", "State", "init_state", "make_eval_step", "make_forward_only", "make_step", "pure_step"]
__all__ += ["float8_layers", "keep_freed_memory"]
__all__ += ["cross_entropy"]
__all__ += ["next_token_loss", "mtp_loss", "mask_tokens"]
__all__ += ["Balance"]
__all__ += ["logprob_loss", "logprobs", "token_logprobs"]
__all__ += ["classification_loss", "contrastive_loss", "document_batch"]
__all__ += ["flow_matching_loss", "image_text_loss"]
__all__ += ["dpo_loss", "policy_loss", "distill"]
__all__ += ["Optimizer", "adafactor", "adamw", "lion", "muon", "sgd", "warmup_stable_decay"]
__all__ += ["apply_updates"]
__all__ += ["token_budget", "unpacked", "Delta", "deltas", "apply_deltas"]
__all__ += ["chain", "partition", "with_ema"]
__all__ += ["Saver", "checkpoint", "sharded"]
__all__ += ["Generations", "Request", "Sampling", "generate", "stream", "serve", "serve_step", "transcribe"]

"""Pure tensor functions, one idea per file. They know nothing of families, configurations or meshes.

`attention/` holds the attention kernels, `moe/` routers, dispatch and experts, `recurrent/` the linear recurrences.
`linear`, `norm`, `rotary`, `mlp`, `embedding`, `qkv` (between residual stream and heads), `mla` (multi-head latent
attention) and `indexer` (a choice of the keys to attend to) are what blocks compute with. `cpu/` holds what makes them
fast on CPUs, `invariant/` their batch-invariant forms. `autograd_guard` turns the errors of kernels without second
derivatives into sentences; `torch_internals` is the only file that may use private names of torch. What most blocks use
can be imported from here.
"""

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.embedding import embed_tokens, look_up
from fnmodels.ops.mla import latent_scale
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp, plain_mlp
from fnmodels.ops.norm import layer_norm, rms_norm, rms_norm_fp32_weight, rms_norm_zero_centered
from fnmodels.ops.qkv import project_out, project_qkv, split_heads
from fnmodels.ops.rotary import Rope, apply_rotary, apply_rotary_interleaved, no_rotation, rotary_table

__all__ = ["ACTIVATIONS", "gated_mlp", "plain_mlp", "embed_tokens", "look_up", "latent_scale"]
__all__ += ["layer_norm", "rms_norm", "rms_norm_fp32_weight", "rms_norm_zero_centered", "upcast"]
__all__ += ["project_out", "project_qkv", "split_heads"]
__all__ += ["Rope", "apply_rotary", "apply_rotary_interleaved", "no_rotation", "rotary_table"]

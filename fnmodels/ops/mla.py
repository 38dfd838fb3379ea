"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and values from latents.

Keys and values of all heads are projected from one narrow latent per token, which is what a cache would hold. RoPE
cannot be applied to the latent, so each key has two parts: one without position, from the latent, and one with RoPE,
from the token itself and shared by all heads.

P is the width of the part without position, R that of the part with RoPE, Hv that of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .linear import linear
from .norm import rms_norm
from .qkv import split_heads
from .rotary import Rope, yarn_scale

LATENT_EPS = 1e-6  # of the latents' norms, whatever eps the config sets for the others


def latent_qkv(
    weights: Mapping[str, Tensor],
    x: Tensor,
    freqs: Tensor,
    *,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    rotate: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [B, S, N, P + R], v [B, S, N, Hv] of x [B, S, D].

    weights: queries have a latent of their own if there is a `q_a_proj`; q_a_bias and kv_a_bias are optional.
    freqs: table [B, S, R/2, 2]. rotate: `apply_rotary` or `apply_rotary_interleaved`.
    """
    if "q_a_proj" in weights:
        latent = linear(x, weights["q_a_proj"], weights.get("q_a_bias"))
        q = linear(rms_norm(latent, weights["q_a_layernorm"], eps=LATENT_EPS), weights["q_b_proj"])
    else:
        q = linear(x, weights["q_proj"])
    q_nope, q_rope = split_heads(q, nope_dim + rope_dim).split([nope_dim, rope_dim], dim=-1)

    joint = linear(x, weights["kv_a_proj"], weights.get("kv_a_bias"))
    latent, shared = joint.split([joint.shape[-1] - rope_dim, rope_dim], dim=-1)
    kv = linear(rms_norm(latent, weights["kv_a_layernorm"], eps=LATENT_EPS), weights["kv_b_proj"])
    k_nope, v = split_heads(kv, nope_dim + value_dim).split([nope_dim, value_dim], dim=-1)
    k_rope = rotate(shared.unsqueeze(-2), freqs).expand(*k_nope.shape[:-1], rope_dim)

    q = torch.cat((q_nope, rotate(q_rope, freqs)), dim=-1)
    return q, torch.cat((k_nope, k_rope), dim=-1), v


def latent_scale(rope: Rope, qk_dim: int) -> float:
    """The scale of the scores: 1 / sqrt(P + R), times the square of YaRN's temperature if `mscale_all_dim` is set.

    The temperature is not in the rotary tables, because it applies to the part without position too.
    """
    temperature = yarn_scale(rope.factor, rope.mscale_all_dim) if rope.kind == "yarn" else 1.0
    return qk_dim**-0.5 * temperature**2

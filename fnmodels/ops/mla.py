"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and values from latents.

Keys and values of all heads are projected from one narrow latent per token, which is what a cache holds. RoPE cannot be
applied to the latent, so each key has two parts: one without position, from the latent, and one with RoPE, from the
token itself and shared by all heads.

P is the width of the part without position, R that of the part with RoPE, Hv that of a value.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from .attention.choice import Choice, reader_of_choices
from .linear import linear
from .norm import rms_norm
from .qkv import split_heads
from .rotary import Rope, yarn_scale

LATENT_EPS = 1e-6  # of the latents' norms in most models, whatever eps the config sets for the others

Rotate = Callable[[Tensor, Tensor], Tensor]


class Widths(NamedTuple):
    """Widths of a head: P and R of queries and keys, Hv of values.

    latent_factor: multiplies the normalized latent of keys and values (LongCat-Flash, arXiv 2509.01322, section 2.1.2).
    eps, query_eps: of the norms of that latent and of the queries'.
    """

    nope: int
    rope: int
    value: int
    latent_factor: float = 1.0
    eps: float = LATENT_EPS
    query_eps: float = LATENT_EPS


def query_latent(weights: Mapping[str, Tensor], x: Tensor, eps: float = LATENT_EPS) -> Tensor:
    """The normalized latent [B, S, rank] that queries of x [B, S, D] are projected from; x where they have none."""
    if "q_a_proj" not in weights:
        return x
    latent = linear(x, weights["q_a_proj"], weights.get("q_a_bias"))
    return rms_norm(latent, weights["q_a_layernorm"], eps=eps)


def latent_queries(
    weights: Mapping[str, Tensor], x: Tensor, freqs: Tensor, *, widths: Widths, rotate: Rotate
) -> Tensor:
    """Queries [B, S, N, P + R] of x [B, S, D], from a latent of their own if there is a `q_a_proj`.

    freqs: table [B, S, R/2, 2]. rotate: `apply_rotary` or `apply_rotary_interleaved`. Biases q_a_bias and kv_a_bias of
    `weights` are optional.
    """
    q = linear(query_latent(weights, x, widths.query_eps), weights["q_b_proj" if "q_a_proj" in weights else "q_proj"])
    return rotated_queries(split_heads(q, widths.nope + widths.rope), freqs, widths=widths, rotate=rotate)


def rotated_queries(q: Tensor, freqs: Tensor, *, widths: Widths, rotate: Rotate) -> Tensor:
    """Queries q [B, S, N, P + R] whose last R dimensions are rotated."""
    q_nope, q_rope = q.split([widths.nope, widths.rope], dim=-1)
    return torch.cat((q_nope, rotate(q_rope, freqs)), dim=-1)


def latent_keys(
    weights: Mapping[str, Tensor], x: Tensor, freqs: Tensor, *, widths: Widths, rotate: Rotate
) -> tuple[Tensor, Tensor]:
    """The entry of a cache for x [B, S, D]: the normalized latent [B, S, rank] and the rotated part [B, S, R]."""
    joint = linear(x, weights["kv_a_proj"], weights.get("kv_a_bias"))
    latent, shared = joint.split([joint.shape[-1] - widths.rope, widths.rope], dim=-1)
    latent = rms_norm(latent, weights["kv_a_layernorm"], eps=widths.eps)
    latent = latent if widths.latent_factor == 1.0 else latent * widths.latent_factor
    return latent, rotate(shared.unsqueeze(-2), freqs).squeeze(-2)


def expanded(weights: Mapping[str, Tensor], latent: Tensor, rope: Tensor, *, widths: Widths) -> tuple[Tensor, Tensor]:
    """k [B, K, N, P + R] and v [B, K, N, Hv] of the `latent_keys` of K tokens."""
    kv = linear(latent, weights["kv_b_proj"])
    k_nope, v = split_heads(kv, widths.nope + widths.value).split([widths.nope, widths.value], dim=-1)
    k_rope = rope.unsqueeze(-2).expand(*k_nope.shape[:-1], rope.shape[-1])
    return torch.cat((k_nope, k_rope), dim=-1), v


def absorbed(
    weights: Mapping[str, Tensor], q: Tensor, latent: Tensor, rope: Tensor, *, widths: Widths
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """q, k, v of attention over latents, which gives the results of the expanded keys, and what makes these of it.

    q [B, S, N, rank + R], k [B, K, 1, rank + R], v [B, K, 1, rank]; then a function from [B, S, N, rank] to
    [B, S, N, Hv]. The projection of the latents is applied to queries and results instead of to every key.
    """
    weight = weights["kv_b_proj"].unflatten(0, (q.shape[-2], -1))  # [N, P + Hv, rank]
    inner = torch.einsum("bsnp,npr->bsnr", q[..., : widths.nope], weight[:, : widths.nope])
    q = torch.cat((inner, q[..., widths.nope :]), dim=-1)
    k = torch.cat((latent, rope), dim=-1).unsqueeze(-2)
    return q, k, latent.unsqueeze(-2), lambda mixed: torch.einsum("bsnr,nvr->bsnv", mixed, weight[:, widths.nope :])


def can_absorb(weight: object) -> TypeGuard[Tensor]:
    """Whether kv_b_proj is a plain tensor, and not an adapter or a shard, which only `linear` can apply."""
    return isinstance(weight, Tensor)


def pays_to_absorb(weight: object, queries: int, keys: int, *, widths: Widths) -> bool:
    """Whether `absorbed` multiplies less than `expanded`: few queries meet many keys. weight: kv_b_proj.

    False for a weight that `can_absorb` refuses.
    """
    if not can_absorb(weight):
        return False
    rank, per_head = weight.shape[1], widths.nope + widths.value
    return queries * (rank * per_head + keys * (2 * rank + widths.rope)) < keys * (
        rank * per_head + queries * (per_head + widths.rope)
    )


def pays_to_gather(weight: object, choice: object, heads: int, widths: Widths, kernel: object) -> bool:
    """Whether chosen latents are gathered, which all heads share, instead of the wider keys of every head.

    weight: kv_b_proj. False for a weight that `can_absorb` refuses, for a mask that is no `Choice`, and for
    kernel="flex", which gathers nothing.
    """
    if not (isinstance(choice, Choice) and can_absorb(weight)) or reader_of_choices(kernel) == "flex":
        return False
    cost = (2 * weight.shape[1] + widths.rope) / (widths.nope + widths.rope + widths.value)
    return kernel != "auto" or choice.pays(heads, 1, cost=cost)


def latent_scale(rope: Rope, qk_dim: int) -> float:
    """The scale of the scores: 1 / sqrt(P + R), times the square of YaRN's temperature if `mscale_all_dim` is set.

    The temperature is not in the rotary tables, because it applies to the part without position too.
    """
    temperature = yarn_scale(rope.factor, rope.mscale_all_dim) if rope.kind == "yarn" else 1.0
    return qk_dim**-0.5 * temperature**2

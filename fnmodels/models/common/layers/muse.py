"""What the texts of Muse (Meta, 2026) share: fields of config.json, kinds of layers, attention and both ends.

Embeddings are normed without a weight, and so are queries, which are then scaled, and keys; the result of attention is
multiplied by the sigmoid of a gate per element. Every fourth layer from the end sees all tokens without a rotary
embedding; the others slide. Logits are scaled, then soft-capped.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.ops import apply_rotary, embed_tokens, project_out, project_qkv, split_heads
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight
from fnmodels.tree import Tree

from .. import decoder
from ..config_json import ConfigJson, Fields, shown
from ..context import Context
from ..family import parsed
from ..rope_config import rope_to_hf
from ..spec import Leaf, usual_attention, weight

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, kw_only=True)
class MuseConfig(decoder.BaseConfig):
    """The Config fields of every text of Muse."""

    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8  # of the norms after sublayers
    attention_bias: bool = False
    query_scale: float  # of normed queries, beside 1 / sqrt(head_dim)
    logit_scale: float  # before the soft-cap
    final_softcap: float = 20.0
    hidden_act: str = "silu"
    sliding_window: int | None = 2048


def fields_from_hf(fields: Fields, usual: dict[str, Any], *, query_scale: float, logit_scale: float) -> dict[str, Any]:
    """The fields of `MuseConfig`, its layer_kinds without a word of their MLP. usual: those of `decoder.base_fields`.

    query_scale, logit_scale: the family's defaults.
    """
    layers = usual["num_hidden_layers"]
    default = [(layers - 1 - i) % 4 != 0 for i in range(layers)]
    slides = decoder.sliding_layers(fields, default)
    turns = _turning(fields, default, usual["rope"].theta)
    return {
        **usual,
        **fields.plain(rms_norm_eps=1e-5, attention_bias=False, sliding_window=2048),
        "post_norm_eps": fields.number("post_norm_eps", 1e-8),
        "query_scale": fields.number("qk_scale_factor", query_scale),
        "logit_scale": fields.number("output_multiplier", logit_scale),
        "final_softcap": fields.number("final_logit_softcapping", 20.0),
        "layer_kinds": tuple(
            ("sliding" if near else "full") + "_nope" * (not turn) for near, turn in zip(slides, turns, strict=True)
        ),
    }


def fields_to_hf(config: MuseConfig) -> ConfigJson:
    """What `fields_from_hf` reads back, but for the fields that have the same name in a Config."""
    found = parsed(config.layer_kinds)
    return {
        "qk_scale_factor": config.query_scale,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.final_softcap,
        "layer_types": decoder.layer_types([kind.slides for kind in found]),
        "layer_rope_theta": [config.rope.theta if kind.rotates else 0 for kind in found],
        "rope_parameters": rope_to_hf(config.rope),
    }


SAVED = ("rms_norm_eps", "attention_bias", "sliding_window", "post_norm_eps")  # under the same name in config.json


def _turning(fields: Fields, default: list[bool], theta: float) -> list[bool]:
    """Whether each layer is rotary, by `layer_rope_theta`: 0, or the model's theta, for one table serves all."""
    thetas = fields.take("layer_rope_theta", None)
    if thetas is None:
        return default
    if not isinstance(thetas, list) or len(thetas) != len(default) or any(t not in (0, theta) for t in thetas):
        raise ConfigError(
            f"{fields.where}: 'layer_rope_theta' is {shown(thetas)}, but must have 0 or {theta:g}, the rope_theta of "
            f"the model, for each of {len(default)} layers."
        )
    return [t != 0 for t in thetas]


def attention_leaves(config: Any) -> dict[str, Leaf]:
    """The parameters of attention: the usual ones, and a gate for each element of the heads."""
    D, H, biased = config.hidden_size, config.head_dim, config.attention_bias
    gates = (config.num_attention_heads * H, D)
    return usual_attention(config, qkv_bias=biased, o_bias=biased) | {
        "gate_proj": weight(gates, ("heads", "embed"), config.initializer_range, unit=H)
    }


def attend(
    weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: MuseConfig, ctx: Context, *, normed: bool = False
) -> Tensor:
    """Attention of the normed x [B, S, D], gated and projected: [B, S, D]. normed: each head, before the gate."""
    eps = config.rms_norm_eps
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    q, k = rms_norm(q, None, eps=eps) * config.query_scale, rms_norm(k, None, eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    gate = split_heads(elementwise(torch.sigmoid, linear(x, weights["gate_proj"])), config.head_dim)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    return project_out(weights, (rms_norm(mixed, None, eps=eps) if normed else mixed) * gate)


def embed(params: Tree, inputs: Any, /, *, config: MuseConfig) -> Tensor:
    """x [B, S, D]: normed token embeddings, zeros for padding; given embeddings are not normed."""
    tokens = inputs["tokens"] if isinstance(inputs, dict) else inputs
    x = embed_tokens(params["embed_tokens"], inputs)
    if tokens.is_floating_point():
        return x
    return rms_norm(decoder.without_padding(x, inputs), None, eps=config.rms_norm_eps)


def unembed(params: Tree, x: Tensor, /, *, config: MuseConfig) -> Tensor:
    """Final norm, output head, scale and soft-cap: logits [B, S, V]."""
    logits = decoder.project(params, rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps), config)
    if not decoder.is_lm(config):
        return logits
    cap = config.final_softcap
    return cap * elementwise(torch.tanh, logits * config.logit_scale / cap)

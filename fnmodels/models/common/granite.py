"""Common parts of the Granite families: multipliers of embeddings, residual branches, attention scores and logits.

They come from maximal update parametrization (arXiv 2203.03466).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context
from fnmodels.ops import apply_rotary, embed_tokens, project_out, project_qkv
from fnmodels.tree import Tree

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


@dataclass(frozen=True)
class MultipliedConfig(decoder.BaseConfig):
    """The Config fields common to the Granite families."""

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # the scale of scores, instead of 1 / sqrt(head_dim)
    logits_scaling: float = 1.0  # logits are divided by it


def granite_fields(fields: Fields, model_types: tuple[str, ...]) -> dict[str, Any]:
    """The fields of MultipliedConfig except layer_kinds and extra, from a config.json."""
    return decoder.base_fields(fields, model_types, max_positions=2048) | {
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_bias": fields.boolean("attention_bias", False),
        **{name: fields.number(name, 1.0) for name in MULTIPLIERS},
    }


def granite_to_hf(config: MultipliedConfig, architecture: str, *names: str, **rest: Any) -> ConfigJson:
    """A config.json in the current dialect; arguments as for `decoder.decoder_to_hf`."""
    own = ("rms_norm_eps", "attention_bias", "hidden_act", *MULTIPLIERS)
    return decoder.decoder_to_hf(config, architecture, *own, *names, **rest)


def embed(params: Tree, inputs: Tree, /, *, config: MultipliedConfig) -> Tensor:
    """x [B, S, D]: token or given embeddings times embedding_multiplier, as in transformers."""
    return embed_tokens(params["embed_tokens"], inputs) * config.embedding_multiplier


def attend(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: MultipliedConfig, ctx: Context) -> Tensor:
    """Attention of the normed x [B, S, D], with the output projection: [B, S, D]."""
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    return project_out(weights, ctx.attend(q, k, v, mask, scale=config.attention_multiplier))


def unembed(params: Tree, x: Tensor, /, *, config: Any) -> Tensor:
    """Final norm, output head and logits_scaling: logits [B, S, V]."""
    logits = decoder.unembed(params, x, config=config)
    return logits / config.logits_scaling if decoder.is_lm(config) else logits

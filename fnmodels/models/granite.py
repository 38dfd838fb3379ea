"""Granite 3 (IBM): the Llama block with multipliers of embeddings, residual branches, attention scores and logits.

The multipliers come from maximal update parametrization (arXiv 2203.03466).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, hf_names, kinds  # noqa: F401
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, usual_attention, usual_mlp
from fnmodels.ops import apply_rotary, embed_tokens, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("granite",)
TAPS = ("attention", "middle", "mlp")


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and multipliers."""

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # the scale of scores, instead of 1 / sqrt(head_dim)
    logits_scaling: float = 1.0  # logits are divided by it

    @staticmethod
    def from_hf(values: dict[str, Any]) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        multipliers: dict[str, Any] = {name: fields.number(name, 1.0) for name in _MULTIPLIERS}
        config = Config(
            **decoder.base_fields(fields, MODEL_TYPES, max_positions=2048),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            **multipliers,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "attention_bias", "mlp_bias", "hidden_act", *_MULTIPLIERS)
        return decoder.decoder_to_hf(self, "GraniteForCausalLM", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    layer = layer_leaves(config.hidden_size, attention, usual_mlp(config, biases=config.mlp_bias))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token or given embeddings times embedding_multiplier, as in transformers."""
    return embed_tokens(params["embed_tokens"], inputs) * config.embedding_multiplier


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps, share = layer["attention"], config.rms_norm_eps, config.residual_multiplier
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.attention_multiplier)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed) * share))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act) * share)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm, output head and logits_scaling: logits [B, S, V]."""
    return decoder.unembed(params, x, config=config) / config.logits_scaling

"""Granite 3 (IBM): the Llama block with multipliers of embeddings, residual branches, attention scores and logits."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, hf_names, kinds  # noqa: F401
from fnmodels.models.common.granite import (  # noqa: F401
    MultipliedConfig,
    attend,
    embed,
    granite_fields,
    granite_to_hf,
    unembed,
)
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, usual_attention, usual_mlp
from fnmodels.ops import gated_mlp, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("granite",)


@dataclass(frozen=True)
class Config(MultipliedConfig):
    """Sizes and multipliers."""

    mlp_bias: bool = False

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        config = Config(**granite_fields(fields, MODEL_TYPES), mlp_bias=fields.boolean("mlp_bias", False))
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return granite_to_hf(self, "GraniteForCausalLM", "mlp_bias")


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    layer = layer_leaves(config.hidden_size, attention, usual_mlp(config, biases=config.mlp_bias))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, share = config.rms_norm_eps, config.residual_multiplier
    mixed = attend(layer["attention"], rms_norm(x, layer["input_layernorm"], eps=eps), mask, freqs, config, ctx)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed * share))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap) * share)

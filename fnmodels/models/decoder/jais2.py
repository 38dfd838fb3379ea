"""Jais 2 (Inception, MBZUAI; 2025): Llama's attention between LayerNorms, and a squared ReLU MLP without a gate."""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, hf_names, kinds, older  # noqa: F401
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, plain_mlp_leaves, usual_attention
from fnmodels.ops import apply_rotary
from fnmodels.tree import Tree

MODEL_TYPES = ("jais2",)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    mlp_bias: bool = True
    hidden_act: str = "relu2"
    max_position_embeddings: int = 8192

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=8192, activation="relu2")
        own = fields.plain(layer_norm_eps=1e-5, attention_bias=True, mlp_bias=True)
        return decoder.finished(Config(**usual, **own), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("layer_norm_eps", "attention_bias", "mlp_bias", "hidden_act")
        return decoder.decoder_to_hf(self, "Jais2ForCausalLM", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, inner, on = config.hidden_size, config.intermediate_size, config.attention_bias
    mlp = plain_mlp_leaves(D, inner, std=config.initializer_range, biases=config.mlp_bias)
    layer = layer_leaves(D, usual_attention(config, qkv_bias=on, o_bias=on), mlp, norm_bias=True)
    return decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    rotate, scale = functools.partial(apply_rotary, table=freqs), config.head_dim**-0.5
    return older.layer_norm_layer(layer, x, mask, ctx, config=config, scale=scale, rotate=rotate)


unembed = decoder.unembed_layer_norm

PRESETS = {
    "jais-2-8b": {"model_type": "jais2", "vocab_size": 150272, "hidden_size": 3328, "intermediate_size": 26624}
    | {"num_hidden_layers": 32, "num_attention_heads": 26, "num_key_value_heads": 26}
}

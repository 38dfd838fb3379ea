"""Helium 1 (Kyutai, 2025): the Llama block with interleaved rotary embedding, and norms whose weight is fp32."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, hf_names, kinds  # noqa: F401
from fnmodels.models.common.decoder import unembed_fp32_weight as unembed  # noqa: F401
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, usual_attention, usual_mlp
from fnmodels.ops import apply_rotary_interleaved, gated_mlp, project_out, project_qkv, rms_norm_fp32_weight
from fnmodels.tree import Tree

MODEL_TYPES = ("helium",)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rms_norm_eps: float = 1e-8
    attention_bias: bool = False  # of q, k and v
    mlp_bias: bool = False
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_width(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        defaults: Any = {"theta": 1e5, "max_positions": 4096, "kv_heads": 20, "head_dim": 128}
        usual = decoder.base_fields(fields, MODEL_TYPES, **defaults)
        own = fields.plain(rms_norm_eps=1e-8, attention_bias=False, mlp_bias=False)
        return decoder.finished(Config(**usual, **own), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "attention_bias", "mlp_bias", "hidden_act")
        return decoder.decoder_to_hf(self, "HeliumForCausalLM", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias)
    layer = layer_leaves(config.hidden_size, attention, usual_mlp(config, biases=config.mlp_bias))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = rms_norm_fp32_weight(x, layer["input_layernorm"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm_fp32_weight(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


PRESETS = {
    "helium-1-2b": {"model_type": "helium", "vocab_size": 64000, "hidden_size": 2048, "intermediate_size": 8192}
    | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
}

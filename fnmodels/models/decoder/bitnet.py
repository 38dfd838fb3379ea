"""BitNet b1.58 (arXiv 2402.17764, 2504.12285): the Llama block with a norm before each output projection.

Published weights are -1, 0 or 1 times a number per matrix, which `params` reads; the models quantize what linear layers
read to int8 too, which is exact here.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, hf_names, kinds, unembed  # noqa: F401
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, norm, usual_attention, usual_mlp
from fnmodels.ops import apply_rotary, project_qkv, rms_norm
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import acting_mlp, glu
from fnmodels.tree import Tree

MODEL_TYPES = ("bitnet",)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_width(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        defaults: Any = {"theta": 5e5, "max_positions": 2048, "kv_heads": 5, "activation": "relu2"}
        usual = decoder.base_fields(fields, MODEL_TYPES, **defaults)
        return decoder.finished(Config(**usual, **fields.plain(rms_norm_eps=1e-5, attention_bias=False)), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return decoder.decoder_to_hf(self, "BitNetForCausalLM", "rms_norm_eps", "attention_bias", "hidden_act")


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    attention["attn_sub_norm"] = norm(config.hidden_size, "heads", unit=config.head_dim)
    mlp = usual_mlp(config) | {"ffn_sub_norm": norm(config.intermediate_size, "mlp")}
    layer = layer_leaves(config.hidden_size, attention, mlp)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, mlp = config.rms_norm_eps, layer["attention"], layer["mlp"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    mixed = rms_norm(mixed.flatten(-2), weights["attn_sub_norm"], eps=eps)
    x = ctx.tap("middle", x + ctx.tap("attention", linear(mixed, weights["o_proj"], weights.get("o_bias"))))

    def act(gate: Tensor, up: Tensor) -> Tensor:
        return rms_norm(glu(gate, up, activation=config.hidden_act), mlp["ffn_sub_norm"], eps=eps)

    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", acting_mlp(mlp, normed, act=act, tap=ctx.tap))


PRESETS = {
    "bitnet-b1.58-2b-4t": {"model_type": "bitnet", "vocab_size": 128256, "hidden_size": 2560, "num_hidden_layers": 30}
    | {"intermediate_size": 6912, "num_attention_heads": 20, "num_key_value_heads": 5, "tie_word_embeddings": True}
    | {"max_position_embeddings": 4096, "rope_theta": 5e5}
}

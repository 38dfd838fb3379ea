"""Nemotron-4 and Minitron (NVIDIA; arXiv 2402.16819, 2406.11704, 2407.14679).

A pre-norm decoder with LayerNorms that multiply by 1 + weight, grouped-query attention, rotary embedding of half of
each head, and an MLP without a gate with the squared ReLU.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, hf_names, kinds  # noqa: F401
from fnmodels.models.common.spec import bias, decoder_leaves, norm, plain_mlp_leaves, usual_attention
from fnmodels.ops import Rope, apply_rotary, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.tree import Tree

MODEL_TYPES = ("nemotron",)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rope: Rope = Rope(partial=0.5)  # noqa: RUF009 - frozen
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "relu2"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.0134

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, partial=0.5, max_positions=4096, activation="relu2")
        usual["initializer_range"] = fields.number("initializer_range", 0.0134, above=-1e-9)
        epsilon = fields.number("norm_eps", 1e-5)
        # Duplicate fields in published files and conversions, which transformers does not read.
        fields.expect("kv_channels", usual["head_dim"])
        fields.expect("layer_norm_eps", epsilon)
        fields.expect("rope_percent", usual["rope"].partial)
        config = Config(
            **usual,
            norm_eps=epsilon,
            **fields.plain(attention_bias=False, mlp_bias=False),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("norm_eps", "attention_bias", "mlp_bias", "hidden_act")
        return decoder.decoder_to_hf(self, "NemotronForCausalLM", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. LayerNorm weights are stored minus 1."""
    D, std = config.hidden_size, config.initializer_range
    layer = {
        **_norm_leaves("input_layernorm", D),
        "attention": usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias),
        **_norm_leaves("post_attention_layernorm", D),
        "mlp": plain_mlp_leaves(D, config.intermediate_size, std=std, biases=config.mlp_bias),
    }
    return decoder_leaves(config, [layer for _ in config.layer_kinds]) | _norm_leaves("norm", D)


def _norm_leaves(name: str, size: int) -> Tree:
    """A LayerNorm's weight, initialized to 0 (1 is added), and its bias."""
    return {name: norm(size, "embed", value=0.0), f"{name}_bias": bias(size, "embed")}


def _norm(owner: Tree, name: str, x: Tensor, config: Config) -> Tensor:
    """LayerNorm of x [..., D] by 1 + weight, in fp32. transformers adds the 1 in the weight's own dtype."""
    return layer_norm(x, owner[name], owner[f"{name}_bias"], eps=config.norm_eps, zero_centered=True)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    q, k, v = project_qkv(weights, _norm(layer, "input_layernorm", x, config), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = _norm(layer, "post_attention_layernorm", x, config)
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]."""
    return decoder.project(params, _norm(params, "norm", x, config), config)


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
PRESETS = {
    name: {"model_type": "nemotron", "vocab_size": 256000, "head_dim": head_dim} | dict(zip(_SIZES, sizes, strict=True))
    for name, head_dim, *sizes in (
        ("minitron-4b", 128, 3072, 9216, 32, 24, 8),
        ("minitron-8b", 128, 4096, 16384, 32, 48, 8),
        ("nemotron-4-15b", 128, 6144, 24576, 32, 48, 8),
        ("nemotron-4-340b", 192, 18432, 73728, 96, 96, 8),
    )
}

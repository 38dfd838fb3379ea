"""Persimmon 8B (Adept, 2023), also the text model of Fuyu: LayerNorms, also of queries and keys, and squared ReLU.

Rotary embedding of half of each head, biases everywhere, and an MLP without a gate. On disk q, k and v are fused,
interleaved by head.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import (
    decoder_leaves,
    layer_leaves,
    layer_norm_leaves,
    plain_mlp_leaves,
    usual_attention,
)
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import Rope, apply_rotary, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.tree import Tree

MODEL_TYPES = ("persimmon",)
TRAITS = Traits(dropout={"attention_dropout": ("weights",), "hidden_dropout": ("mlp",)})
_ON_DISK = {
    ".o_proj.": ".dense.",
    ".up_proj.": ".dense_h_to_4h.",
    ".down_proj.": ".dense_4h_to_h.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rope: Rope = Rope(partial=0.5)  # noqa: RUF009 - frozen
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = True
    hidden_act: str = "relu2"
    max_position_embeddings: int = 16384

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_width(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(
            fields, MODEL_TYPES, theta=1e4, partial=0.5, max_positions=16384, activation="relu2"
        )
        fields.expect("num_key_value_heads", usual["num_attention_heads"])
        config = Config(**usual, **fields.plain(layer_norm_eps=1e-5, qk_layernorm=True))
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return decoder.decoder_to_hf(self, "PersimmonForCausalLM", "layer_norm_eps", "qk_layernorm", "hidden_act")


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, inner = config.hidden_size, config.head_dim, config.intermediate_size
    attention = usual_attention(config, qkv_bias=True, o_bias=True)
    if config.qk_layernorm:
        attention |= layer_norm_leaves("q_norm", H, "head_dim") | layer_norm_leaves("k_norm", H, "head_dim")
    layer = layer_leaves(D, attention, plain_mlp_leaves(D, inner, std=config.initializer_range), norm_bias=True)
    return decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows in each head's block of query_key_value}."""
    names = decoder.hf_names(config)
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return {path: _stored(name, config) for path, name in names.items()}


def _stored(name: str, config: Config) -> Stored:
    for place, which in enumerate("qkv"):
        if f".{which}_proj." in name:
            H, heads = config.head_dim, config.num_attention_heads
            name = name.replace(f".{which}_proj.", ".query_key_value.")
            return TensorSlice(name, place * H, (place + 1) * H, 3 * heads * H, groups=heads)
    return name


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.layer_norm_eps, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    if config.qk_layernorm:
        q = layer_norm(q, weights["q_norm"], weights["q_norm_bias"], eps=eps)
        k = layer_norm(k, weights["k_norm"], weights["k_norm_bias"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


unembed = decoder.unembed_layer_norm

PRESETS = {
    "persimmon-8b": {"model_type": "persimmon", "vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 16384}
    | {"num_hidden_layers": 36, "num_attention_heads": 64, "rope_theta": 25000.0}
}

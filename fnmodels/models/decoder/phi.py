"""Phi-1, Phi-1.5 and Phi-2 (Microsoft; arXiv 2306.11644, 2309.05463).

Parallel attention and MLP, which share one LayerNorm, and rotary embedding of a part of each head. All projections have
biases, including the output head, even if its weight is tied.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, decoder_leaves, layer_norm_leaves, plain_mlp_leaves, usual_attention
from fnmodels.ops import Rope, apply_rotary, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.tree import Tree

MODEL_TYPES = ("phi",)
TRAITS = Traits(
    dropout={"attention_dropout": ("weights",), "resid_pdrop": ("attention", "mlp"), "embd_pdrop": ("embedding",)},
    leftovers=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # a buffer in older files
)

# The names on disk that differ from `decoder.hf_names`.
_ON_DISK = {
    ".o_proj.": ".dense.",
    ".up_proj.": ".fc1.",
    ".down_proj.": ".fc2.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rope: Rope = Rope(partial=0.5)  # noqa: RUF009 - frozen
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_width(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        config = Config(
            **decoder.base_fields(fields, MODEL_TYPES, partial=0.5, max_positions=2048, activation="gelu_new"),
            **fields.plain(layer_norm_eps=1e-5, qk_layernorm=False),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return decoder.decoder_to_hf(self, "PhiForCausalLM", "layer_norm_eps", "qk_layernorm", "hidden_act")


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. The output head has a bias even if its weight is tied."""
    D, H = config.hidden_size, config.head_dim
    attention = usual_attention(config, qkv_bias=True, o_bias=True)
    if config.qk_layernorm:
        attention |= layer_norm_leaves("q_norm", H, "head_dim") | layer_norm_leaves("k_norm", H, "head_dim")
    layer = {
        **layer_norm_leaves("input_layernorm", D, "embed"),
        "attention": attention,
        "mlp": plain_mlp_leaves(D, config.intermediate_size, std=config.initializer_range),
    }
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)
    return tree | {"lm_head_bias": bias(config.vocab_size, "vocab")} if decoder.is_lm(config) else tree


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = decoder.hf_names(config)
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return names | {"lm_head_bias": "lm_head.bias"} if decoder.is_lm(config) else names


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
    x = x + ctx.tap("attention", project_out(weights, mixed))
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


unembed = decoder.unembed_layer_norm  # whose head has a bias


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("partial_rotary_factor", "resid_pdrop"),
)
PRESETS = {
    name: {"model_type": "phi", "vocab_size": 51200, **dict(zip(_SIZES, sizes, strict=True))}
    for name, *sizes in (
        ("phi-1", 2048, 8192, 24, 32, 0.5, 0.0),
        ("phi-1.5", 2048, 8192, 24, 32, 0.5, 0.0),
        ("phi-2", 2560, 10240, 32, 32, 0.4, 0.1),
    )
}

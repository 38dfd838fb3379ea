"""StableLM (3B-4E1T, Zephyr, StableLM 2; arXiv 2402.17834).

The Llama block with LayerNorms and rotary embedding of a quarter of each head. Members differ in biases of q, k and v,
in query and key norms with a weight per head, and in attention and MLP in parallel on one norm or in sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, layer_norm_leaves, norm, usual_attention, usual_mlp
from fnmodels.ops import Rope, apply_rotary, gated_mlp, layer_norm, project_out, project_qkv, upcast
from fnmodels.tree import Tree

MODEL_TYPES = ("stablelm",)
TRAITS = Traits(
    dropout={"attention_dropout": ("weights",), "hidden_dropout": ("mlp",)},
    leftovers=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # a buffer in older files
)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rope: Rope = Rope(partial=0.25)  # noqa: RUF009 - frozen
    layer_norm_eps: float = 1e-5
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_width(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        config = Config(
            **decoder.base_fields(fields, MODEL_TYPES, partial=0.25, max_positions=4096, kv_heads=32),
            **fields.plain(layer_norm_eps=1e-5, use_qkv_bias=False, qk_layernorm=False, use_parallel_residual=False),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("layer_norm_eps", "use_qkv_bias", "qk_layernorm", "use_parallel_residual", "hidden_act")
        return decoder.decoder_to_hf(self, "StableLmForCausalLM", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. Query and key norms are lists with one leaf per head, as on disk."""
    attention: Tree = usual_attention(config, qkv_bias=config.use_qkv_bias)
    if config.qk_layernorm:
        one = norm(config.head_dim, "head_dim")
        attention |= {"q_norms": [one] * config.num_attention_heads, "k_norms": [one] * config.num_key_value_heads}
    layer: Tree = layer_norm_leaves("input_layernorm", config.hidden_size, "embed")
    layer |= {"attention": attention, "mlp": usual_mlp(config)}
    if not config.use_parallel_residual:
        layer |= layer_norm_leaves("post_attention_layernorm", config.hidden_size, "embed")
    return decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {path: name.replace("_norms.", "_layernorm.norms.") for path, name in decoder.hf_names(config).items()}


unembed = decoder.unembed_layer_norm


def _norm_heads(x: Tensor, weights: list[Tensor], eps: float) -> Tensor:
    """LayerNorm of each head of x [B, S, N, H], with N weights [H]."""
    heads = layer_norm(upcast(x), None, None, eps=eps).unbind(-2)
    return torch.stack([head * upcast(w) for head, w in zip(heads, weights, strict=True)], dim=-2).to(x.dtype)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.layer_norm_eps, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    if config.qk_layernorm:
        q, k = _norm_heads(q, weights["q_norms"], eps), _norm_heads(k, weights["k_norms"], eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = x + ctx.tap("attention", project_out(weights, mixed))
    if not config.use_parallel_residual:
        normed = layer_norm(x, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))

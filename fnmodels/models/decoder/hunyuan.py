"""Hunyuan V1 dense (Tencent): 0.5B to 7B, and the translation models.

The Llama block with query and key norms after the rotary embedding.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.rope_config import parse_rope, rope_values
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, usual_attention, usual_mlp
from fnmodels.ops import Rope, apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("hunyuan_v1_dense",)


# Settings of the publisher's code at the only values that the maths here has.
_FIXED = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False, "norm_type": "rms", "use_rotary_pos_emb": True}
_FIXED |= {"num_experts": 1}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    max_position_embeddings: int = 262144

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=2048, rope=_rope)
        for name, value in _FIXED.items():
            fields.expect(name, value)
        config = Config(
            **usual,
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False),
        )
        return decoder.finished(config, fields, ignored=("pool_type",))  # of heads for classes

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect, with the theta that results from `alpha` instead of `alpha`."""
        names = ("rms_norm_eps", "attention_bias", "hidden_act")
        return decoder.decoder_to_hf(self, "HunYuanDenseV1ForCausalLM", *names)


def _rope(fields: Fields, *, head_dim: int, max_positions: int) -> Rope:
    """`parse_rope`, except that "dynamic" with `alpha` is a larger theta at any length and ignores other fields."""
    values = rope_values(fields)
    inner = Fields(values, f"{fields.where}, rope")
    types = [values[name] for name in ("rope_type", "type") if name in values]
    if not types or any(one != "dynamic" for one in types) or values.get("alpha") is None:
        return parse_rope(inner, head_dim=head_dim, max_positions=max_positions, theta=1e4)
    if head_dim % 2 or head_dim == 2:
        raise ConfigError(f"{inner.where}: 'head_dim' is {head_dim}; with 'alpha' it must be even and more than 2.")
    inner.expect("partial_rotary_factor", 1, 1.0)
    theta = inner.number("rope_theta", 1e4) * inner.number("alpha") ** (head_dim / (head_dim - 2))
    unread = ("rope_type", "type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    inner.finish(ignored=unread)
    return Rope(theta)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    bias = config.attention_bias
    attention = usual_attention(config, qkv_bias=bias, o_bias=bias) | head_norms(config)
    layer = layer_leaves(config.hidden_size, attention, usual_mlp(config))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {
        path: name.replace(".q_norm.", ".query_layernorm.").replace(".k_norm.", ".key_layernorm.")
        for path, name in decoder.hf_names(config).items()
    }


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q = rms_norm(apply_rotary(q, freqs), weights["q_norm"], eps=eps)
    k = rms_norm(apply_rotary(k, freqs), weights["k_norm"], eps=eps)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def _preset(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int = 120818) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 262144}
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    rest = {"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_parameters": rope, "tie_word_embeddings": True}
    return sizes | rest


PRESETS: dict[str, ConfigJson] = {
    "hunyuan-0.5b": _preset(1024, 3584, 24, 16, 8),
    "hunyuan-1.8b": _preset(2048, 6144, 32, 16, 4),
    "hunyuan-4b": _preset(3072, 8192, 36, 32, 8),
    "hunyuan-7b": _preset(4096, 14336, 32, 32, 8, vocab=128167),
}

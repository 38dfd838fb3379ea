"""GLM-4 9B (arXiv 2406.12793), GLM-4-0414: GLM-4-9B, GLM-4-32B and GLM-Z1 (Zhipu AI, April 2025).

A decoder with norms before and after each sublayer, and interleaved rotary embedding of the first half of each head. On
disk gate and up are fused, and `post_attention_layernorm` is the norm before the MLP. The first GLM-4 has no norms
after the sublayers.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.rope_config import sections_to_hf, split_sections
from fnmodels.models.common.spec import decoder_leaves, norm, usual_attention, usual_mlp
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary_interleaved, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("glm4", "glm")

_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")
_PARTIAL = 0.5  # the default of partial_rotary_factor


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rope: Rope = Rope(partial=_PARTIAL)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # of q, k and v
    sandwich: bool = True  # norms after the sublayers as well
    max_position_embeddings: int = 32768
    # rotary frequencies of time, height and width, which are one for text: of GLM-4.1V's text models
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, sections, interleaved = split_sections(Fields(values), interleaved=False)
        defaults: Any = {"partial": _PARTIAL, "kv_heads": 2, "head_dim": 128, "max_positions": 131072}
        config = Config(
            **decoder.base_fields(fields, MODEL_TYPES, **defaults),
            **fields.plain(rms_norm_eps=1.5625e-7, attention_bias=True),
            sandwich=values.get("model_type") == "glm4",
            mrope_section=sections,
            mrope_interleaved=interleaved and bool(sections),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        name = "Glm4ForCausalLM" if self.sandwich else "GlmForCausalLM"
        own = {"rope_parameters": sections_to_hf(self)} if self.mrope_section else {}
        return decoder.decoder_to_hf(self, name, "rms_norm_eps", "attention_bias", "hidden_act", **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    one = norm(config.hidden_size, "embed")
    layer = {
        "input_layernorm": one,
        "attention": usual_attention(config, qkv_bias=config.attention_bias),
        "post_self_attn_layernorm": one,
        "post_attention_layernorm": one,
        "mlp": usual_mlp(config),
        "post_mlp_layernorm": one,
    }
    layer = layer if config.sandwich else {name: leaf for name, leaf in layer.items() if name not in _AFTER}
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows of a fused tensor}."""
    names: dict[str, Stored] = decoder.hf_names(config)
    flat = flatten(spec(config))
    for i in range(config.num_hidden_layers):
        names |= decoder.fused(flat, f"layers.{i}.mlp", "gate_up_proj", ("gate_proj", "up_proj"))
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    attended = project_out(weights, mixed)
    attended = rms_norm(attended, layer["post_self_attn_layernorm"], eps=eps) if config.sandwich else attended
    x = ctx.tap("middle", x + ctx.tap("attention", attended))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap)
    return x + ctx.tap("mlp", rms_norm(fed, layer["post_mlp_layernorm"], eps=eps) if config.sandwich else fed)


# config.json of zai-org/glm-4-9b-chat-hf
PRESETS: dict[str, ConfigJson] = {
    "glm-4-9b-chat": {"model_type": "glm", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696}
    | {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2}
}

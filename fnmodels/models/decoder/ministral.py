"""Ministral 3 (Mistral AI): the Llama block with YaRN (arXiv 2309.00071) and a position-dependent query temperature.

Queries are scaled by the logarithm of their position, which keeps attention sharp beyond the trained length (as in
Llama 4, arXiv 2501.19399). The temperature depends on positions, so it is computed with the rotary table.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, hf_names, kinds, spec, unembed  # noqa: F401
from fnmodels.models.common.decoder import freqs_cis_with_temperature as freqs_cis  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import parse_rope, rope_to_hf, rope_values
from fnmodels.ops import ACTIVATIONS, apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("ministral3",)
TRAITS = Traits(kinds=("full", "sliding"))


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. `layer_kinds`: all "sliding" if there is a window, else all "full"."""

    temperature_beta: float = 0.1  # queries are multiplied by 1 + beta ln(1 + floor(position / temperature_length))
    temperature_length: int = 16384
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    max_position_embeddings: int = 262144

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder.decoder_sizes(fields, max_positions=262144, tied=False, kv_heads=8, head_dim=128)
        positions = sizes["max_position_embeddings"]
        inner = Fields(rope_values(fields), f"{fields.where}, rope")
        beta = inner.number("llama_4_scaling_beta", above=-1e-9)
        inner.expect("max_position_embeddings", positions)  # duplicated in the rope object
        config = Config(
            **sizes,
            rope=parse_rope(inner, head_dim=sizes["head_dim"], max_positions=positions, theta=1e6),
            temperature_beta=beta,
            temperature_length=inner.integer("original_max_position_embeddings", positions),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            **decoder.one_window(fields, sizes["num_hidden_layers"]),
            model_type=model_type,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        temperature = {"llama_4_scaling_beta": self.temperature_beta}
        temperature |= {"original_max_position_embeddings": self.temperature_length}
        names = ("rms_norm_eps", "hidden_act", "sliding_window")
        rope = rope_to_hf(self.rope) | temperature
        return decoder.decoder_to_hf(self, "Ministral3ForCausalLM", *names, rope_parameters=rope)


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: dict[str, Tensor], /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps = layer["attention"], config.rms_norm_eps
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs["table"]), apply_rotary(k, freqs["table"])
    q = q * freqs["temperature"][..., None, None].to(q.dtype)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))

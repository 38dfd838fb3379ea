"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Microsoft; arXiv 2404.14219, 2412.08905, 2503.01743).

The Llama block with q, k, v and gate, up fused on disk. The long-context members have LongRoPE (arXiv 2402.13753): one
set of frequencies for sequences within the original context and another for longer ones, selected by `length` alone,
never by an earlier call.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, spec, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import parse_rope, rope_values
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("phi3",)
TRAITS = Traits(
    kinds=("full", "sliding"),
    dropout={
        "attention_dropout": ("weights",),
        "resid_pdrop": ("attention", "mlp"),
        "embd_pdrop": (),
    },  # the last: unread
)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. `layer_kinds`: all "sliding" if there is a window, else all "full"."""

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    max_position_embeddings: int = 4096

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=4096, rope=_rope)
        for name in ("attention_bias", "mlp_bias", "lm_head_bias"):  # published files have false
            fields.expect(name, False)
        for name in ("full_attn_mod", "interpolate_factor"):  # from Phi-4-mini's first code; 1 is the only known value
            fields.expect(name, 1)
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            **decoder.one_window(fields, usual["num_hidden_layers"]),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where the model type has no word for this model."""
        # transformers reads the original context here, the only place if the rope is not scaled
        original = self.rope.original_max_position_embeddings or self.max_position_embeddings
        names = ("rms_norm_eps", "hidden_act", "sliding_window")
        return decoder.decoder_to_hf(self, "Phi3ForCausalLM", *names, original_max_position_embeddings=original)


def _rope(fields: Fields, **where: int) -> Rope:
    """Default rope or longrope ("su" or "yarn" in older files); the original context is the top-level field."""
    name = "original_max_position_embeddings"
    original = fields.integer(name, 4096)
    values = {
        key: "longrope" if key in ("rope_type", "type") and value in ("su", "yarn") else value
        for key, value in rope_values(fields).items()
    }
    inside = values.get(name)
    if fields.values.get(name) is None and inside not in (None, original):
        # transformers uses the default of the top-level field, not this one
        raise ConfigError(f"{fields.where}: {name!r} is {inside} in the rope alone; it must stand at the top.")
    inner = Fields(values | {name: original}, f"{fields.where}, rope")
    rope = parse_rope(inner, **where, theta=1e4, partial=1.0)
    if rope.kind not in ("default", "longrope"):
        raise UnsupportedError(f"{inner.where}: 'rope_type' is {rope.kind!r}; phi3 has default and longrope.")
    return rope


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows of a fused tensor}."""
    flat = flatten(spec(config))
    names: dict[str, Stored] = decoder.hf_names(config)
    for i in range(config.num_hidden_layers):
        names |= decoder.fused(flat, f"layers.{i}.attention", "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        names |= decoder.fused(flat, f"layers.{i}.mlp", "gate_up_proj", ("gate_proj", "up_proj"))
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


# Phi-3 with 128K and Phi-3.5 are missing: the exact values of their 48 and 64 LongRoPE factors are not available here.
_PHI3 = {"model_type": "phi3", "vocab_size": 32064, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
_PHI3 |= {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": 2047}
_PHI4 = {"model_type": "phi3", "vocab_size": 100352, "rms_norm_eps": 1e-5, "rope_theta": 250000.0}
_PHI4 |= {"max_position_embeddings": 16384, "original_max_position_embeddings": 16384}
_PHI4_MINI_ROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [
        *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
        *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533),
        *(5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651),
        *(14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03),
        *(32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
    ],
}
_PHI4_MINI = {"model_type": "phi3", "vocab_size": 200064, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
_PHI4_MINI |= {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
_PHI4_MINI |= {"tie_word_embeddings": True, "partial_rotary_factor": 0.75, "rope_scaling": _PHI4_MINI_ROPE}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
PRESETS: dict[str, ConfigJson] = {
    name: base | dict(zip(_SIZES, sizes, strict=True))
    for name, base, *sizes in (
        ("phi-3-mini", _PHI3, 3072, 8192, 32, 32, 32),
        ("phi-3-medium", _PHI3, 5120, 17920, 40, 40, 10),
        ("phi-4", _PHI4, 5120, 17920, 40, 40, 10),
        ("phi-4-mini", _PHI4_MINI, 3072, 8192, 32, 24, 8),
    )
}

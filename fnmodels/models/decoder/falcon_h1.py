"""Falcon-H1 (arXiv 2507.22448): attention and a Mamba-2 mixer side by side in every layer, and fixed multipliers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.inputs.order import build_segments
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.mamba import Mamba, hybrid_names, mamba, mamba_from_hf, mamba_leaves, mamba_to_hf
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, usual_attention, usual_mlp
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary, project_out, project_qkv, rms_norm
from fnmodels.ops.linear import linear, linears
from fnmodels.ops.mlp import glu
from fnmodels.tree import Tree

MODEL_TYPES = ("falcon_h1",)
TRAITS = Traits(kinds=("hybrid",))
PRESETS = {
    "falcon-h1-0.5b": {
        "model_type": "falcon_h1",
        "vocab_size": 32784,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 16384,
        "rope_theta": 1e11,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_state": 128,
        "embedding_multiplier": 5.656854249492381,
        "lm_head_multiplier": 0.0390625,
        "key_multiplier": 0.39062499999999994,
        "attention_out_multiplier": 0.9375,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.23570226039551587,
        "ssm_multipliers": [0.35355339059327373, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
    }
}
MULTIPLIERS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes, switches and multipliers; those of the mixer stand in it."""

    mixer: Mamba
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    mlp_gate_multiplier: float = 1.0
    mlp_down_multiplier: float = 1.0
    model_type: str = field(default="falcon_h1", compare=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=8192, kv_heads=8)
        expanded = fields.integer("mamba_expand", 2) * usual["hidden_size"]
        normed, first = fields.boolean("mamba_rms_norm", False), fields.boolean("mamba_norm_before_gate", True)
        mixer = mamba_from_hf(
            fields,
            fields.integer("mamba_d_ssm", expanded if "mamba_d_ssm" in fields.values else 1024),
            norm=("norm_first" if first else "gate_first") if normed else "none",
            out_bias=fields.boolean("projectors_bias", False),
            multipliers=_multipliers(fields, "ssm_multipliers", 5),
        )
        fields.expect("mamba_use_mlp", True)
        of_gate, of_output = _multipliers(fields, "mlp_multipliers", 2)
        multipliers: dict[str, Any] = {name: fields.number(name, 1.0) for name in MULTIPLIERS}
        config = Config(
            **usual,
            mixer=mixer,
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False),
            mlp_gate_multiplier=of_gate,
            mlp_down_multiplier=of_output,
            **multipliers,
        )
        return decoder.finished(config, fields, ignored=("num_logits_to_keep", "mlp_expansion_factor"))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", *MULTIPLIERS)
        own = mamba_to_hf(self.mixer) | {"mamba_d_ssm": self.mixer.rows["x"], "projectors_bias": self.mixer.out_bias}
        own |= {"mamba_rms_norm": self.mixer.norm != "none", "mamba_norm_before_gate": self.mixer.norm == "norm_first"}
        own |= {"ssm_multipliers": list(self.mixer.multipliers)}
        own |= {"mlp_multipliers": [self.mlp_gate_multiplier, self.mlp_down_multiplier]}
        return decoder.decoder_to_hf(self, "FalconH1ForCausalLM", *names, **own)


def _multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if fields.take(name, None) is None else fields.numbers(name, count)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, biased = config.hidden_size, config.attention_bias
    attention = usual_attention(config, qkv_bias=biased, o_bias=biased)
    layer = layer_leaves(D, attention, usual_mlp(config, biases=config.mlp_bias))
    layer["mamba"] = mamba_leaves(D, config.mixer, std=config.initializer_range)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}."""
    return hybrid_names(
        config, {f"layers.{i}.mamba": f"model.layers.{i}.mamba" for i in range(config.num_hidden_layers)}
    )


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """The masks of every layer: {"attention": causal mask, "order": `fnmodels.inputs.Segments`}."""
    masks, order = (
        decoder.attention_masks(config, positions, segment_ids, create=create),
        build_segments(segment_ids, positions),
    )
    return {kind: {"attention": mask, "order": order} for kind, mask in masks.items()}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """Token embeddings [B, S, D] times embedding_multiplier."""
    tokens = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    x = decoder.embed(params, inputs, config=config)
    return x if tokens.is_floating_point() else x * config.embedding_multiplier


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and output head: logits [B, S, V]."""
    logits = decoder.unembed(params, x, config=config)
    return logits * config.lm_head_multiplier if decoder.is_lm(config) else logits


@with_context
def block(
    layer: Tree, x: Tensor, mask: Mapping[str, Any], freqs: Tensor, /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, act = config.rms_norm_eps, config.hidden_act
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    into = normed * config.ssm_in_multiplier
    mixed = mamba(layer["mamba"], into, mask["order"], config.mixer, ctx, eps=eps, activation=act)
    attended = _attention(layer["attention"], normed * config.attention_in_multiplier, mask, freqs, config, ctx)
    mixed = ctx.tap("mamba", mixed * config.ssm_out_multiplier)
    attended = ctx.tap("attention", attended * config.attention_out_multiplier)
    x = ctx.tap("middle", x + (mixed + attended))
    return x + ctx.tap("mlp", _mlp(layer["mlp"], rms_norm(x, layer["post_attention_layernorm"], eps=eps), config, ctx))


def _attention(
    weights: Tree, x: Tensor, mask: Mapping[str, Any], freqs: Tensor, config: Config, ctx: Context
) -> Tensor:
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k * config.key_multiplier, freqs)
    return project_out(weights, ctx.attend(q, k, v, mask["attention"], scale=config.head_dim**-0.5))


def _mlp(weights: Tree, x: Tensor, config: Config, ctx: Context) -> Tensor:
    gate, up = linears(x, weights, ("gate", "up"))
    gate = ctx.tap("mlp.pre", gate * config.mlp_gate_multiplier)
    inner = ctx.tap("mlp.neurons", glu(gate, up, activation=config.hidden_act))
    return linear(inner, weights["down_proj"], weights.get("down_bias")) * config.mlp_down_multiplier

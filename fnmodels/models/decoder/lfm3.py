"""LFM3 (Liquid AI, 2026): LFM2's short convolutions and attention, with norms before and after each sublayer.

Attention layers have a sliding window or none, each with a rope of its own, and a gate per head on what they attend to.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds, short_conv, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import decoder_leaves, head_norms, norm, usual_attention, usual_mlp, weight
from fnmodels.models.common.storage import Stored
from fnmodels.ops import ACTIVATIONS, Rope, apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.rotary import no_rotation, rotary_table
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("lfm3",)
TRAITS = Traits(kinds=("conv", "full", "sliding"), in_memory={r"\.self_attn\.gate_proj\.": ".self_attn.g_proj."})
_TYPES = {"conv": "conv", "full_attention": "full", "sliding_attention": "sliding"}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
_ON_DISK = {
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".post_operator_norm.",
    ".pre_feedforward_layernorm.": ".ffn_norm.",
    ".post_feedforward_layernorm.": ".post_ffn_norm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    "model.norm.": "model.embedding_norm.",
}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rope: Rope = Rope(1e6, "proportional", 0.5)  # noqa: RUF009 - of full layers
    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers
    conv_kernel: int = 7
    conv_bias: bool = False
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sandwich: bool = True  # norms after the sublayers as well
    output_gate: bool = True
    sliding_window: int | None = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        short_conv.check_kernel(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        rope = values.get("rope_parameters")
        fields = Fields(values if rope is not None else {**values, "rope_parameters": _ROPES})
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder.decoder_sizes(fields, max_positions=128000, tied=True, kv_heads=4, head_dim=128)
        layers = sizes["num_hidden_layers"]
        default = ["full" if i % 4 == 2 else "sliding" if i % 4 == 0 and i > 0 else "conv" for i in range(layers)]
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        thetas = {"full_attention": 1e6, "sliding_attention": 1e4}
        ropes = ropes_by_layer_type(fields, thetas, scaled="full_attention", **where)
        config = Config(
            **sizes,
            rope=ropes["full_attention"],
            local_rope=ropes["sliding_attention"],
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            layer_kinds=decoder.listed_kinds(fields, ("layer_types",), _TYPES) or tuple(default),
            conv_kernel=fields.integer("conv_L_cache", 7, low=2, high=1 << 16),
            rms_norm_eps=fields.number("norm_eps", 1e-5),
            **fields.plain(conv_bias=False, attention_bias=False, sliding_window=256),
            sandwich=fields.boolean("use_sandwich_norm", True),
            output_gate=fields.boolean("use_attention_gate", True),
            model_type=model_type,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        theirs = {kind: name for name, kind in _TYPES.items()}
        own: ConfigJson = {
            "layer_types": [theirs[kind] for kind in self.layer_kinds],
            "norm_eps": self.rms_norm_eps,
        }
        own |= {"conv_L_cache": self.conv_kernel, "use_sandwich_norm": self.sandwich}
        own["use_attention_gate"] = self.output_gate
        ropes = {"full_attention": rope_to_hf(self.rope), "sliding_attention": rope_to_hf(self.local_rope)}
        names = ("conv_bias", "attention_bias", "sliding_window", "hidden_act")
        return decoder.decoder_to_hf(self, "Lfm3ForCausalLM", *names, rope_parameters=ropes, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, on = config.hidden_size, config.initializer_range, config.attention_bias
    full = usual_attention(config, qkv_bias=on, o_bias=on) | head_norms(config)
    if config.output_gate:
        full["gate_proj"] = weight((config.num_attention_heads, D), ("heads", "embed"), std)
    names = ["input_layernorm", "pre_feedforward_layernorm"]
    names += ["post_attention_layernorm", "post_feedforward_layernorm"] if config.sandwich else []
    around = {name: norm(D, "embed") for name in names} | {"mlp": usual_mlp(config)}
    conv = short_conv.conv_leaves(config)
    layers = [around | {"attention": conv if kind.ordered else full} for kind in parsed(config.layer_kinds)]
    return decoder_leaves(config, layers)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; a convolution's projections are slices of one."""
    names: dict[str, Stored] = {}
    for path, name in decoder.hf_names(config).items():
        for ours, theirs in _ON_DISK.items():
            name = name.replace(ours, theirs)
        names[path] = name
    for index, kind in enumerate(parsed(config.layer_kinds)):
        names |= short_conv.conv_names(config, index) if kind.ordered else {}
    return {path: names[path] for path in flatten(spec(config))}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}, R 0 for convolutions."""
    ropes = {"full": config.rope, "sliding": config.local_rope}
    none, used = no_rotation(positions), sorted(set(config.layer_kinds))
    return {k: rotary_table(ropes[k], config.head_dim, positions, length) if k in ropes else none for k in used}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps = config.rms_norm_eps
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    if LayerKind.parse(kind).ordered:
        mixed = short_conv.gated_convolution(layer["attention"], normed, mask, ctx)
    else:
        mixed = _attention(layer["attention"], normed, mask, freqs, config, ctx)
    mixed = rms_norm(mixed, layer["post_attention_layernorm"], eps=eps) if config.sandwich else mixed
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm(x, layer["pre_feedforward_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap)
    fed = rms_norm(fed, layer["post_feedforward_layernorm"], eps=eps) if config.sandwich else fed
    return x + ctx.tap("mlp", fed)


def _attention(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Config, ctx: Context) -> Tensor:
    """Attention of the normed x [B, S, D], each head times a gate if configured, projected: [B, S, D]."""
    eps = config.rms_norm_eps
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    if config.output_gate:
        mixed = mixed * elementwise(torch.sigmoid, linear(x, weights["gate_proj"]))[..., None]
    return project_out(weights, mixed)


PRESETS = {
    "lfm3-1.7b": {"model_type": "lfm3", "vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7680}
    | {"num_hidden_layers": 24, "num_attention_heads": 16}
}

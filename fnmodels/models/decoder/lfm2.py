"""LFM2: short gated convolutions in most layers, and attention with per-head query and key norms in the others.

A convolution layer multiplies its input by a gate before a causal convolution of a few tokens, and the result by
another gate (arXiv 2511.23404). LFM2-MoE has sigmoid-routed experts in all layers but the first ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import short_conv
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.moe import check_experts, expert_names, experts_from_hf
from fnmodels.models.common.spec import (
    decoder_leaves,
    head_norms,
    layer_leaves,
    moe_leaves,
    usual_attention,
    usual_mlp,
)
from fnmodels.models.common.storage import Stored
from fnmodels.ops.mlp import gated_mlp
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import apply_rotary
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("lfm2", "lfm2_moe")
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("conv", "full", "conv_moe", "full_moe"), routed=True, router=ROUTER)

_PRESET = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}
PRESETS = {
    "lfm2-350m": _PRESET | {"hidden_size": 1024, "intermediate_size": 6656, "num_attention_heads": 16},
    "lfm2-1.2b": _PRESET | {"hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 32},
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": decoder.layer_types([i not in (2, 6, 10, 14, 18, 21) for i in range(24)], "conv"),
    },
}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of the MLP of dense layers, after adjustments of config.json."""

    conv_kernel: int = 3
    conv_bias: bool = False
    rms_norm_eps: float = 1e-5
    num_experts: int = 0  # 0: no layer has experts
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of one expert
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    model_type: str = field(default="lfm2", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        short_conv.check_kernel(self)
        if any(kind.routed for kind in parsed(self.layer_kinds)):
            check_experts(self.num_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> Config:
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = renamed(Fields(values), {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"})
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e6, max_positions=128000, tied=True, kv_heads=8)
        layers, sparse = usual["num_hidden_layers"], usual["model_type"] == "lfm2_moe"
        if sparse:
            fields.take("layer_types")  # needed
        else:
            usual["intermediate_size"] = _inner(fields, usual["intermediate_size"])
        attends = fields.take("full_attn_idxs", list(range(layers)))
        if not isinstance(attends, list) or any(type(i) is not int or not 0 <= i < layers for i in attends):
            raise ConfigError(f"{fields.where}: 'full_attn_idxs' must be a list of layers below {layers}.")
        convolves = decoder.sliding_layers(fields, [i not in attends for i in range(layers)], "conv")
        dense = fields.integer("num_dense_layers", 2, low=0) if sparse else layers
        config = Config(
            **usual,
            **_experts(fields, layers) if sparse else {},
            conv_kernel=fields.integer("conv_L_cache", 3, low=2, high=1 << 16),
            conv_bias=fields.boolean("conv_bias", False),
            rms_norm_eps=fields.number("norm_eps", 1e-5),
            layer_kinds=tuple(
                ("conv" if one else "full") + "_moe" * (index >= dense) for index, one in enumerate(convolves)
            ),
        )
        # repeated or unused in the published files
        return decoder.finished(config, fields, ignored=_UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        convolves = [kind.ordered for kind in parsed(self.layer_kinds)]
        own: ConfigJson = {"layer_types": decoder.layer_types(convolves, "conv"), "norm_eps": self.rms_norm_eps}
        own |= {"conv_L_cache": self.conv_kernel, "conv_bias": self.conv_bias}
        if self.model_type == "lfm2":
            return decoder.decoder_to_hf(self, "Lfm2ForCausalLM", block_auto_adjust_ff_dim=False, **own)
        own["num_dense_layers"] = sum(not kind.routed for kind in parsed(self.layer_kinds))
        return decoder.decoder_to_hf(self, "Lfm2MoeForCausalLM", *_EXPERT_FIELDS, **own)


_UNUSED = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
)


_EXPERT_FIELDS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("use_expert_bias", "norm_topk_prob", "routed_scaling_factor"),
)


def _experts(fields: Fields, layers: int) -> dict[str, Any]:
    """The Config fields of layers with experts."""
    inner, scale = fields.integer("moe_intermediate_size", 1792), fields.number("routed_scaling_factor", 1.0)
    biased, normed = (fields.boolean(name, True) for name in ("use_expert_bias", "norm_topk_prob"))
    found = (*experts_from_hf(fields, 32, 4, layers), inner, biased, normed, scale)
    return dict(zip(_EXPERT_FIELDS, found, strict=True))


def _inner(fields: Fields, size: int) -> int:
    """The width of the MLP: two thirds of `size`, scaled, and rounded up to a multiple, unless the file says no."""
    adjust = fields.boolean("block_auto_adjust_ff_dim", True)
    multiple = fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    if not adjust:
        return size
    scaled = int(factor * int(2 * size / 3))
    return multiple * -(-scaled // multiple)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, biased = config.hidden_size, config.initializer_range, config.use_expert_bias
    full, dense = usual_attention(config) | head_norms(config), usual_mlp(config)
    sparse = moe_leaves(D, config.num_experts, config.moe_intermediate_size, std=std, selection_bias=biased)
    layers = [
        layer_leaves(
            D,
            short_conv.conv_leaves(config) if kind.ordered else full,
            sparse if kind.routed else dense,
        )
        for kind in parsed(config.layer_kinds)
    ]
    return decoder_leaves(config, layers)


_NAMES = {  # of modules on disk
    ".attention.q_norm.": ".self_attn.q_layernorm.",
    ".attention.k_norm.": ".self_attn.k_layernorm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".mlp.router.weight": ".feed_forward.gate.weight",
    ".mlp.selection_proj.bias": ".feed_forward.expert_bias",
    "model.norm.": "model.embedding_norm.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; a convolution's projections are slices of one, experts have one each."""
    names: dict[str, Stored] = {}
    for path, name in decoder.hf_names(config).items():
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        names[path] = name
    for index, kind in enumerate(parsed(config.layer_kinds)):
        if kind.routed:
            there = f"model.layers.{index}.feed_forward.experts"
            for leaf, disk in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                stack = expert_names(there, config.num_experts, f"{disk}.weight")
                names[f"layers.{index}.mlp.experts.{leaf}_proj"] = stack
        if kind.ordered:
            names |= short_conv.conv_names(config, index)
    return {path: names[path] for path in flatten(spec(config))}


kinds = decoder.kinds
attention_masks = decoder.attention_masks
freqs_cis = decoder.freqs_cis
embed = decoder.embed
unembed = decoder.unembed


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps = layer["attention"], config.rms_norm_eps
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    if LayerKind.parse(kind).ordered:
        mixed = short_conv.gated_convolution(weights, normed, mask, ctx)
    else:
        q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
        q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
        mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5))
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if not LayerKind.parse(kind).routed:
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(
        sigmoid_top_k,
        k=config.num_experts_per_tok,
        bias=layer["mlp"].get("selection_bias"),
        renormalize=config.norm_topk_prob,
        norm_eps=1e-6,
        scale=config.routed_scaling_factor,
    )
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))

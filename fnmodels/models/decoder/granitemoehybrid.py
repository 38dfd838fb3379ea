"""Granite 4 (IBM): Granite's multipliers, with Mamba 2 (arXiv 2405.21060) in most layers, and experts or a dense MLP.

Attention has no positions, except in the members that have attention in all layers. The shared expert is the dense
MLP of members without experts.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers.granite import (  # noqa: F401
    IN_MEMORY,
    MultipliedConfig,
    attend,
    embed,
    expert_names,
    granite_fields,
    granite_to_hf,
    shared_names,
    unembed,
)
from fnmodels.models.common.mamba import Mamba, mamba, mamba_from_hf, mamba_leaves, mamba_names, mamba_to_hf
from fnmodels.models.common.spec import decoder_leaves, gated_mlp_leaves, layer_leaves, moe_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import gated_mlp, no_rotation, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, top_k_softmax
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("granitemoehybrid",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(
    kinds=("linear_moe", "full_moe", "linear", "full"),
    routed=True,
    router=ROUTER,
    in_memory=IN_MEMORY,
)


@dataclass(frozen=True, kw_only=True)
class Config(MultipliedConfig):
    """Sizes and multipliers. intermediate_size: of an expert. rotary: whether attention has rotary embedding."""

    mixer: Mamba
    shared_intermediate_size: int = 1024  # of the shared expert, or of the dense MLP
    num_local_experts: int = 0  # 0: no layer has experts
    num_experts_per_tok: int = 0
    rotary: bool = False
    model_type: str = field(default="granitemoehybrid", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(kind.routed for kind in parsed(self.layer_kinds)):
            mixture.check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = granite_fields(fields, MODEL_TYPES)
        layers, high = usual["num_hidden_layers"], mixture.experts_limit(usual["num_hidden_layers"])
        fields.expect("normalization_function", "rmsnorm")
        fields.expect("mlp_bias", False)
        experts = fields.integer("num_local_experts", 8, low=0, high=high)
        mixers = decoder.listed_kinds(fields, ("layer_types", "layers_block_type"), _TYPES) or ("linear",) * layers
        config = Config(
            **usual,
            mixer=mamba_from_hf(fields, fields.integer("mamba_expand", 2) * usual["hidden_size"]),
            shared_intermediate_size=fields.integer("shared_intermediate_size", 1024),
            num_local_experts=experts,
            num_experts_per_tok=fields.integer("num_experts_per_tok", 2, low=0, high=high),
            rotary=fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "rope",
            layer_kinds=tuple(f"{kind}_moe" if experts else kind for kind in mixers),
        )
        return decoder.finished(config, fields, ignored=("init_method",))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = mamba_to_hf(self.mixer) | {"mamba_expand": self.mixer.rows["x"] // self.hidden_size}
        own |= {"position_embedding_type": "rope" if self.rotary else "nope"}
        linear = [kind.ordered for kind in parsed(self.layer_kinds)]
        own |= {"layer_types": decoder.layer_types(linear, "linear_attention")}
        names = ("shared_intermediate_size", "num_local_experts", "num_experts_per_tok")
        return granite_to_hf(self, "GraniteMoeHybridForCausalLM", *names, **own)


_TYPES = {"linear_attention": "linear", "full_attention": "full", "mamba": "linear", "attention": "full"}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, shared = config.hidden_size, config.initializer_range, config.shared_intermediate_size

    def layer(kind: str) -> Tree:
        if LayerKind.parse(kind).ordered:
            attention = mamba_leaves(D, config.mixer, std=std)
        else:
            attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        if not LayerKind.parse(kind).routed:
            return layer_leaves(D, attention, gated_mlp_leaves(D, shared, std=std))
        experts, inner = config.num_local_experts, config.intermediate_size
        return layer_leaves(D, attention, moe_leaves(D, experts, inner, std=std, shared=shared))

    return decoder_leaves(config, [layer(kind) for kind in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with gate and up of all MLPs fused, and one tensor for all experts."""
    flat = flatten(spec(config))
    names: dict[str, Stored] = {path: decoder.decoder_name(path) for path in flat}
    for index, kind in enumerate(parsed(config.layer_kinds)):
        where, there = f"layers.{index}", f"model.layers.{index}"
        if kind.ordered:
            names |= mamba_names(config.mixer, f"{where}.attention", f"{there}.mamba")
        dense = f"{where}.mlp.shared_expert" if kind.routed else f"{where}.mlp"
        names |= shared_names(index, dense, config.shared_intermediate_size)
        names |= expert_names(index, config.intermediate_size)
    return {path: names[path] for path in flat}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}; R is 0 in Mamba layers, and in all layers of a model without positions."""
    if config.rotary:
        return decoder.freqs_cis(config, positions, length=length)
    return dict.fromkeys(sorted(set(config.layer_kinds)), no_rotation(positions))


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps, share, act = layer["attention"], config.rms_norm_eps, config.residual_multiplier, config.hidden_act
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    if LayerKind.parse(kind).ordered:
        mixed = mamba(weights, normed, mask, config.mixer, ctx, eps=eps, activation=act)
    else:
        mixed = attend(weights, normed, mask, freqs, config, ctx)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed * share))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if LayerKind.parse(kind).routed:
        route = functools.partial(top_k_softmax, k=config.num_experts_per_tok)
        y = ctx.moe(layer["mlp"], normed, route, act=act, dtypes=ROUTER)
    else:
        y = gated_mlp(layer["mlp"], normed, activation=act, tap=ctx.tap)
    return x + ctx.tap("mlp", y * share)


_SIZES = (
    *("hidden_size", "intermediate_size", "shared_intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("num_local_experts", "num_experts_per_tok", "attention_multiplier", "logits_scaling"),
)
_USUAL: dict[str, Any] = {"model_type": "granitemoehybrid", "vocab_size": 100352, "num_hidden_layers": 40}
_USUAL |= {"max_position_embeddings": 131072, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
_USUAL |= {"embedding_multiplier": 12, "residual_multiplier": 0.22}
_HYBRID: dict[str, Any] = {"mamba_d_head": 64, "mamba_d_state": 128}
_HYBRID |= {"layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)]}
_DENSE: dict[str, Any] = {"position_embedding_type": "rope", "rope_theta": 10000000, "layer_types": ["attention"] * 40}
PRESETS = {
    f"granite-4.0-{name}": _USUAL | own | dict(zip(_SIZES, sizes, strict=True))
    for name, own, *sizes in (
        ("h-small", _HYBRID | {"mamba_n_heads": 128}, 4096, 768, 1536, 32, 8, 72, 10, 0.0078125, 16),
        ("h-tiny", _HYBRID | {"mamba_n_heads": 48}, 1536, 512, 1024, 12, 4, 64, 6, 0.0078125, 6),
        ("h-micro", _HYBRID | {"mamba_n_heads": 64}, 2048, 8192, 8192, 32, 8, 0, 0, 0.015625, 8),
        ("micro", _DENSE, 2560, 8192, 8192, 40, 8, 0, 0, 0.015625, 10),
    )
}

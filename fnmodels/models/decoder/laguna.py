"""Laguna (Poolside: XS.2, S 2.1) and Mellum 2 (JetBrains): pre-norm mixtures of experts with two rotary tables.

Queries and keys are normalized per head, and full and sliding-window layers have a rotary table each. In Laguna,
sliding layers may have another number of query heads, attention is multiplied by a softplus gate, and experts are
chosen by sigmoid scores with a selection bias, beside a shared expert. Mellum routes by softmax as Qwen 3 does, and may
have an MTP head: `fnmodels.mtp`; MTP parts of Laguna's files are not read (`drop=("mtp",)`), since no public source
says what they are.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.config_json import renamed as renamed_fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import (
    attention_leaves,
    decoder_leaves,
    head_norms,
    layer_leaves,
    moe_leaves,
    usual_mlp,
    weight,
)
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.ops import ACTIVATIONS, Rope, rms_norm, split_heads, upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.moe.router import RouterDtypes, capped_sigmoid_top_k, sigmoid_top_k, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("laguna", "mellum")
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(
    kinds=("full_moe", "full", "sliding_moe", "sliding"),
    routed=True,
    router=ROUTER,
    unread={"mtp": r"mtp\..*"},  # of Laguna, and where config.json counts no head
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    in_memory={
        r"\.experts\.e_score_correction_bias$": ".gate.e_score_correction_bias",
        r"\.shared_expert\.": ".shared_experts.",
    },
)

_FULL, _NEAR = "full_attention", "sliding_attention"
_HEAD = ("sliding_moe",)
_THETAS = {_FULL: 5e5, _NEAR: 1e4}
# Defaults of absent fields: key/value heads, window, fractions that rotate, dense layers, experts, chosen, their width.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "laguna": (8, 512, {_FULL: 0.5, _NEAR: 1.0}, 1, 256, 8, 512),
    "mellum": (4, 1024, None, 0, 64, 8, 896),
}
_SWITCHES = {"moe_routed_scaling_factor": 1.0, "moe_router_logit_softcapping": 0.0}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of dense layers, num_attention_heads that of full layers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int = 0  # 0: Mellum, which routes by softmax and has no gates
    sliding_attention_heads: int = 0  # query heads of sliding layers; 0: as many as full ones
    gate_per_head: bool = True  # and not per element
    norm_topk_prob: bool = True
    moe_routed_scaling_factor: float = 1.0
    moe_router_logit_softcapping: float = 0.0  # 0: none
    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sliding_window: int | None = None
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use: 0 or 1, of Mellum alone
    mtp_layer_kinds: tuple[str, ...] = _HEAD  # the layer that is the block of the MTP head
    model_type: str = field(default="laguna", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.num_nextn_predict_layers:
            object.__setattr__(self, "mtp_layer_kinds", _HEAD)
        if self.num_nextn_predict_layers > 1 or len(self.mtp_layer_kinds) != 1:
            raise ConfigError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers} and mtp_layer_kinds "
                f"{self.mtp_layer_kinds}; there is at most one MTP head, of one layer."
            )
        mtp.check_kinds(self, self.mtp_layer_kinds)
        mixture.check_experts(self.num_experts, self.num_experts_per_tok)
        object.__setattr__(self, "sliding_attention_heads", self.sliding_attention_heads or self.num_attention_heads)
        decoder.check_sizes(self, "sliding_attention_heads")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        kv_heads, window, partials, dense, experts, chosen, inner = _DEFAULTS[model_type]
        sizes = decoder.decoder_sizes(fields, max_positions=131072, tied=False, kv_heads=kv_heads, head_dim=128)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        ropes = ropes_by_layer_type(fields, _THETAS, scaled=_FULL, partials=partials, **where)
        layers = sizes["num_hidden_layers"]
        slides = decoder.sliding_layers(fields, [False] * layers)
        routed = mixture.routed_layers(fields, layers, dense)
        experts, chosen = mixture.experts_from_hf(fields, experts, chosen, layers)
        own = _laguna(fields, sizes, slides) if model_type == "laguna" else _mellum(fields)
        config = Config(
            **sizes | own,
            num_experts=experts,
            num_experts_per_tok=chosen,
            **fields.plain(moe_intermediate_size=inner, rms_norm_eps=1e-6, attention_bias=False),
            rope=ropes[_FULL],
            local_rope=ropes[_NEAR],
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=fields.integer("sliding_window", window),
            layer_kinds=tuple(
                ("sliding" if near else "full") + "_moe" * moe for near, moe in zip(slides, routed, strict=True)
            ),
            model_type=model_type,
        )
        return decoder.finished(config, fields, _MTP_FIELDS)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        found = parsed(self.layer_kinds)
        own: dict[str, Any] = {"layer_types": decoder.layer_types([k.slides for k in found])}
        own |= {"mlp_layer_types": mixture.mlp_types(found)}
        ropes = {_FULL: self.rope, _NEAR: self.local_rope}
        own["rope_parameters"] = {name: rope_to_hf(rope) for name, rope in ropes.items()}
        names = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "rms_norm_eps", "attention_bias"]
        names += ["hidden_act", "sliding_window"]
        if self.model_type == "mellum":
            if self.num_nextn_predict_layers:
                (head,) = parsed(self.mtp_layer_kinds)
                own |= {"num_nextn_predict_layers": 1, "mtp_layer_types": decoder.layer_types([head.slides])}
                own |= {"mtp_mlp_layer_types": mixture.mlp_types([head])}
            return decoder.decoder_to_hf(self, "MellumForCausalLM", *names, "norm_topk_prob", **own)
        for name, rope in ropes.items():
            own["rope_parameters"][name]["partial_rotary_factor"] = rope.partial  # written even if it is 1
        heads = {False: self.num_attention_heads, True: self.sliding_attention_heads}
        own["num_attention_heads_per_layer"] = [heads[kind.slides] for kind in found]
        own["gating"] = "per-head" if self.gate_per_head else "per-element"
        names += ["shared_expert_intermediate_size", *_SWITCHES]
        return decoder.decoder_to_hf(self, "LagunaForCausalLM", *names, **own)


_MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


def _mellum(fields: Fields) -> dict[str, Any]:
    own: dict[str, Any] = {"norm_topk_prob": fields.boolean("norm_topk_prob", True)}
    counted = renamed_fields(fields, {"num_mtp_layers": "num_nextn_predict_layers"})
    heads = counted.integer("num_nextn_predict_layers", 0, low=0, high=1)
    if heads:
        (slides,) = decoder.sliding_layers(counted, [True], name="mtp_layer_types")
        (routed,) = decoder.sliding_layers(counted, [True], "sparse", "dense", name="mtp_mlp_layer_types")
        kind = ("sliding" if slides else "full") + "_moe" * routed
        own |= {"num_nextn_predict_layers": heads, "mtp_layer_kinds": (kind,)}
    return own


def _laguna(fields: Fields, sizes: dict[str, Any], slides: list[bool]) -> dict[str, Any]:
    fields.expect("moe_apply_router_weight_on_input", False)
    heads = sizes["num_attention_heads"]
    listed = fields.take("num_attention_heads_per_layer", [heads] * len(slides))
    by_type = decoder.by_window(fields, "num_attention_heads_per_layer", listed, slides, heads, low=1)
    return {
        "num_attention_heads": by_type[False],
        "sliding_attention_heads": by_type[True],
        "shared_expert_intermediate_size": fields.integer("shared_expert_intermediate_size", 512),
        "gate_per_head": fields.take("gating", True) in (True, "per-head"),
        **{name: fields.number(name, default, above=-1e-9) for name, default in _SWITCHES.items()},
    }


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, H, biased = config.hidden_size, config.initializer_range, config.head_dim, config.attention_bias
    shared, inner = config.shared_expert_intermediate_size, config.moe_intermediate_size

    def layer(kind: LayerKind) -> Tree:
        heads = config.sliding_attention_heads if kind.slides else config.num_attention_heads
        flags = {"qkv_bias": biased, "o_bias": biased}
        attention = attention_leaves(D, heads, config.num_key_value_heads, H, std=std, **flags) | head_norms(config)
        unit = 1 if config.gate_per_head else H
        if shared:
            attention["gate_proj"] = weight((heads * unit, D), ("heads", "embed"), std, unit=unit)
        mlp = moe_leaves(D, config.num_experts, inner, std=std, shared=shared, selection_bias=shared > 0)
        return layer_leaves(D, attention, mlp if kind.routed else usual_mlp(config))

    leaves = decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)])
    return leaves | mtp.heads(config, layer(LayerKind.parse(config.mtp_layer_kinds[0])))


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of the MTP head."""
    return config.mtp_layer_kinds


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names = {path: mixture.moe_name(path, config.num_experts) for path in flatten(spec(config))}
    changes = ((r"\.gate\.e_score_correction_bias$", ".experts.e_score_correction_bias"), (r"attn\.gate_", "attn.g_"))
    for pattern, new in changes:
        names = {path: renamed(name, pattern, new) for path, name in names.items()}
    # of Mellum, as transformers reads them: its MtpModel, whose maths this is too
    heads = mtp.names_apart(hf_names(mtp.blocks(config)[0]), 1) if config.num_nextn_predict_layers else {}
    return names | heads


freqs_cis = decoder.freqs_cis_by_window


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, mlp, k = layer["attention"], layer["mlp"], config.num_experts_per_tok
    normed, gate = rms_norm(x, layer["input_layernorm"], eps=config.rms_norm_eps), None
    route: Any = functools.partial(softmax_top_k, k=k, renormalize=config.norm_topk_prob)
    if config.shared_expert_intermediate_size:
        gates = elementwise(F.softplus, upcast(linear(normed, weights["gate_proj"]))).to(x.dtype)
        gate = split_heads(gates, 1 if config.gate_per_head else config.head_dim)
        how: dict[str, Any] = {"k": k, "renormalize": True, "norm_eps": 0.0, "scale": config.moe_routed_scaling_factor}
        cap, bias = config.moe_router_logit_softcapping, mlp.get("selection_bias")
        route = functools.partial(sigmoid_top_k, bias=bias, **how)
        route = functools.partial(capped_sigmoid_top_k, softcap=cap, bias=bias, **how) if cap else route
    attended = mixture.attend(weights, normed, mask, freqs, config, ctx, gate)
    return mixture.add_feed(layer, x, attended, config, ctx, route=route, dtypes=ROUTER)


PRESETS: dict[str, ConfigJson] = {
    "laguna-xs.2": {"model_type": "laguna", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192}
    | {"num_hidden_layers": 40, "num_attention_heads": 48}
    | {"layer_types": [_FULL, _NEAR, _NEAR, _NEAR] * 10, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10},
    "mellum2-12b-a2.5b": {"model_type": "mellum", "vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168}
    | {"num_hidden_layers": 28, "num_attention_heads": 32, "layer_types": [_NEAR, _NEAR, _NEAR, _FULL] * 7},
}

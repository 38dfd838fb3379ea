"""Qwen 1.5/2 MoE (arXiv 2407.10671), Qwen 3 MoE (arXiv 2505.09388) and OLMoE (arXiv 2409.02060).

The Llama block with a mixture of experts in some or all layers. Qwen 2 has a gated shared expert; Qwen 3 has per-head
query and key norms; OLMoE has query and key norms over all heads, and may clip q, k and v.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import sections_to_hf, split_sections
from fnmodels.models.common.spec import (
    decoder_leaves,
    head_norms,
    joint_head_norms,
    layer_leaves,
    moe_leaves,
    usual_attention,
    usual_mlp,
    weight,
)
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary, gated_mlp, project_out, rms_norm, split_heads
from fnmodels.ops.linear import linears
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("qwen2_moe", "qwen3_moe", "olmoe")
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("full_moe", "full", "sliding_moe", "sliding"), routed=True, router=ROUTER)
# Defaults of absent fields: key/value heads (0: as many as query heads), experts, top-k, width of an expert.
_DEFAULTS = {"qwen2_moe": (16, 60, 4, 1408), "qwen3_moe": (4, 128, 8, 768), "olmoe": (0, 64, 8, 0)}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of dense layers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of one expert
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    norm_topk_prob: bool = False
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_full: bool = False  # over all heads, instead of per head
    clip_qkv: float | None = None
    sliding_window: int | None = None
    max_position_embeddings: int = 32768
    # rotary frequencies of time, height and width, which are one for text: of Qwen3-VL's text models
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = True
    model_type: str = field(default="qwen3_moe", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        mixture.check_experts(self.num_experts, self.num_experts_per_tok)
        if self.qk_norm_full and not self.qk_norm:
            raise ConfigError("qk_norm_full is True, but qk_norm, which it says more about, is False.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        kv_heads, experts, chosen, inner = _DEFAULTS[model_type]
        sections, interleaved = tuple[int, ...](), True
        if model_type == "qwen3_moe":
            fields, sections, interleaved = split_sections(fields)
        olmoe, second = model_type == "olmoe", model_type == "qwen2_moe"
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=4096 if olmoe else 32768, kv_heads=kv_heads)
        experts, chosen = mixture.experts_from_hf(fields, experts, chosen, usual["num_hidden_layers"])
        bias = fields.boolean("qkv_bias", True) if second else fields.boolean("attention_bias", False)
        inner = fields.integer("moe_intermediate_size", inner) if inner else usual["intermediate_size"]
        window, layer_kinds = _layer_kinds(fields, model_type, usual["num_hidden_layers"])
        if model_type == "qwen3_moe":  # in Qwen3-Coder's files; true of every qwen3_moe
            fields.expect("qkv_bias", bias)
            fields.expect("use_qk_norm", True)
            fields.expect("shared_expert_intermediate_size", 0, None)
        config = Config(
            **usual,
            num_experts=experts,
            num_experts_per_tok=chosen,
            moe_intermediate_size=inner,
            shared_expert_intermediate_size=fields.integer("shared_expert_intermediate_size", 5632) if second else 0,
            norm_topk_prob=fields.boolean("norm_topk_prob", False),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if olmoe else 1e-6),
            qkv_bias=bias,
            o_bias=bias and not second,
            qk_norm=not second,
            qk_norm_full=olmoe,
            clip_qkv=fields.number("clip_qkv") if olmoe and fields.take("clip_qkv", None) is not None else None,
            sliding_window=window,
            layer_kinds=layer_kinds,
            mrope_section=sections,
            mrope_interleaved=interleaved,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        names = ["rms_norm_eps", "hidden_act", "num_experts", "num_experts_per_tok", "norm_topk_prob"]
        second, slides = self.model_type == "qwen2_moe", [kind.slides for kind in parsed(self.layer_kinds)]
        own: ConfigJson = {"qkv_bias" if second else "attention_bias": self.qkv_bias}
        names += ["clip_qkv"] if self.model_type == "olmoe" else ["moe_intermediate_size", "sliding_window"]
        if self.model_type != "olmoe":
            dense = [i for i, kind in enumerate(parsed(self.layer_kinds)) if not kind.routed]
            own |= {"decoder_sparse_step": 1, "mlp_only_layers": dense, "use_sliding_window": any(slides)}
        if second:
            names.append("shared_expert_intermediate_size")
            own["layer_types"] = decoder.layer_types(slides)
        if self.mrope_section:
            own["rope_parameters"] = sections_to_hf(self)
        return decoder.decoder_to_hf(self, f"{self.model_type.title().replace('_', '')}ForCausalLM", *names, **own)


def _layer_kinds(fields: Fields, model_type: str, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """(sliding window, the kind of each layer): which layers have experts, and which a sliding window."""
    if model_type == "olmoe":
        fields.expect("sliding_window", None)
        return None, ("full_moe",) * layers
    on, first = fields.boolean("use_sliding_window", False), fields.integer("max_window_layers", 28, low=0)
    window, slides = fields.integer("sliding_window", 4096, low=0) * on, [on] * layers
    if model_type == "qwen2_moe":
        slides = decoder.sliding_layers(fields, [on and i % 2 == 0 and i < first for i in range(layers)])
    if any(slides) and not window:
        raise ConfigError(f"{fields.where}: 'layer_types' has sliding layers, but 'sliding_window' is off.")
    sparse = mixture.sparse_layers(fields, layers)
    found = [("sliding" if s else "full") + ("_moe" if e else "") for s, e in zip(slides, sparse, strict=True)]
    return window if any(slides) else None, tuple(found)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, shared = config.hidden_size, config.initializer_range, config.shared_expert_intermediate_size
    attention = usual_attention(config, qkv_bias=config.qkv_bias, o_bias=config.o_bias)
    if config.qk_norm:
        attention |= joint_head_norms(config) if config.qk_norm_full else head_norms(config)
    sparse = moe_leaves(D, config.num_experts, config.moe_intermediate_size, std=std, shared=shared)
    sparse |= {"shared_expert_gate": weight((1, D), ("one", "embed"), std)} if shared else {}
    mlps = [sparse if kind.routed else usual_mlp(config) for kind in parsed(config.layer_kinds)]
    return decoder_leaves(config, [layer_leaves(D, attention, mlp) for mlp in mlps])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    return {path: mixture.moe_name(path, config.num_experts) for path in flatten(spec(config))}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    q, k, v = linears(normed, weights, "qkv")
    if config.qk_norm_full:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    if config.clip_qkv is not None:
        q, k, v = (t.clamp(-config.clip_qkv, config.clip_qkv) for t in (q, k, v))
    q, k, v = (split_heads(t, config.head_dim) for t in (q, k, v))
    if config.qk_norm and not config.qk_norm_full:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if not LayerKind.parse(kind).routed:
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))

"""Gemma 4, the text models (Google, 2026): E2B and E4B, 12B, 31B, and 26B-A4B with a mixture of experts.

As in Gemma 3, norms before and after each sublayer, and sliding layers between full ones; the full ones have wider,
fewer heads, and may use their keys before norm and rotation as values. Values are normalized without a weight. The
last layers may read the keys and values of earlier ones (kinds with "_reuse"), and each layer an embedding of the token
of its own. Experts (kinds that end in "_moe") run beside the MLP. Other parts of a checkpoint are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds  # noqa: F401
from fnmodels.models.common.decoder import embed_by_width as embed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import per_layer
from fnmodels.models.common.layers.per_layer import layer_inputs  # noqa: F401
from fnmodels.models.common.moe import check_experts, stacked_experts
from fnmodels.models.common.rope_config import parse_rope, rope_to_hf
from fnmodels.models.common.spec import (
    attention_leaves,
    decoder_leaves,
    gated_mlp_leaves,
    moe_leaves,
    norm,
)
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.ops import ACTIVATIONS, Rope, apply_rotary, gated_mlp, project_out, rotary_table, split_heads
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linears
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight
from fnmodels.tree import Tree, flatten

_CLASSES = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}  # the second is 12B, without embeddings per layer
MODEL_TYPES = (*(f"{wrapper}_text" for wrapper in _CLASSES), *_CLASSES)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
TRAITS = Traits(
    kinds=tuple(see + reuse + moe for moe in ("", "_moe") for reuse in ("", "_reuse") for see in ("full", "sliding")),
    routed=True,
    router=ROUTER,
    unread={
        "vision": r"model\.(vision_tower|vision_embedder|embed_vision)\..*",
        "audio": r"model\.(audio_tower|embed_audio)\..*",
    },
)

_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_SPARSE = ("enable_moe_block", "top_k_experts")
_OTHERS = (  # of the towers and their tokens
    *("vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"),
    *("boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_soft_tokens_per_image"),
)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; head_dim and num_key_value_heads are those of sliding layers."""

    global_head_dim: int = 512  # of full layers
    num_global_key_value_heads: int = 0  # of full layers; 0: num_key_value_heads
    attention_k_eq_v: bool = False  # full layers have no projection to values
    rope: Rope = Rope(1e6, "proportional", 0.25)  # noqa: RUF009 - of full layers
    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    hidden_act: str = "gelu_pytorch_tanh"
    sliding_window: int | None = 512
    final_softcap: float | None = None
    hidden_size_per_layer_input: int = 0  # of the tokens' embeddings for each layer; 0: none
    vocab_size_per_layer_input: int = 262144
    use_double_wide_mlp: bool = False  # in layers that read the keys and values of others
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = self.num_global_key_value_heads or self.num_key_value_heads
        object.__setattr__(self, "num_global_key_value_heads", heads)
        if self.num_attention_heads % heads:
            raise ConfigError(f"num_attention_heads {self.num_attention_heads} is not a multiple of {heads}.")
        for index, kind in enumerate(parsed(self.layer_kinds)):
            if kind.source and kind.source not in self.layer_kinds[:index]:
                raise ConfigError(f"Layer {index} is {kind.name!r}, and no layer before it is {kind.source!r}.")
        if any(kind.routed for kind in parsed(self.layer_kinds)):
            check_experts(self.num_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model types of whole models only `text_config` is used.
        """
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        if model_type in _CLASSES:
            tied = Fields({"tie_word_embeddings": True, **values}, fields.where)
            fields = decoder.text_part(tied, f"{model_type}_text", ignored=_OTHERS)
        unified = model_type.startswith("gemma4_unified")
        positions, window = (262144, 1024) if unified else (131072, 512)
        sizes = decoder.decoder_sizes(fields, max_positions=positions, tied=True, kv_heads=4, head_dim=256)
        layers = sizes["num_hidden_layers"]
        slides = decoder.sliding_layers(fields, [(i + 1) % 6 != 0 and i + 1 < layers for i in range(layers)])
        if slides[-1]:
            raise ConfigError(f"{fields.where}: 'layer_types' ends with a sliding layer, but must with a full one.")
        fields.expect("use_bidirectional_attention", None, "vision")  # "vision": between tokens of an image
        sparse = fields.boolean("enable_moe_block", False)
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        experts, chosen, inner = (fields.integer(name, int(sparse), low=0) * sparse for name in names)
        capped = fields.take("final_logit_softcapping", None) is not None
        full = _full_heads(fields, [i for i in range(layers) if not slides[i]], sizes)
        first = layers - fields.integer("num_kv_shared_layers", 0, low=0, high=layers - 1)  # that reuses
        config = Config(
            **sizes,
            **full,
            num_experts=experts,
            num_experts_per_tok=chosen,
            moe_intermediate_size=inner,
            rope=_rope(fields, "full_attention", full["global_head_dim"], sizes),
            local_rope=_rope(fields, "sliding_attention", sizes["head_dim"], sizes),
            **fields.plain(
                rms_norm_eps=1e-6,
                attention_bias=False,
                sliding_window=window,
                vocab_size_per_layer_input=262144,
                use_double_wide_mlp=False,
            ),
            hidden_act=fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
            final_softcap=fields.number("final_logit_softcapping") if capped else None,
            hidden_size_per_layer_input=fields.integer("hidden_size_per_layer_input", 0 if unified else 256, low=0),
            layer_kinds=tuple(
                ("sliding" if near else "full") + "_reuse" * (i >= first) + "_moe" * sparse
                for i, near in enumerate(slides)
            ),
            model_type=model_type,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the published form; for model type gemma4 with `text_config` but no other tower."""
        unified = self.model_type.startswith("gemma4_unified")
        classes = _CLASSES["gemma4_unified" if unified else "gemma4"]
        if self.model_type in _CLASSES:
            text = replace(self, model_type=f"{self.model_type}_text")
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": [f"{classes}ForConditionalGeneration"], "model_type": self.model_type}
            outer |= {"tie_word_embeddings": self.tie_word_embeddings, "text_config": text.to_hf()}
            return decoder.expressible(self, outer)
        names = ["global_head_dim", "attention_k_eq_v", "rms_norm_eps", "attention_bias", "sliding_window"]
        names += ["use_double_wide_mlp"]
        names += [] if unified else ["hidden_size_per_layer_input", "vocab_size_per_layer_input"]
        if sparse := LayerKind.parse(self.layer_kinds[0]).routed:
            names += ["num_experts", "moe_intermediate_size"]
        own: ConfigJson = {
            "hidden_activation": self.hidden_act,
            "final_logit_softcapping": self.final_softcap,
            "enable_moe_block": sparse,
            "top_k_experts": self.num_experts_per_tok if sparse else None,
            "num_global_key_value_heads": self.num_global_key_value_heads if self.attention_k_eq_v else None,
            "num_kv_shared_layers": sum(kind.source is not None for kind in parsed(self.layer_kinds)),
            "layer_types": decoder.layer_types([kind.slides for kind in parsed(self.layer_kinds)]),
        }
        ropes = {"full_attention": rope_to_hf(self.rope), "sliding_attention": rope_to_hf(self.local_rope)}
        own = {name: value for name, value in own.items() if not (unified and name in _SPARSE)}
        return decoder.decoder_to_hf(self, f"{classes}ForCausalLM", *names, rope_parameters=ropes, **own)


def _full_heads(fields: Fields, full: list[int], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The Config fields of the heads of full layers, as published or as transformers saves them, layer by layer."""
    heads, same = sizes["num_key_value_heads"], fields.boolean("attention_k_eq_v", False)
    fewer = fields.integer("num_global_key_value_heads", heads)
    found = {(fields.integer("global_head_dim", 512, high=1 << 16), fewer if same else heads)}
    layers = decoder.layer_overrides(fields, full)
    if layers:
        found = {(f.integer("head_dim", sizes["head_dim"]), f.integer("num_key_value_heads", heads)) for f in layers}
        if len(found) != 1:
            raise ConfigError(
                f"{fields.where}, per_layer_config must say the same of all full layers, not {sorted(found)}."
            )
        for layer in layers:
            layer.finish()
    ((width, heads),) = found
    return {"global_head_dim": width, "num_global_key_value_heads": heads, "attention_k_eq_v": same}


def _rope(fields: Fields, layer_type: str, head_dim: int, sizes: Mapping[str, int]) -> Rope:
    ropes = fields.take("rope_parameters", _ROPES)
    if not isinstance(ropes, Mapping) or set(ropes) != set(_ROPES):
        raise ConfigError(f"{fields.where}: 'rope_parameters' must have {' and '.join(_ROPES)}, not {shown(ropes)}.")
    inner = Fields(ropes[layer_type], f"{fields.where}, rope of {layer_type}")
    theta: Any = _ROPES[layer_type]["rope_theta"]
    return parse_rope(inner, head_dim=head_dim, max_positions=sizes["max_position_embeddings"], theta=theta)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    tree = decoder_leaves(config, [_layer(config, kind) for kind in parsed(config.layer_kinds)])
    return tree | (per_layer.table_leaves(config) if config.hidden_size_per_layer_input else {})


def _layer(config: Config, kind: LayerKind) -> Tree:
    D, std = config.hidden_size, config.initializer_range
    heads, H, absent = config.num_key_value_heads, config.head_dim, list[str]()
    if not kind.slides:
        heads, H = config.num_global_key_value_heads, config.global_head_dim
        absent = ["v_"] if config.attention_k_eq_v else []
    if borrows := kind.source is not None:
        absent = ["k_", "v_"]
    biased, inner = config.attention_bias, config.intermediate_size
    attention = attention_leaves(D, config.num_attention_heads, heads, H, std=std, qkv_bias=biased, o_bias=biased)
    attention |= {"q_norm": norm(H, "head_dim"), "k_norm": norm(H, "head_dim")}
    mlp: Tree = gated_mlp_leaves(D, 2 * inner if borrows and config.use_double_wide_mlp else inner, std=std)
    names = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if kind.routed:
        mlp |= moe_leaves(D, config.num_experts, config.moe_intermediate_size, std=std)
        mlp |= {"router_scale": norm(D, "embed"), "per_expert_scale": norm(config.num_experts, "router")}
        names += ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"]
    layer: Tree = {name: norm(D, "embed") for name in names}
    layer["attention"] = {name: leaf for name, leaf in attention.items() if name[:2] not in absent}
    layer |= {"mlp": mlp, "layer_scalar": replace(norm(1, "one"), trainable=False)}
    return layer | (per_layer.gate_leaves(config) if config.hidden_size_per_layer_input else {})


def _prefix(config: Config) -> str:
    return "model.language_model." if config.model_type in _CLASSES else "model."


def leftovers(config: Config) -> tuple[str, ...]:
    """The keys and values of layers that read those of others, which files may hold."""
    borrowing = "|".join(str(index) for index, kind in enumerate(parsed(config.layer_kinds)) if kind.source)
    return (rf"{_prefix(config)}layers\.({borrowing})\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)",)


_NAMES = {".mlp.router": ".router.proj.weight", ".mlp.router_scale": ".router.scale"}
_NAMES |= {".mlp.per_expert_scale": ".router.per_expert_scale", ".layer_scalar": ".layer_scalar"}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; experts are stacked, gate and up fused."""
    names: dict[str, Stored] = {}
    for path in flatten(spec(config)):
        end = next((end for end in _NAMES if path.endswith(end)), None)
        names[path] = f"model.{path.removesuffix(end)}{_NAMES[end]}" if end else decoder.decoder_name(path)
    for index, kind in enumerate(parsed(config.layer_kinds)):
        if kind.routed:
            stored = stacked_experts(f"layers.{index}.experts", config.moe_intermediate_size)
            names |= {path.replace(".experts.", ".mlp.experts."): name for path, name in stored.items()}
    return {path: renamed(name, r"^model\.", _prefix(config)) for path, name in names.items()}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, H/2, 2]}, one for full and one for sliding layers."""
    full = rotary_table(config.rope, config.global_head_dim, positions, length)
    near = rotary_table(config.local_rope, config.head_dim, positions, length)
    return {kind: near if LayerKind.parse(kind).slides else full for kind in sorted(set(config.layer_kinds))}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm_fp32_weight(x, layer[name], eps=config.rms_norm_eps)

    mixed = _attention(layer["attention"], normed(x, "input_layernorm"), mask, freqs, config, kind, ctx)
    x = ctx.tap("middle", x + ctx.tap("attention", normed(mixed, "post_attention_layernorm")))
    fed = gated_mlp(layer["mlp"], normed(x, "pre_feedforward_layernorm"), activation=config.hidden_act, tap=ctx.tap)
    if LayerKind.parse(kind).routed:
        routed = _mixture(layer["mlp"], x, normed(x, "pre_feedforward_layernorm_2"), config, ctx)
        fed = normed(fed, "post_feedforward_layernorm_1") + normed(routed, "post_feedforward_layernorm_2")
    x = x + ctx.tap("mlp", normed(fed, "post_feedforward_layernorm"))
    if config.hidden_size_per_layer_input:
        x = x + per_layer.of_layer(layer, x, config, ctx)
    return x * layer["layer_scalar"]


def _attention(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Config, kind: str, ctx: Context) -> Tensor:
    """Attention of x [B, S, D], whose scores are not scaled."""
    H, norms = weights["q_norm"].shape[-1], {"eps": config.rms_norm_eps}
    own = [name for name in "qkv" if f"{name}_proj" in weights]
    heads = {n: split_heads(t, H) for n, t in zip(own, linears(x, weights, own), strict=True)}
    q = apply_rotary(rms_norm_fp32_weight(heads["q"], weights["q_norm"], **norms), freqs)
    if LayerKind.parse(kind).source:
        return project_out(weights, ctx.attend_borrowed(q, mask, scale=1.0))
    v = rms_norm(heads.get("v", heads["k"]), None, **norms)
    k = apply_rotary(rms_norm_fp32_weight(heads["k"], weights["k_norm"], **norms), freqs)
    lend = any(other.source == kind for other in parsed(config.layer_kinds))
    return project_out(weights, ctx.attend(q, k, v, mask, scale=1.0, lend=lend))


def _mixture(mlp: Tree, x: Tensor, normed: Tensor, config: Config, ctx: Context) -> Tensor:
    """The experts on normed [B, S, D]; the router reads x with a scale of its own."""
    read = rms_norm(x, None, eps=config.rms_norm_eps) * mlp["router_scale"] * config.hidden_size**-0.5
    scale = mlp["per_expert_scale"]
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=True, scale=scale)
    return ctx.moe(mlp, (read, normed), route, act=config.hidden_act, dtypes=ROUTER)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm, output head and soft-cap if configured: logits [B, S, V]."""
    normed = rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps)
    logits, cap = decoder.project(params, normed, config), config.final_softcap
    return cap * elementwise(torch.tanh, logits / cap) if cap is not None and decoder.is_lm(config) else logits

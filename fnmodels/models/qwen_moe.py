"""Qwen 1.5/2 MoE (arXiv 2407.10671), Qwen 3 MoE (arXiv 2505.09388) and OLMoE (arXiv 2409.02060).

The Llama block with experts in some or all of its layers. Qwen 2 adds an expert that every token passes through, behind
a gate; Qwen 3 normalizes queries and keys per head; OLMoE over all heads together, and may clip what attention reads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import (
    attention_leaves,
    decoder_leaves,
    gated_mlp_leaves,
    layer_leaves,
    moe_leaves,
    norm,
)
from fnmodels.models.common.storage import Stored
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp, glu
from fnmodels.ops.moe.experts import Experts
from fnmodels.ops.moe.layer import KEPT, MOE_TAPS, moe
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, split_heads
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("qwen2_moe", "qwen3_moe", "olmoe")
KINDS = ("full_moe", "full", "sliding_moe", "sliding")
ROUTED = True
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TAPS = ("attention", "middle", "mlp", *MOE_TAPS)
# Where the key is left out: key/value heads (0: as many as query heads), experts, chosen ones, width of one.
_DEFAULTS = {"qwen2_moe": (16, 60, 4, 1408), "qwen3_moe": (4, 128, 8, 768), "olmoe": (0, 64, 8, 0)}


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` names one of KINDS per layer; left empty, every layer is "full_moe"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of one expert
    shared_expert_intermediate_size: int = 0  # 0: there is none
    norm_topk_prob: bool = False
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_full: bool = False  # over all heads together, not each alone
    clip_qkv: float | None = None
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="qwen3_moe", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        decoder.check_decoder(self, KINDS)
        mixture.check_experts(self.num_experts, self.num_experts_per_tok)
        if self.qk_norm_full and not self.qk_norm:
            raise ConfigError("qk_norm_full is True, but qk_norm, which it says more about, is False.")

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        kv_heads, experts, chosen, inner = _DEFAULTS[model_type]
        olmoe, second = model_type == "olmoe", model_type == "qwen2_moe"
        sizes = decoder.decoder_sizes(fields, max_positions=4096 if olmoe else 32768, tied=False, kv_heads=kv_heads)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        experts, chosen = mixture.experts_from_hf(fields, experts, chosen, sizes["num_hidden_layers"])
        bias = fields.boolean("qkv_bias", True) if second else fields.boolean("attention_bias", False)
        inner = fields.integer("moe_intermediate_size", inner) if inner else sizes["intermediate_size"]
        window, kinds = _layer_kinds(fields, model_type, sizes["num_hidden_layers"])
        if model_type == "qwen3_moe":  # what Qwen3-Coder's files say besides, which is what every model of the type is
            fields.expect("qkv_bias", bias)
            fields.expect("use_qk_norm", True)
            fields.expect("shared_expert_intermediate_size", 0, None)
        config = Config(
            **sizes,
            num_experts=experts,
            num_experts_per_tok=chosen,
            moe_intermediate_size=inner,
            shared_expert_intermediate_size=fields.integer("shared_expert_intermediate_size", 5632) if second else 0,
            norm_topk_prob=fields.boolean("norm_topk_prob", False),
            rope=rope_from_hf(fields, theta=1e4, **where),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if olmoe else 1e-6),
            qkv_bias=bias,
            o_bias=bias and not second,
            qk_norm=not second,
            qk_norm_full=olmoe,
            clip_qkv=fields.number("clip_qkv") if olmoe and fields.take("clip_qkv", None) is not None else None,
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=window,
            layer_kinds=kinds,
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        names = ["rms_norm_eps", "hidden_act", "num_experts", "num_experts_per_tok", "norm_topk_prob"]
        bias = "qkv_bias" if self.model_type == "qwen2_moe" else "attention_bias"
        own: dict[str, Any] = {"rope_parameters": rope_to_hf(self.rope), bias: self.qkv_bias}
        slides = [kind.startswith("sliding") for kind in self.layer_kinds]
        names += ["clip_qkv"] if self.model_type == "olmoe" else ["moe_intermediate_size", "sliding_window"]
        if self.model_type != "olmoe":
            dense = [i for i, kind in enumerate(self.layer_kinds) if not kind.endswith("_moe")]
            own |= {"decoder_sparse_step": 1, "mlp_only_layers": dense, "use_sliding_window": any(slides)}
        if self.model_type == "qwen2_moe":
            shared = self.shared_expert_intermediate_size
            own |= {"shared_expert_intermediate_size": shared, "layer_types": decoder.layer_types(slides)}
        own |= {name: getattr(self, name) for name in names}
        return decoder.decoder_to_hf(self, f"{self.model_type.title().replace('_', '')}ForCausalLM", **own)


def _layer_kinds(fields: Fields, model_type: str, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """The window and the kind of each layer: which have experts, and which look back a window only."""
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
    kinds = [("sliding" if s else "full") + ("_moe" if e else "") for s, e in zip(slides, sparse, strict=True)]
    return window if any(slides) else None, tuple(kinds)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shared, each = config.shared_expert_intermediate_size, norm(H, "head_dim")
    norms = {"q_norm": each, "k_norm": each} if config.qk_norm else {}
    if config.qk_norm_full:
        norms = {"q_norm": norm(heads * H, "heads", unit=H), "k_norm": norm(kv_heads * H, "kv_heads", unit=H)}

    def layer(kind: str) -> Tree:
        qkv, o, inner = config.qkv_bias, config.o_bias, config.moe_intermediate_size
        mlp: Tree = gated_mlp_leaves(D, config.intermediate_size, std=std)
        if kind.endswith("_moe"):
            mlp = moe_leaves(D, config.num_experts, inner, std=std, shared=shared, shared_gate=shared > 0)
        return layer_leaves(D, attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=qkv, o_bias=o) | norms, mlp)

    return decoder_leaves(config, [layer(kind) for kind in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; each expert is a tensor of its own there."""
    return {path: mixture.moe_name(path, config.num_experts) for path in flatten(spec(config))}


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(config.layer_kinds, config.sliding_window, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}."""
    return dict.fromkeys(sorted(set(config.layer_kinds)), rotary_table(config.rope, config.head_dim, positions, length))


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]."""
    return embed_tokens(params["embed_tokens"], inputs)


def block(
    layer: Tree,
    x: Tensor,
    mask: MaskLike,
    freqs: Tensor,
    /,
    *,
    config: Config,
    kind: str,
    kernel: Kernel = "auto",
    layout: Layout | None = None,
    taps: tuple[str, ...] = (),
    valid: Tensor | None = None,
    routing: Tensor | None = None,
    experts: str | Experts = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """One layer: x [B, S, D] -> (x, {counts, router_logits, tap: tensor}). valid, routing, experts: see
    `ops.moe.layer`.
    """
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    q, k, v = (linear(normed, weights[f"{name}_proj"], weights.get(f"{name}_bias")) for name in "qkv")
    if config.qk_norm_full:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    if config.clip_qkv is not None:
        q, k, v = (t.clamp(-config.clip_qkv, config.clip_qkv) for t in (q, k, v))
    q, k, v = (split_heads(t, config.head_dim) for t in (q, k, v))
    if config.qk_norm and not config.qk_norm_full:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended
    normed = rms_norm(middle, layer["post_attention_layernorm"], eps=eps)
    named = {"attention": attended, "middle": middle}
    if not kind.endswith("_moe"):
        named["mlp"] = gated_mlp(layer["mlp"], normed, activation=config.hidden_act)
        return middle + named["mlp"], {name: named[name] for name in taps}
    chosen, renormalize = config.num_experts_per_tok, config.norm_topk_prob
    route = functools.partial(softmax_top_k, k=chosen, renormalize=renormalize, dtype=ROUTER.output_dtype(x.dtype))
    given: Any = {"valid": valid, "routing": routing, "experts": experts, "kernel": kernel}
    fed, routed = moe(layer["mlp"], normed, route, act=functools.partial(glu, activation=config.hidden_act), **given)
    return middle + fed, {name: (named | routed | {"mlp": fed})[name] for name in (*KEPT, *taps)}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]. A tied head reads the embedding's one leaf."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head)

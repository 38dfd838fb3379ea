"""Command A+ (Cohere 2 with experts): parallel attention and experts, which share one norm without bias.

Rotary embedding is interleaved and logits are scaled. Sliding-window layers rotate; full ones do not, but for the
dense layers in front in models whose dense layers all have full attention. Experts are weighted by a softmax over the
chosen logits, or by their sigmoids.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.spec import decoder_leaves, gated_mlp_leaves, moe_leaves, norm, usual_attention
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.ops import apply_rotary_interleaved, layer_norm, project_out, project_qkv, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, top_k_sigmoid, top_k_softmax
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("cohere2_moe",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("full_nope_moe", "sliding_moe", "full_nope", "sliding", "full"), routed=True, router=ROUTER)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of one expert."""

    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int = 0
    average_experts: bool = True  # of the shared and the routed ones, instead of their sum
    sigmoid_scores: bool = False  # instead of a softmax
    norm_topk_prob: bool = True  # of sigmoids
    prefix_dense_intermediate_size: int = 0  # of dense layers; 0: intermediate_size
    rms_norm_eps: float | None = None  # None: LayerNorm
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    logit_scale: float = 0.0625
    sliding_window: int | None = None
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        mixture.check_experts(self.num_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        rope = values.get("rope_parameters")
        if isinstance(rope, dict) and "rope_theta" in rope:  # transformers writes its default beside it, and ignores it
            fields = Fields({name: value for name, value in values.items() if name != "rope_theta"})
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=8192, tied=True, head_dim=128)
        layers = usual["num_hidden_layers"]
        experts, chosen = mixture.experts_from_hf(fields, 8, 2, layers)
        routed = mixture.routed_layers(fields, layers, 0)
        rms = fields.take("rms_norm_eps", None)
        config = Config(
            **usual,
            num_experts=experts,
            num_experts_per_tok=chosen,
            num_shared_experts=fields.integer("num_shared_experts", 0, low=0),
            average_experts=_is(fields, "shared_expert_combination_strategy", "average", "sum"),
            sigmoid_scores=not _is(fields, "expert_selection_fn", "softmax", "sigmoid"),
            prefix_dense_intermediate_size=fields.integer("prefix_dense_intermediate_size", 0, low=0),
            rms_norm_eps=None if rms is None else fields.number("rms_norm_eps"),
            **fields.plain(layer_norm_eps=1e-5, attention_bias=False, logit_scale=0.0625, norm_topk_prob=True),
            sliding_window=fields.integer("sliding_window", 4096),
            layer_kinds=_layer_kinds(fields, routed),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        found = parsed(self.layer_kinds)
        own: dict[str, Any] = {
            "layer_types": decoder.layer_types([k.slides for k in found]),
            "mlp_layer_types": mixture.mlp_types(found),
        }
        own["prefix_dense_sliding_window_pattern"] = 1 if "full" in self.layer_kinds else 2
        own["prefix_dense_intermediate_size"] = self.prefix_dense_intermediate_size or None
        own["shared_expert_combination_strategy"] = "average" if self.average_experts else "sum"
        own["expert_selection_fn"] = "sigmoid" if self.sigmoid_scores else "softmax"
        names: tuple[str, ...] = ("num_experts", "num_experts_per_tok", "num_shared_experts", "norm_topk_prob")
        names += ("rms_norm_eps", "layer_norm_eps", "attention_bias", "hidden_act", "logit_scale", "sliding_window")
        return decoder.decoder_to_hf(self, "Cohere2MoeForCausalLM", *names, **own)


def _is(fields: Fields, name: str, default: str, other: str) -> bool:
    """Whether a field with two values has its default."""
    return fields.choice(name, (default, other), default) == default


def _layer_kinds(fields: Fields, routed: list[bool]) -> tuple[str, ...]:
    """The kind of each layer; the dense ones in front have a pattern of their own."""
    every, dense_every = decoder.sliding_pattern(fields, 4), fields.integer("prefix_dense_sliding_window_pattern", 1)
    dense = fields.integer("first_k_dense_replace", 0, low=0)
    rule = [(i + 1) % dense_every != 0 if i < dense else (i - dense + 1) % every != 0 for i in range(len(routed))]
    slides = decoder.sliding_layers(fields, rule)
    rotates = dense_every == 1
    attends = [
        "sliding" if s else "full" if rotates and not r else "full_nope" for s, r in zip(slides, routed, strict=True)
    ]
    return tuple(kind + "_moe" * moe for kind, moe in zip(attends, routed, strict=True))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, inner, biased = (
        config.hidden_size,
        config.initializer_range,
        config.intermediate_size,
        config.attention_bias,
    )
    attention = usual_attention(config, qkv_bias=biased, o_bias=biased)
    dense = gated_mlp_leaves(D, config.prefix_dense_intermediate_size or inner, std=std)
    experts = moe_leaves(D, config.num_experts, inner, std=std, shared=inner * config.num_shared_experts)

    def layer(kind: LayerKind) -> Tree:
        mlp = experts if kind.routed else dense
        return {"input_layernorm": norm(D, "embed"), "attention": attention, "mlp": mlp}

    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names = {path: mixture.moe_name(path, config.num_experts) for path in flatten(spec(config))}
    return {path: renamed(name, r"\.shared_expert\.", ".shared_experts.") for path, name in names.items()}


def _norm(x: Tensor, scale: Tensor, config: Config) -> Tensor:
    if config.rms_norm_eps is None:
        return layer_norm(x, scale, None, eps=config.layer_norm_eps)
    return rms_norm(x, scale, eps=config.rms_norm_eps)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, normed, k = layer["attention"], _norm(x, layer["input_layernorm"], config), config.num_experts_per_tok
    q, key, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, key = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(key, freqs)
    mixed = ctx.attend(q, key, v, mask, scale=config.head_dim**-0.5)
    route = functools.partial(top_k_softmax, k=k)
    if config.sigmoid_scores:
        route = functools.partial(top_k_sigmoid, k=k, renormalize=config.norm_topk_prob)
    halved = "shared_expert" in layer["mlp"] and config.average_experts
    x = x + ctx.tap("attention", project_out(weights, mixed))
    fed = mixture.feed(layer["mlp"], normed, config, ctx, route=route, dtypes=ROUTER)
    return x + ctx.tap("mlp", fed / 2 if halved else fed)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm, output head and logit scale: logits [B, S, V]."""
    logits = decoder.project(params, _norm(x, params["norm"], config), config)
    return logits * config.logit_scale if decoder.is_lm(config) else logits

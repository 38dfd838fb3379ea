"""GLM-4.5 to 4.7 with experts (arXiv 2508.06471): GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7.

A pre-norm decoder with grouped queries, half-layout rotary embedding of the first half of each head, a few dense layers
and then sparse ones, which route as DeepSeek V3 does. Its heads that predict further tokens: `fnmodels.mtp`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common import moe as mixture
from fnmodels.models.common import mtp
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import check_decoder, decoder_sizes, decoder_to_hf
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, layer_leaves, norm
from fnmodels.models.common.storage import Stored
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp, glu
from fnmodels.ops.moe.experts import Experts
from fnmodels.ops.moe.layer import KEPT, MOE_TAPS, moe
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("glm4_moe",)
KINDS = ("full", "full_moe")
ROUTED = True
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TAPS = ("attention", "middle", "mlp", *MOE_TAPS)
OPTIONAL = {"mtp": "num_nextn_predict_layers"}  # what files may hold or not, and the field that counts it

_PARTIAL = 0.5  # the share of a head that rotates, where config.json does not say


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` names one of KINDS per layer; left empty, every layer is "full" (dense)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense layers
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1  # the shared expert is as wide as so many
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope(partial=_PARTIAL)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of q, k and v
    use_qk_norm: bool = False
    hidden_act: str = "silu"
    layer_kinds: tuple[str, ...] = ()
    num_nextn_predict_layers: int = 0  # heads in params["mtp"], which the forward pass does not use
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="glm4_moe", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, KINDS)
        mixture.check_groups(self)

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=131072, tied=False, kv_heads=8)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        config = Config(
            **sizes,
            **mixture.grouped_from_hf(fields, sizes["num_hidden_layers"], dense=1, scale=1.0),
            rope=rope_from_hf(fields, theta=1e4, partial=_PARTIAL, **where),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            attention_bias=fields.boolean("attention_bias", False),
            use_qk_norm=fields.boolean("use_qk_norm", False),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "attention_bias", "use_qk_norm", "hidden_act", "num_nextn_predict_layers")
        own = mixture.grouped_to_hf(self) | {name: getattr(self, name) for name in names}
        rope = rope_to_hf(self.rope) | {"partial_rotary_factor": self.rope.partial}  # said even where it is all
        return decoder_to_hf(self, "Glm4MoeForCausalLM", rope_parameters=rope, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias

    def layer(kind: str) -> Tree:
        attention = attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=bias)
        if config.use_qk_norm:
            attention |= {"q_norm": norm(H, "head_dim"), "k_norm": norm(H, "head_dim")}
        return layer_leaves(D, attention, mixture.grouped_leaves(config, kind, selection_bias=True))

    layers = [layer(kind) for kind in config.layer_kinds]
    return decoder_leaves(config, layers) | mtp.heads(config, layer(config.layer_kinds[-1]))


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; experts are a tensor each."""
    return mixture.grouped_names(config, flatten(spec(config)))


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter it repeats}: what the heads have there beside their own."""
    return mtp.copies(config)


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(config.layer_kinds, None, positions, segment_ids, create=create)


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
    """One layer: x [B, S, D] -> (x, {tap: tensor}); a sparse one always returns counts and router_logits."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    if config.use_qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended
    normed = rms_norm(middle, layer["post_attention_layernorm"], eps=eps)
    named = {"attention": attended, "middle": middle}
    if kind == "full":
        named["mlp"] = gated_mlp(layer["mlp"], normed, activation=config.hidden_act)
        return middle + named["mlp"], {name: named[name] for name in taps}
    how = mixture.grouped_choice(config, ROUTER.output_dtype(x.dtype))
    route = functools.partial(sigmoid_top_k, bias=layer["mlp"]["selection_bias"], **how)
    act = functools.partial(glu, activation=config.hidden_act)
    given: Any = {"valid": valid, "routing": routing, "experts": experts, "kernel": kernel}
    fed, routed = moe(layer["mlp"], normed, route, act=act, wide_router=ROUTER.wide_projection, **given)
    return middle + fed, {name: (named | routed | {"mlp": fed})[name] for name in (*KEPT, *taps)}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]. A tied head reads the embedding's one leaf."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head)

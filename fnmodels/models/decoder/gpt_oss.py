"""gpt-oss 20B and 120B (OpenAI, arXiv 2508.10925): a mixture of experts in every layer, and attention sinks.

Each head has a sink: one more logit in the softmax, without a value. Every second layer has a sliding window. Experts
use a clamped SwiGLU, and all projections have biases. The published files hold the experts as mxfp4, which
`params.load_pretrained` dequantizes; they are saved as bf16, with the columns of gate and up interleaved.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.moe import check_experts, experts_from_hf, transposed_experts
from fnmodels.models.common.rope_config import parse_rope, rope_values
from fnmodels.models.common.spec import Leaf, Normal, decoder_leaves, layer_leaves, moe_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, project_out, project_qkv, rms_norm_fp32_weight
from fnmodels.ops.mlp import clamped_swiglu
from fnmodels.ops.moe.router import RouterDtypes, top_k_softmax
from fnmodels.tree import Tree

MODEL_TYPES = ("gpt_oss",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("full_moe", "sliding_moe"), routed=True, router=ROUTER, sinks=True, says_transposed=True)

# The default rope of transformers for a config.json without one.
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.SizesConfig):
    """Sizes and switches; intermediate_size is that of one expert."""

    num_local_experts: int
    num_experts_per_tok: int
    rope: Rope = Rope(150000.0)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=131072, kv_heads=8, head_dim=64, rope=_rope)
        experts, chosen = experts_from_hf(fields, 128, 4, usual["num_hidden_layers"])
        slides = decoder.sliding_layers(fields, [i % 2 == 0 for i in range(usual["num_hidden_layers"])])
        fields.expect("hidden_act", "silu")  # without effect: experts use the clamped SwiGLU
        del usual["hidden_act"]
        # duplicates, under the names of OpenAI's code
        fields.expect("experts_per_token", chosen)
        fields.expect("initial_context_length", usual["rope"].original_max_position_embeddings)
        config = Config(
            **usual,
            num_local_experts=experts,
            num_experts_per_tok=chosen,
            **fields.plain(rms_norm_eps=1e-5, attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0),
            sliding_window=fields.integer("sliding_window", 0 if "sliding_window" in values else 128, low=0) or None,
            layer_kinds=tuple("sliding_moe" if slide else "full_moe" for slide in slides),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "attention_bias", "swiglu_alpha", "swiglu_limit", "sliding_window")
        types = decoder.layer_types([kind.slides for kind in parsed(self.layer_kinds)])
        experts = ("num_local_experts", "num_experts_per_tok")
        return decoder.decoder_to_hf(self, "GptOssForCausalLM", *names, *experts, layer_types=types)


def _rope(fields: Fields, **where: int) -> Rope:
    none = all(fields.values.get(name) is None for name in ("rope_parameters", "rope_scaling"))
    inner = Fields(rope_values(fields) | (_YARN if none else {}), f"{fields.where}, rope")
    return parse_rope(inner, **where, theta=150000.0)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; biases in attention and experts, and one sink logit per head."""
    D, std, on = config.hidden_size, config.initializer_range, config.attention_bias
    attention = usual_attention(config, qkv_bias=on, o_bias=on)
    heads, dtype = config.num_attention_heads, attention["q_proj"].dtype
    attention["sinks"] = Leaf((heads,), dtype, ("heads",), Normal(std), decay=False)
    experts, inner = config.num_local_experts, config.intermediate_size
    mlp = moe_leaves(D, experts, inner, std=std, biases=True)
    layer = layer_leaves(D, attention, mlp)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its slice of the tensor of all experts}."""
    D, inner = config.hidden_size, config.intermediate_size
    names: dict[str, Stored] = decoder.hf_names(config)
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.mlp", f"model.layers.{i}.mlp"
        names[f"layers.{i}.attention.sinks"] = f"model.layers.{i}.self_attn.sinks"
        names[f"{ours}.router_bias"] = f"{theirs}.router.bias"
        experts = transposed_experts(f"{ours}.experts", f"{theirs}.experts", D, inner, in_turn=True)
        names |= experts | {f"{ours}.experts.down_bias": f"{theirs}.experts.down_proj_bias"}
        for leaf in ("gate", "up"):
            part = experts[f"{ours}.experts.{leaf}_proj"]
            names[f"{ours}.experts.{leaf}_bias"] = replace(part, name=f"{part.name}_bias")
    return names


unembed = decoder.unembed_fp32_weight


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = rms_norm_fp32_weight(x, layer["input_layernorm"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5, sinks=weights["sinks"])
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm_fp32_weight(x, layer["post_attention_layernorm"], eps=eps)
    route = functools.partial(top_k_softmax, k=config.num_experts_per_tok)
    act = functools.partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=act, dtypes=ROUTER))

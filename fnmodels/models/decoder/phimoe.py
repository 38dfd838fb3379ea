"""Phi-3.5-MoE (Microsoft, arXiv 2404.14219): the Llama block with LayerNorms, and two experts by a sparse mixer."""

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.moe import block_sparse_names, check_experts, experts_from_hf
from fnmodels.models.common.rope_config import parse_rope, rope_to_hf, rope_values
from fnmodels.models.common.spec import bias, decoder_leaves, layer_leaves, moe_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, layer_norm, project_out, project_qkv
from fnmodels.ops.moe.router import RouterDtypes, sparse_mixer
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("phimoe",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(
    kinds=("full_moe", "sliding_moe"),
    routed=True,
    router=ROUTER,
    in_memory={r"\.block_sparse_moe\.": ".mlp.", r"\.mlp\.gate\.": ".mlp.router."},
    classes={"phimoe": "PhiMoEForCausalLM"},
)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of one expert, rms_norm_eps that of the LayerNorms."""

    num_local_experts: int
    router_jitter_noise: float = 0.01  # half the band of scores, beside a chosen one, that share its weight
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    lm_head_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_local_experts, self.num_experts_per_tok)

    @property
    def num_experts_per_tok(self) -> int:
        """A sparse mixer chooses two."""
        return 2

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=131072, kv_heads=8, rope=_rope)
        experts, _ = experts_from_hf(fields, 16, 2, usual["num_hidden_layers"])
        fields.expect("num_experts_per_tok", 2)
        config = Config(
            **usual,
            num_local_experts=experts,
            **fields.plain(router_jitter_noise=0.01, rms_norm_eps=1e-5, attention_bias=False, lm_head_bias=False),
            **decoder.one_window(fields, usual["num_hidden_layers"], "_moe"),
        )
        return decoder.finished(config, fields, ("input_jitter_noise", "original_max_position_embeddings"))  # training

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names: tuple[str, ...] = (
            "num_local_experts",
            "num_experts_per_tok",
            "router_jitter_noise",
            "rms_norm_eps",
            "attention_bias",
        )
        names += ("lm_head_bias", "hidden_act", "sliding_window")
        rope = rope_to_hf(self.rope)
        factor = rope.pop("attention_factor", None)
        rope |= {} if factor is None else {"short_mscale": factor, "long_mscale": factor}
        return decoder.decoder_to_hf(self, "PhimoeForCausalLM", *names, rope_parameters=rope)


def _rope(fields: Fields, **where: int) -> Rope:
    """A rope whose factor on cos and sin is called `short_mscale` and `long_mscale`, which must be equal."""
    values = rope_values(fields)
    inner = Fields(values, f"{fields.where}, rope")
    short, long = inner.take("short_mscale", None), inner.take("long_mscale", None)
    if short != long:
        raise UnsupportedError(
            f"{inner.where}: 'short_mscale' is {short} and 'long_mscale' {long}; they must be equal."
        )
    factor = {} if short is None else {"attention_factor": short}
    plain = {name: value for name, value in values.items() if name not in ("short_mscale", "long_mscale")}
    rope = parse_rope(Fields(plain | factor, inner.where), **where, theta=1e6)
    if rope.kind not in ("default", "longrope"):
        raise UnsupportedError(f"{inner.where}: 'rope_type' is {rope.kind!r}; phimoe has default and longrope.")
    return replace(rope, attention_factor=short)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, biased = config.hidden_size, config.initializer_range, config.attention_bias
    mlp = moe_leaves(D, config.num_local_experts, config.intermediate_size, std=std)
    layer = layer_leaves(D, usual_attention(config, qkv_bias=biased, o_bias=biased), mlp, norm_bias=True)
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)
    has_bias = config.lm_head_bias and decoder.is_lm(config)
    return tree | ({"lm_head_bias": bias(config.vocab_size, "vocab")} if has_bias else {})


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names = block_sparse_names(flatten(spec(config)), config.num_local_experts)
    return names | ({"lm_head_bias": "lm_head.bias"} if "lm_head_bias" in names else {})


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    route = functools.partial(sparse_mixer, jitter=config.router_jitter_noise)
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final LayerNorm and output head: logits [B, S, V]."""
    normed = layer_norm(x, params["norm"], params["norm_bias"], eps=config.rms_norm_eps)
    return decoder.project(params, normed, config)

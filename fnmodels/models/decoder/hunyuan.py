"""Hunyuan V1 (Tencent): 0.5B to 7B and the translation models (dense), and Hunyuan-A13B (experts in each layer).

The Llama block with query and key norms after the rotary embedding. Experts are chosen by softmax, beside a shared one.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.moe import check_experts, experts_limit, feed, moe_name
from fnmodels.models.common.rope_config import parse_rope, rope_values
from fnmodels.models.common.spec import (
    decoder_leaves,
    head_norms,
    layer_leaves,
    moe_leaves,
    usual_attention,
    usual_mlp,
)
from fnmodels.models.common.storage import Stored, renamed_parts
from fnmodels.ops import Rope, apply_rotary, project_out, project_qkv, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("hunyuan_v1_dense", "hunyuan_v1_moe")
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("full", "full_moe"), routed=True, router=ROUTER)


# Settings of the publisher's code at the only values that the maths here has.
_FIXED = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False, "norm_type": "rms", "use_rotary_pos_emb": True}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of one expert, and of the shared one."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    max_position_embeddings: int = 262144
    num_experts: int = 0  # 0: dense layers
    num_experts_per_tok: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(kind.routed for kind in parsed(self.layer_kinds)):
            check_experts(self.num_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        dense = Fields(values).choice("model_type", MODEL_TYPES) == "hunyuan_v1_dense"
        fields = Fields(values) if dense else _one_number(renamed(Fields(values), {"moe_topk": "num_experts_per_tok"}))
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=2048, rope=_rope)
        for name, value in _FIXED.items():
            fields.expect(name, value)
        config = Config(
            **usual,
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False),
            **_no_experts(fields) if dense else _experts(fields, usual),
        )
        return decoder.finished(config, fields, ignored=("pool_type",))  # of heads for classes

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect, with the theta that results from `alpha` instead of `alpha`."""
        names = ("rms_norm_eps", "attention_bias", "hidden_act")
        if self.model_type == "hunyuan_v1_dense":
            return decoder.decoder_to_hf(self, "HunYuanDenseV1ForCausalLM", *names)
        own = {"num_experts": self.num_experts, "moe_topk": self.num_experts_per_tok}
        return decoder.decoder_to_hf(self, "HunYuanMoEV1ForCausalLM", *names, **own)


def _no_experts(fields: Fields) -> dict[str, Any]:
    fields.expect("num_experts", 1)
    return {}


def _experts(fields: Fields, usual: dict[str, Any]) -> dict[str, Any]:
    """The Config fields of layers with experts; the publisher's further fields restate what the maths here is."""
    layers, inner = usual["num_hidden_layers"], usual["intermediate_size"]
    high = experts_limit(layers)
    for name, values in (
        ("moe_intermediate_size", (inner,)),
        ("num_shared_expert", (1,)),
        ("use_mixed_mlp_moe", (True,)),
        ("moe_layer_num_skipped", (0,)),
        ("norm_topk_prob", (True,)),
        ("moe_drop_tokens", (False,)),
    ):
        fields.expect(name, *values)
    return {
        "num_experts": fields.integer("num_experts", 1, high=high),
        "num_experts_per_tok": fields.integer("num_experts_per_tok", 1, high=high),
        "layer_kinds": ("full_moe",) * layers,
    }


def _one_number(fields: Fields) -> Fields:
    """The fields with one number in place of a list that has the same one for each layer."""

    def one(value: Any) -> Any:
        alike = isinstance(value, list) and len(value) > 0 and all(type(v) is int and v == value[0] for v in value)
        return value[0] if alike else value

    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")
    return Fields({**fields.values} | {n: one(fields.values[n]) for n in names if n in fields.values}, fields.where)


def _rope(fields: Fields, *, head_dim: int, max_positions: int) -> Rope:
    """`parse_rope`, except that "dynamic" with `alpha` is a larger theta at any length and ignores other fields."""
    values = rope_values(fields)
    inner = Fields(values, f"{fields.where}, rope")
    types = [values[name] for name in ("rope_type", "type") if name in values]
    if not types or any(one != "dynamic" for one in types) or values.get("alpha") is None:
        return parse_rope(inner, head_dim=head_dim, max_positions=max_positions, theta=1e4)
    if head_dim % 2 or head_dim == 2:
        raise ConfigError(f"{inner.where}: 'head_dim' is {head_dim}; with 'alpha' it must be even and more than 2.")
    inner.expect("partial_rotary_factor", 1, 1.0)
    theta = inner.number("rope_theta", 1e4) * inner.number("alpha") ** (head_dim / (head_dim - 2))
    unread = ("rope_type", "type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    inner.finish(ignored=unread)
    return Rope(theta)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    bias = config.attention_bias
    attention = usual_attention(config, qkv_bias=bias, o_bias=bias) | head_norms(config)
    D, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
    mlp = moe_leaves(D, config.num_experts, inner, std=std, shared=inner) if config.num_experts else usual_mlp(config)
    return decoder_leaves(config, [layer_leaves(D, attention, mlp) for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    parts = {"q_norm": "query_layernorm", "k_norm": "key_layernorm", "gate": "gate.wg", "shared_expert": "shared_mlp"}
    return {path: renamed_parts(moe_name(path, config.num_experts), parts) for path in flatten(spec(config))}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q = rms_norm(apply_rotary(q, freqs), weights["q_norm"], eps=eps)
    k = rms_norm(apply_rotary(k, freqs), weights["k_norm"], eps=eps)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=True)
    return x + ctx.tap("mlp", feed(layer["mlp"], normed, config, ctx, route=route, dtypes=ROUTER))


def _preset(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int = 120818) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 262144}
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    rest = {"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_parameters": rope, "tie_word_embeddings": True}
    return sizes | rest


PRESETS: dict[str, ConfigJson] = {
    "hunyuan-0.5b": _preset(1024, 3584, 24, 16, 8),
    "hunyuan-1.8b": _preset(2048, 6144, 32, 16, 4),
    "hunyuan-4b": _preset(3072, 8192, 36, 32, 8),
    "hunyuan-7b": _preset(4096, 14336, 32, 32, 8, vocab=128167),
    "hunyuan-a13b": {"model_type": "hunyuan_v1_moe", "vocab_size": 128167, "hidden_size": 4096}
    | {"intermediate_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 128, "num_experts": 64, "moe_topk": 8, "tie_word_embeddings": True},
}

"""DBRX (Databricks, 132B-A36B): Mixtral's block with LayerNorms without biases, and clipped queries, keys, values.

On disk these three are one tensor, and the experts of a layer lie below each other in three.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.moe import check_experts, experts_limit
from fnmodels.models.common.rope_config import rope_to_hf
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, moe_leaves, usual_attention
from fnmodels.models.common.storage import Stack, Stored, TensorSlice, fuse
from fnmodels.ops import ACTIVATIONS, apply_rotary, layer_norm, project_out, project_qkv
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("dbrx",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("full_moe",), routed=True, router=ROUTER, dropout={"resid_pdrop": ("attention", "mlp")})
_NAMES = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
_NAMES |= {"max_seq_len": "max_position_embeddings"}
_DEFAULTS = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
_EPS = 1e-5  # of its norms, which config.json does not say
_THEIRS = 1e4  # transformers writes this rope_theta at the top whatever attn_config says


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. clip_qkv: the largest magnitude of queries, keys and values; intermediate_size: of an expert.

    norm_topk_prob: the weights of the chosen experts are divided by their sum.
    """

    num_experts: int
    num_experts_per_tok: int
    clip_qkv: float | None = None
    norm_topk_prob: bool = True
    layer_norm_eps: float = _EPS
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        for name in ("n_layers", "num_hidden_layers"):
            Fields(values).integer(name, 1, high=LAYERS_LIMIT)
        fields = renamed(Fields(values), _NAMES)
        attention = Fields(fields.take("attn_config", None) or {}, f"{fields.where}, attn_config")
        experts = Fields(fields.take("ffn_config", None) or {}, f"{fields.where}, ffn_config")
        inner: dict[str, Any] = {"intermediate_size": experts.integer("ffn_hidden_size", 3584)}
        inner |= {"num_key_value_heads": attention.integer("kv_n_heads", 1), "hidden_act": _activation(experts)}
        theta = attention.number("rope_theta", _THEIRS)
        given = {n: v for n, v in fields.values.items() if n not in ("attn_config", "ffn_config")}
        fields = Fields(_DEFAULTS | given | inner | {"rope_parameters": _rope(fields, theta)}, fields.where)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=theta, max_positions=2048)
        fields.expect("tie_word_embeddings", False)
        high = experts_limit(usual["num_hidden_layers"])
        experts.expect("moe_normalize_expert_weights", 1)
        config = Config(
            **usual,
            num_experts=experts.integer("moe_num_experts", 4, high=high),
            num_experts_per_tok=experts.integer("moe_top_k", 1, high=high),
            clip_qkv=None if attention.take("clip_qkv", None) is None else attention.number("clip_qkv"),
            norm_topk_prob=experts.values.get("moe_normalize_expert_weights", 1)
            is not None,  # null: they are as they are
            layer_kinds=("full_moe",) * usual["num_hidden_layers"],
        )
        rate = attention.number("attn_pdrop", 0.0, above=-1e-9)
        for part in (attention, experts):
            part.expect("is_encoder_decoder", False)
        attention.finish()
        experts.finish(("hidden_size", "moe_loss_weight", "moe_jitter_eps"))  # d_model counts; the last is of training
        config = decoder.finished(config, fields)
        return replace(config, dropout=replace(config.dropout, weights=rate))

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of published files."""
        attention = {"kv_n_heads": self.num_key_value_heads, "clip_qkv": self.clip_qkv, "rope_theta": self.rope.theta}
        attention |= {"attn_pdrop": self.dropout.weights}
        experts: ConfigJson = {"ffn_hidden_size": self.intermediate_size, "ffn_act_fn": {"name": self.hidden_act}}
        experts |= {"moe_num_experts": self.num_experts, "moe_top_k": self.num_experts_per_tok}
        experts |= {"moe_normalize_expert_weights": 1.0 if self.norm_topk_prob else None}
        own = {theirs: getattr(self, ours) for theirs, ours in _NAMES.items()}
        own |= {"attn_config": attention, "ffn_config": experts, "rope_parameters": rope_to_hf(self.rope)}
        return decoder.decoder_to_hf(self, "DbrxForCausalLM", **own)


def _activation(experts: Fields) -> str:
    act = Fields(experts.take("ffn_act_fn", None) or {}, f"{experts.where}, ffn_act_fn")
    name = act.choice("name", tuple(ACTIVATIONS), "silu")
    act.finish()
    return name


def _rope(fields: Fields, theta: float) -> dict[str, Any]:
    """The rope object with the theta of attn_config, which published files have; UnsupportedError for another one."""
    rope = dict(fields.take("rope_parameters", None) or {})
    stated = rope.get("rope_theta", theta)
    if stated not in (theta, _THEIRS):
        raise UnsupportedError(
            f"{fields.where}: 'rope_theta' is {stated} in rope_parameters and {theta} in attn_config; they must agree."
        )
    return rope | {"rope_theta": theta}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std = config.hidden_size, config.initializer_range
    mlp = moe_leaves(D, config.num_experts, config.intermediate_size, std=std)
    layer = layer_leaves(D, usual_attention(config), mlp)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


_ON_DISK = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.blocks.",
    "model.norm.": "transformer.norm_f.",
    ".self_attn.o_proj.": ".norm_attn_norm.attn.out_proj.",
    ".input_layernorm.": ".norm_attn_norm.norm_1.",
    ".post_attention_layernorm.": ".norm_attn_norm.norm_2.",
    ".mlp.router.": ".ffn.router.layer.",
}
_EXPERTS = {"gate": "w1", "up": "v1", "down": "w2"}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, its rows of Wqkv, or the rows of each expert}."""
    names: dict[str, Stored] = {}
    for path, name in decoder.hf_names(config).items():
        for ours, theirs in _ON_DISK.items():
            name = name.replace(ours, theirs)
        names[path] = name
    leaves, inner, total = (
        flatten(spec(config)),
        config.intermediate_size,
        config.num_experts * config.intermediate_size,
    )
    for i in range(config.num_hidden_layers):
        there, ours = f"transformer.blocks.{i}", f"layers.{i}.attention."
        rows = {path: leaves[path].shape[0] for path in (f"{ours}{which}_proj" for which in "qkv")}
        names |= fuse(f"{there}.norm_attn_norm.attn.Wqkv.weight", rows)
        for leaf, name in _EXPERTS.items():
            turned = leaf == "down"
            names[f"layers.{i}.mlp.experts.{leaf}_proj"] = Stack(
                tuple(
                    TensorSlice(
                        f"{there}.ffn.experts.mlp.{name}", at, at + inner, total, columns=turned, transposed=turned
                    )
                    for at in range(0, total, inner)
                )
            )
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, clip = config.layer_norm_eps, layer["attention"], config.clip_qkv
    q, k, v = project_qkv(weights, layer_norm(x, layer["input_layernorm"], None, eps=eps), head_dim=config.head_dim)
    q, k, v = (q, k, v) if clip is None else (t.clamp(-clip, clip) for t in (q, k, v))
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, layer["post_attention_layernorm"], None, eps=eps)
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))


unembed = decoder.unembed_layer_norm

PRESETS = {
    "dbrx": {"model_type": "dbrx", "vocab_size": 100352, "d_model": 6144, "n_layers": 40, "n_heads": 48}
    | {"max_seq_len": 32768, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}}
    | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}
}

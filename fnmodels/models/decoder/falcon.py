"""Falcon 7B, 40B, 180B and Falcon 2 11B (TII; arXiv 2311.16867, 2407.14885).

LayerNorms, rotary embedding, multi-query or grouped-query attention and an MLP without a gate. Attention and MLP run in
parallel on one norm or with one each, or in sequence. On disk q, k and v are fused, interleaved by KV head. Falcon RW
has linear biases (ALiBi), scaled as the scores are, in place of rotary embedding.
"""

import json
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds, older  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.heads import decoder_head_to_hf
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import decoder_leaves, layer_norm_leaves, plain_mlp_leaves, usual_attention
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import ACTIVATIONS, apply_rotary, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.tree import Tree

MODEL_TYPES = ("falcon",)
TRAITS = Traits(
    dropout={},  # transformers applies its rates in part
    leftovers=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),  # a buffer in older files
)

# The names on disk that differ from `decoder.hf_names`.
_ON_DISK = {
    "model.": "transformer.",
    ".embed_tokens.": ".word_embeddings.",
    ".layers.": ".h.",
    ".self_attn.": ".self_attention.",
    ".o_proj.": ".dense.",
    ".up_proj.": ".dense_h_to_4h.",
    ".down_proj.": ".dense_4h_to_h.",
    ".norm.": ".ln_f.",
}
_TWO_NORMS_ON_DISK = {".input_layernorm.": ".ln_attn.", ".post_attention_layernorm.": ".ln_mlp."}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. num_ln_in_parallel_attn: 2 where parallel attention and MLP have a norm each, else 1."""

    layer_norm_eps: float = 1e-5
    bias: bool = False
    alibi: bool = False
    parallel_attn: bool = True
    num_ln_in_parallel_attn: int = 1
    tie_word_embeddings: bool = True
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        for name in ("apply_residual_connection_post_layernorm", "is_encoder_decoder"):
            fields.expect(name, False)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        inner = fields.integer("ffn_hidden_size", 4 * hidden)
        fields.expect("ff_factor", inner / hidden)  # a duplicate in the file of Falcon 2
        positions = fields.integer("max_position_embeddings", 2048)
        kv_heads, multi_query = fields.integer("num_kv_heads", heads), fields.boolean("multi_query", True)
        is_new = fields.boolean("new_decoder_architecture", False)
        if is_new:
            fields.expect("parallel_attn", True)
        else:
            fields.expect("num_ln_in_parallel_attn", 1)
            if multi_query:
                kv_heads = 1  # files have any number beside it, which transformers does not read
            else:
                fields.expect("num_kv_heads", heads)
        config = Config(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=fields.integer("num_hidden_layers", high=LAYERS_LIMIT),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            rope=rope_from_hf(fields, head_dim=hidden // heads, max_positions=positions, theta=1e4),
            layer_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            **fields.plain(bias=False, alibi=False, parallel_attn=True, tie_word_embeddings=True),
            num_ln_in_parallel_attn=fields.integer("num_ln_in_parallel_attn", 1 + is_new, high=2),
            hidden_act=fields.choice("activation", tuple(ACTIVATIONS), "gelu"),
            max_position_embeddings=positions,
            initializer_range=fields.number("initializer_range", 0.02, above=-1e-9),
            model_type=model_type,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json under Falcon's own names."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        is_new = self.num_ln_in_parallel_attn == 2 or kv_heads not in (1, heads)
        names = (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
            *("initializer_range", "bias", "parallel_attn", "num_ln_in_parallel_attn", "tie_word_embeddings"),
        )
        kept = {name: json.loads(value) for name, value in self.extra}
        own = decoder_head_to_hf(self, "FalconForCausalLM", kept) | {
            "model_type": self.model_type,
            "ffn_hidden_size": self.intermediate_size,
            "num_kv_heads": kv_heads,
            "new_decoder_architecture": is_new,
            "multi_query": is_new or kv_heads == 1,
            "alibi": self.alibi,
            "layer_norm_epsilon": self.layer_norm_eps,
            "activation": self.hidden_act,
            "rope_parameters": rope_to_hf(self.rope),
        }
        return decoder.expressible(self, kept | {name: getattr(self, name) for name in names} | own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. `post_attention_layernorm` is the norm of an MLP that has its own."""
    D, std = config.hidden_size, config.initializer_range
    layer: Tree = {
        **layer_norm_leaves("input_layernorm", D, "embed"),
        "attention": usual_attention(config, qkv_bias=config.bias, o_bias=config.bias),
        "mlp": plain_mlp_leaves(D, config.intermediate_size, std=std, biases=config.bias),
    }
    if config.num_ln_in_parallel_attn == 2 or not config.parallel_attn:
        layer |= layer_norm_leaves("post_attention_layernorm", D, "embed")
    return decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows in each KV head's block of query_key_value}."""
    names = decoder.hf_names(config)
    for ours, theirs in (_ON_DISK | (_TWO_NORMS_ON_DISK if config.num_ln_in_parallel_attn == 2 else {})).items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return {path: _stored(name, config) for path, name in names.items()}


def _stored(name: str, config: Config) -> Stored:
    H, N, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    for q, first, last in (("q", 0, N // G), ("k", N // G, N // G + 1), ("v", N // G + 1, N // G + 2)):
        if f".{q}_proj." in name:
            name = name.replace(f".{q}_proj.", ".query_key_value.")
            return TensorSlice(name, first * H, last * H, (N + 2 * G) * H, groups=G)
    return name


unembed = decoder.unembed_layer_norm


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Any]:
    """{kind: fp32 table [B, S, H/2, 2]}, or the tables of linear biases, see `older.alibi_tables`."""
    if not config.alibi:
        return decoder.freqs_cis(config, positions, length=length)
    tables = older.alibi_tables(config, positions)
    return {kind: table | {"slopes": table["slopes"] * config.head_dim**-0.5} for kind, table in tables.items()}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Any, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.layer_norm_eps, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = (q, k) if config.alibi else (apply_rotary(q, freqs), apply_rotary(k, freqs))
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5, alibi=freqs if config.alibi else None)
    after = x + ctx.tap("attention", project_out(weights, mixed))
    if "post_attention_layernorm" in layer:
        read = x if config.parallel_attn else after
        normed = layer_norm(read, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    return after + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_kv_heads")
_FALCON2 = {"num_ln_in_parallel_attn": 1, "max_position_embeddings": 8192, "rope_theta": 500042}
_FALCON2 |= {"tie_word_embeddings": False}
_RW = {"vocab_size": 50304, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
PRESETS = {
    name: {"model_type": "falcon", "vocab_size": 65024, **dict(zip(_SIZES, sizes, strict=True)), **rest}
    for name, *sizes, rest in (
        ("falcon-7b", 4544, 32, 71, 71, {}),
        ("falcon-40b", 8192, 60, 128, 8, {"new_decoder_architecture": True}),
        ("falcon-180b", 14848, 80, 232, 8, {"new_decoder_architecture": True}),
        ("falcon-rw-1b", 2048, 24, 32, 32, _RW),
        ("falcon-rw-7b", 4096, 36, 64, 64, _RW | {"vocab_size": 65024}),
        ("falcon-11b", 4096, 60, 32, 8, {"new_decoder_architecture": True, **_FALCON2}),
    )
}

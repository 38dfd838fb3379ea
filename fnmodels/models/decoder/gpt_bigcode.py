"""SantaCoder and StarCoder (BigCode; arXiv 2301.03988, 2305.06161).

GPT-2 with weights [out, in] and, in most models, one head of keys and values for all queries. On disk q, k and v are
fused: one after the other, or head by head where every head has its own.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds, older  # noqa: F401
from fnmodels.models.common.decoder.older import embed_placed as embed  # noqa: F401
from fnmodels.models.common.decoder.older import no_freqs as freqs_cis  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, plain_mlp_leaves, usual_attention
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("gpt_bigcode",)
TRAITS = Traits(
    dropout={"attn_pdrop": ("weights",), "resid_pdrop": ("attention", "mlp"), "embd_pdrop": ("embedding",)},
    dropout_defaults={"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    kinds=("full_nope",),
    leftovers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),  # mask buffers in older files
)
_ON_DISK = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.": ".attn.",
    ".o_proj.": ".c_proj.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".up_proj.": ".c_fc.",
    ".down_proj.": ".c_proj.",
}
# Precisions of the reference's softmax, which is always in fp32 here, and of its kernels.
_UNUSED = (
    *(*older.UNUSED, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner"),
    *("max_batch_size", "max_sequence_length", "pre_allocate_kv_cache", "pad_key_length", "validate_runner_input"),
)


@dataclass(frozen=True)
class Config(older.PlacedConfig):
    """Sizes and switches."""

    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    scale_attn_weights: bool = True  # scores times 1 / sqrt(head_dim)
    max_position_embeddings: int = 1024

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, usual = older.older_fields(
            values, MODEL_TYPES, older.GPT_NAMES, positions=1024, tied=True, activation="gelu_pytorch_tanh"
        )
        if fields.boolean("multi_query", True):
            usual["num_key_value_heads"] = 1
        fields.expect("num_key_value_heads", usual["num_key_value_heads"])  # of `multi_query`, in transformers' files
        config = Config(**usual, **fields.plain(scale_attn_weights=True))
        return decoder.finished(config, fields, _UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of published files."""
        own = {"multi_query": self.num_key_value_heads == 1, "scale_attn_weights": self.scale_attn_weights}
        return older.older_to_hf(self, "GPTBigCodeForCausalLM", older.GPT_NAMES, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
    attention = usual_attention(config, qkv_bias=True, o_bias=True)
    layer = layer_leaves(D, attention, plain_mlp_leaves(D, inner, std=std), norm_bias=True)
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)
    return {"embed_positions": older.position_table(config)} | tree


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows of c_attn}."""
    names = {path: decoder.decoder_name(path) for path in flatten(spec(config))}
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return {path: _stored(name, config) for path, name in names.items()}


def _stored(name: str, config: Config) -> Stored:
    H, N, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    each = (N * H, H, H) if G == 1 else (H, H, H)
    for place, which in enumerate("qkv"):
        if f".{which}_proj." in name:
            name, start = name.replace(f".{which}_proj.", ".c_attn."), sum(each[:place])
            return TensorSlice(name, start, start + each[place], (N + 2 * G) * H, groups=G)
    return name


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
    return older.layer_norm_layer(layer, x, mask, ctx, config=config, scale=scale)


unembed = decoder.unembed_layer_norm

_SIZES = ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size", "n_inner")
PRESETS = {
    name: {"model_type": "gpt_bigcode", **dict(zip(_SIZES, sizes, strict=True))}
    for name, *sizes in (
        ("santacoder", 2048, 24, 16, 2048, 49280, 8192),
        ("starcoderbase-1b", 2048, 24, 16, 8192, 49152, 8192),
        ("starcoder", 6144, 40, 48, 8192, 49152, 24576),
    )
}

"""BLOOM and BLOOMZ (BigScience; arXiv 2211.05100): attention with linear biases in place of positions.

LayerNorms, also after the embedding, biases everywhere, and an MLP without a gate. On disk q, k and v are fused,
interleaved by head.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds, older  # noqa: F401
from fnmodels.models.common.decoder.older import alibi_tables as freqs_cis  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import (
    decoder_leaves,
    layer_leaves,
    layer_norm_leaves,
    plain_mlp_leaves,
    usual_attention,
)
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import embed_tokens, layer_norm
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("bloom",)
TRAITS = Traits(
    kinds=("full_nope",), dropout={"attention_dropout": ("weights",), "hidden_dropout": ("attention", "mlp")}
)
_NAMES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embed": "hidden_size"}
_NAMES |= {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "layer_norm_eps"}
# Precisions and fusions of the kernels of its training.
_UNUSED = (
    *("attention_softmax_in_fp32", "offset_alibi"),
    *("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
)
_ON_DISK = {
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.embed_norm.": "transformer.word_embeddings_layernorm.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.": ".self_attention.",
    ".o_proj.": ".dense.",
    ".up_proj.": ".dense_h_to_4h.",
    ".down_proj.": ".dense_4h_to_h.",
}


@dataclass(frozen=True)
class Config(older.PlacedConfig):
    """Sizes and switches."""

    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 2048

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, usual = older.older_fields(
            values, MODEL_TYPES, _NAMES, positions=2048, tied=True, activation="gelu_pytorch_tanh"
        )
        fields.expect("intermediate_size", 4 * usual["hidden_size"])
        fields.expect("hidden_act", "gelu_pytorch_tanh")
        fields.expect("apply_residual_connection_post_layernorm", False)
        return decoder.finished(Config(**usual), fields, _UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of published files."""
        fixed = dict.fromkeys(("intermediate_size", "hidden_act", "max_position_embeddings"))
        return older.older_to_hf(self, "BloomForCausalLM", _WRITTEN, **fixed)


_WRITTEN = {name: ours for name, ours in _NAMES.items() if name not in ("num_layers", "n_embed")}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
    attention = usual_attention(config, qkv_bias=True, o_bias=True)
    layer = layer_leaves(D, attention, plain_mlp_leaves(D, inner, std=std), norm_bias=True)
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)
    return {"embed_tokens": tree["embed_tokens"], **layer_norm_leaves("embed_norm", D, "embed")} | tree


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows in each head's block of query_key_value}."""
    names = {path: decoder.decoder_name(path) for path in flatten(spec(config))}
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return {path: _stored(name, config) for path, name in names.items()}


def _stored(name: str, config: Config) -> Stored:
    for place, which in enumerate("qkv"):
        if f".{which}_proj." in name:
            H, heads = config.head_dim, config.num_attention_heads
            name = name.replace(f".{which}_proj.", ".query_key_value.")
            return TensorSlice(name, place * H, (place + 1) * H, 3 * heads * H, groups=heads)
    return name


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of token (or given) embeddings, of zeros for padding."""
    x = embed_tokens(params["embed_tokens"], inputs)
    x = decoder.without_padding(x, inputs)
    return layer_norm(x, params["embed_norm"], params["embed_norm_bias"], eps=config.layer_norm_eps)


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: dict[str, Tensor], /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    return older.layer_norm_layer(layer, x, mask, ctx, config=config, scale=config.head_dim**-0.5, alibi=freqs)


unembed = decoder.unembed_layer_norm

_SIZES = ("hidden_size", "n_layer", "n_head")
PRESETS = {
    name: {"model_type": "bloom", "vocab_size": 250880, **dict(zip(_SIZES, sizes, strict=True))}
    for name, *sizes in (
        ("bloom-560m", 1024, 24, 16),
        ("bloom-1b1", 1536, 24, 16),
        ("bloom-1b7", 2048, 24, 16),
        ("bloom-3b", 2560, 30, 32),
        ("bloom-7b1", 4096, 30, 32),
        ("bloom", 14336, 70, 112),
    )
}

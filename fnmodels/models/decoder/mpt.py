"""MPT 7B and 30B (MosaicML, 2023): attention with linear biases, no bias anywhere, and an MLP without a gate.

Queries, keys and values may be clipped. On disk they are fused.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds, older  # noqa: F401
from fnmodels.models.common.decoder.older import alibi_tables as freqs_cis  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, plain_mlp_leaves, usual_attention
from fnmodels.models.common.storage import Stored, StoredNames, fuse
from fnmodels.ops import layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.ops.dropout import Dropout
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("mpt",)
TRAITS = Traits(kinds=("full_nope",), dropout={}, classes={"mpt": "MPTForCausalLM"})
_NAMES = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
_NAMES |= {"max_seq_len": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps"}
_UNUSED = ("embedding_fraction", "init_config", "init_device", "norm_type", "verbose", "learned_pos_emb")
_ON_DISK = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.blocks.",
    "model.norm.": "transformer.norm_f.",
    ".self_attn.o_proj.": ".attn.out_proj.",
    ".input_layernorm.": ".norm_1.",
    ".post_attention_layernorm.": ".norm_2.",
    ".mlp.": ".ffn.",
}


@dataclass(frozen=True)
class Config(older.PlacedConfig):
    """Sizes and switches. clip_qkv: the largest magnitude of queries, keys and values; softmax_scale: of scores."""

    tie_word_embeddings: bool = True
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048
    clip_qkv: float | None = None
    softmax_scale: float | None = None  # None: 1 / sqrt(head_dim)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, usual = older.older_fields(values, MODEL_TYPES, _NAMES, positions=2048, tied=True, activation="gelu")
        fields.expect("intermediate_size", 4 * usual["hidden_size"])
        fields.expect("expansion_ratio", 4)
        fields.expect("hidden_act", "gelu")
        fields.expect("logit_scale", None)
        fields.expect("no_bias", True)
        inner = Fields(fields.take("attn_config", {}), f"{fields.where}, attn_config")
        for name, value in ("is_encoder_decoder", False), *_ATTENTION.items():
            inner.expect(name, value)
        chosen: dict[str, Any] = {
            name: None if inner.take(name, None) is None else inner.number(name)
            for name in ("clip_qkv", "softmax_scale")
        }
        rate = inner.number("attn_pdrop", 0.0, above=-1e-9)
        inner.finish(("attn_impl", "attn_uses_sequence_id"))
        config = decoder.finished(Config(**usual, **chosen), fields, _UNUSED)
        return replace(config, dropout=Dropout(weights=rate, attention=rate, mlp=rate))  # one rate, as transformers has

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of published files."""
        attention = _ATTENTION | {"clip_qkv": self.clip_qkv, "softmax_scale": self.softmax_scale}
        rate = self.dropout.weights
        attention |= {"attn_pdrop": int(rate) if rate == int(rate) else rate}  # transformers takes whole numbers alone
        own: ConfigJson = dict.fromkeys(("intermediate_size", "hidden_act")) | {"attn_config": attention}
        return older.older_to_hf(self, "MptForCausalLM", _NAMES, **own)


_ATTENTION = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "qk_ln": False,
    "prefix_lm": False,
}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    mlp = plain_mlp_leaves(config.hidden_size, config.intermediate_size, std=config.initializer_range, biases=False)
    layer = layer_leaves(config.hidden_size, usual_attention(config), mlp)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows of Wqkv}."""
    names: StoredNames = {path: decoder.decoder_name(path) for path in flatten(spec(config))}
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    for i in range(config.num_hidden_layers):
        rows = {f"layers.{i}.attention.{which}_proj": config.hidden_size for which in "qkv"}
        names |= fuse(f"transformer.blocks.{i}.attn.Wqkv.weight", rows)
    return names


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: dict[str, Tensor], /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, clip = config.layer_norm_eps, layer["attention"], config.clip_qkv
    q, k, v = project_qkv(weights, layer_norm(x, layer["input_layernorm"], None, eps=eps), head_dim=config.head_dim)
    q, k, v = (q, k, v) if clip is None else (t.clamp(-clip, clip) for t in (q, k, v))
    mixed = ctx.attend(q, k, v, mask, scale=config.softmax_scale or config.head_dim**-0.5, alibi=freqs)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, layer["post_attention_layernorm"], None, eps=eps)
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


unembed = decoder.unembed_layer_norm

PRESETS = {
    "mpt-7b": {"model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32},
    "mpt-30b": {"model_type": "mpt", "vocab_size": 50432, "d_model": 7168, "n_layers": 48, "n_heads": 64}
    | {"max_seq_len": 8192},
}

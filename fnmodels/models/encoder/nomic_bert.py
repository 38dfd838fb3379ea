"""Nomic BERT (arXiv 2402.01613): BERT with rotary embedding and gated MLPs, without biases of linear layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.encoder import attention_masks, block, classify, head_leaves, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, embedding, gated_mlp_leaves, layer_norm_leaves
from fnmodels.models.common.storage import StoredNames
from fnmodels.ops import Rope, embed_tokens, rotary_table
from fnmodels.tree import Tree

MODEL_TYPES = ("nomic_bert",)
TRAITS = Traits(
    dropout=encoder.DROPOUT,
    causal=False,
    leftovers=(r"cls\.predictions\.decoder\.bias",),  # the head's bias once more
    resaved={r"nomic_bert\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
    in_memory={
        r"encoder\.layers\.": "layers.",
        r"\bemb_ln\.": "embeddings.LayerNorm.",
        r"\.attn\.Wqkv\.": ".self_attn.{leaf}_proj.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.fc11\.": ".up_proj.",
        r"\.fc12\.": ".gate_proj.",
        r"\.fc2\.": ".down_proj.",
        r"\.norm1\.": ".post_attention_layernorm.",
        r"\.norm2\.": ".post_mlp_layernorm.",
    },
)

_OLDER = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# Settings of the publisher's code at the only values that the maths here has.
_FIXED: dict[str, Any] = {"causal": False, "prenorm": False, "parallel_block": False, "use_rms_norm": False}
_FIXED |= {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "rotary_emb_fraction": 1.0}
_FIXED |= {"rotary_emb_interleaved": False, "rotary_emb_scale_base": None}
_FIXED |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
# Fields of its files that choose an implementation, and those of GPT-2 that stand in them.
_IGNORED = (
    *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln"),
    *("pad_vocab_size_multiple", "parallel_block_tied_norm", "reorder_and_upcast_attn"),
    *("use_flash_attn", "use_xentropy"),
)


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches."""

    rope: Rope = Rope(1000.0)  # noqa: RUF009 - frozen
    hidden_act: str = "silu"

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of either dialect; raises ConfigError or UnsupportedError with the field's name."""
        if "n_positions" in values and values.get("max_position_embeddings") == 2048:  # what transformers 5 adds
            values = {name: value for name, value in values.items() if name != "max_position_embeddings"}
        fields = renamed(Fields(values), _OLDER)
        model_type = fields.choice("model_type", MODEL_TYPES)
        for name, value in _FIXED.items():
            fields.expect(name, value)
        fields.expect("activation_function", "swiglu")
        usual = encoder.encoder_fields(fields, model_type, "NomicBert", max_position_embeddings=2048, hidden_act="silu")
        width = usual["hidden_size"] // usual["num_attention_heads"]
        fields.expect("head_dim", width)
        rope = rope_from_hf(fields, head_dim=width, max_positions=usual["max_position_embeddings"], theta=1000.0)
        trained = fields.integer("max_trained_positions", 2048)
        if (factor := fields.number("rotary_scaling_factor", 0.0, above=-1e-9)) > 0:
            if rope.kind != "default":
                raise ConfigError(f"{fields.where} has both 'rotary_scaling_factor' and the rope kind {rope.kind!r}.")
            rope = replace(rope, kind="dynamic", factor=factor, original_max_position_embeddings=trained)
        return encoder.finished(Config(**usual, rope=rope), fields, _IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        rope: dict[str, Any] = rope_to_hf(self.rope)
        extra: dict[str, Any] = {}
        trained = self.rope.original_max_position_embeddings
        if self.rope.kind == "dynamic" and trained != self.max_position_embeddings:
            # the publisher's form: transformers takes max_position_embeddings for the trained length
            rope = {"rope_type": "default", "rope_theta": self.rope.theta}
            extra = {"rotary_scaling_factor": self.rope.factor, "max_trained_positions": trained}
        return encoder.encoder_to_hf(self, "NomicBert", names={}, rope_parameters=rope, **extra)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, heads = config.hidden_size, config.initializer_range, config.num_attention_heads
    (E, axis), (first, second) = encoder.embedded_width(config), encoder.NORMS[config.norm_first]
    layer = {
        **layer_norm_leaves(first, D, "embed"),
        "attention": attention_leaves(D, heads, heads, config.head_dim, std=std),
        **layer_norm_leaves(second, D, "embed"),
        "mlp": gated_mlp_leaves(D, config.intermediate_size, std=std),
    }
    tree: Tree = {"embed_tokens": embedding(config.vocab_size, E, std, size_axis=axis)}
    if config.type_vocab_size:
        tree["embed_types"] = embedding(config.type_vocab_size, E, std, axis="type", size_axis=axis)
    tree |= layer_norm_leaves("embed_norm", E, axis) if config.embed_norm else {}
    tree |= encoder.projection_leaves(config) | {"layers": [layer] * config.num_hidden_layers}
    tree |= layer_norm_leaves("norm", D, "embed") if config.norm_first else {}
    return tree | head_leaves(config)


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk, or its rows there}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else "nomic_bert."
    layer = f"{prefix}encoder.layers.{{}}."
    names = {
        "embed_tokens": f"{prefix}embeddings.word_embeddings",
        "embed_types": f"{prefix}embeddings.token_type_embeddings",
        "embed_norm": f"{prefix}emb_ln",
        **dict.fromkeys(("attention.q", "attention.k", "attention.v"), f"{layer}attn.Wqkv"),
        "attention.o": f"{layer}attn.out_proj",
        "post_attention_layernorm": f"{layer}norm1",
        "mlp.gate": f"{layer}mlp.fc12",
        "mlp.up": f"{layer}mlp.fc11",
        "mlp.down": f"{layer}mlp.fc2",
        "post_feedforward_layernorm": f"{layer}norm2",
        "head.dense": "cls.predictions.transform.dense" if config.head == "masked_lm" else "nomic_bert.pooler.dense",
        "head.norm": "cls.predictions.transform.layer_norm",
        "head.score": "classifier",
        "lm_head": "cls.predictions.decoder",
        "lm_head_bias": "cls.predictions.bias",
    }
    return encoder_storage.fused_names(config, names)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, H/2, 2]}; arguments as for `decoder.freqs_cis`."""
    return {"full": rotary_table(config.rope, config.head_dim, positions, length)}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of the sum of token (or given) embeddings and those of "token_types", 0 by default."""
    x = embed_tokens(params["embed_tokens"], inputs)
    return encoder.embed_types(params, x, inputs if isinstance(inputs, Mapping) else {}, config)


_BASE: ConfigJson = {
    "architectures": ["NomicBertForMaskedLM"],
    "model_type": "nomic_bert",
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
PRESETS = {
    "nomic-bert-2048": _BASE,
    "nomic-embed-text-v1.5": _BASE | {"architectures": ["NomicBertModel"], "max_position_embeddings": 8192},
}

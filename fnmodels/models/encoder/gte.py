"""GTE (arXiv 2407.19669) and Jina Embeddings v3 (arXiv 2409.10173): BERT with rotary embedding, and biases.

GTE's MLPs have a gate; Jina's model is XLM-RoBERTa with its positions replaced. Task adapters of Jina's are PEFT
folders.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.encoder import attention_masks, block, classify, kinds, pooled  # noqa: F401
from fnmodels.models.common.encoder import unembed_gelu as unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import bias, gated_mlp_leaves
from fnmodels.models.common.storage import StoredNames
from fnmodels.ops import Rope, embed_tokens, rotary_table
from fnmodels.tree import Tree

_CLASSES = {"gte": "Gte", "jina_embeddings_v3": "JinaEmbeddingsV3"}
_PREFIXES = {"gte": "gte.", "jina_embeddings_v3": "roberta."}
_DEFAULTS: dict[str, ConfigJson] = {
    "gte": {"max_position_embeddings": 8192, "type_vocab_size": 1},
    "jina_embeddings_v3": {"max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
}
_THETA = {"gte": 160_000.0, "jina_embeddings_v3": 20_000.0}
MODEL_TYPES = tuple(_CLASSES)
TRAITS = Traits(
    dropout={**encoder.DROPOUT, "hidden_dropout_prob": ("attention", "mlp", "embedding", "neurons")},
    dropout_of={"jina_embeddings_v3": encoder.DROPOUT},
    dropout_defaults={"hidden_dropout_prob": 0.1},
    causal=False,
    optional={"pooler": "pooler"},
    resaved={r"(?:gte|roberta|new)\.(.*)": r"\1"},  # a model without a head may be stored with such a prefix
    leftovers=(r"(.*\.)?rotary_emb\.inv_freq", r"(.*\.)?embeddings\.position_ids"),
    in_memory={
        r"encoder\.layers?\.": "layers.",
        r"\bemb_ln\.": "embeddings.LayerNorm.",
        r"\.(?:attention\.qkv_proj|mixer\.Wqkv)\.": ".self_attn.{leaf}_proj.",
        r"\.(?:attention\.o_proj|mixer\.out_proj)\.": ".self_attn.o_proj.",
        r"\.mlp\.up_gate_proj\.": ".mlp.{leaf}_proj.",
        r"\.(?:attn_ln|norm1)\.": ".post_attention_layernorm.",
        r"\.(?:mlp_ln|norm2)\.": ".post_mlp_layernorm.",
        r"lm_head\.norm\.": "lm_head.layer_norm.",
    },
)


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. gated: MLPs have a gate (GTE)."""

    rope: Rope = Rope(160_000.0)  # noqa: RUF009 - frozen
    gated: bool = True

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        model_type = Fields(values).choice("model_type", MODEL_TYPES)
        rate = {"attention_probs_dropout_prob": 0.1} if model_type == "jina_embeddings_v3" else {}  # its default
        fields = Fields({**rate, "model_type": model_type, **values})
        usual = encoder.encoder_fields(fields, model_type, _CLASSES[model_type], **_DEFAULTS[model_type])
        width = usual["hidden_size"] // usual["num_attention_heads"]
        fields.expect("head_dim", width)
        theta, most = _THETA[model_type], usual["max_position_embeddings"]
        rope = rope_from_hf(fields, head_dim=width, max_positions=most, theta=theta)
        pooler = int(usual["head"] == "none")
        return encoder.finished(Config(**usual, rope=rope, gated=model_type == "gte", pooler=pooler), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        rope: dict[str, Any] = rope_to_hf(self.rope)
        rate = {} if self.gated else {"attention_probs_dropout_prob": self.dropout.weights}
        return encoder.encoder_to_hf(self, _CLASSES[self.model_type], names={}, rope_parameters=rope, **rate)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    tree = {name: leaf for name, leaf in encoder.spec(config).items() if name != "embed_positions"}
    if config.gated:
        D = config.hidden_size
        mlp = gated_mlp_leaves(D, config.intermediate_size, std=config.initializer_range)
        mlp = {"up_proj": mlp.pop("up_proj"), **mlp, "down_bias": bias(D, "embed")}  # in the order of the fused rows
        layer = encoder.layer_leaves(config) | {"mlp": mlp}
        tree["layers"] = [layer] * config.num_hidden_layers
    return tree


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk, or its rows there}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else _PREFIXES[config.model_type]
    names = encoder_storage.bert_names(prefix) | encoder_storage.ROBERTA_HEADS[config.head]
    layer = f"{prefix}encoder.layer.{{}}."
    if config.gated:
        names |= {f"attention.{name}": f"{layer}attention.qkv_proj" for name in "qkv"}
        names |= {"attention.o": f"{layer}attention.o_proj", "mlp.down": f"{layer}mlp.down_proj"}
        names |= dict.fromkeys(("mlp.gate", "mlp.up"), f"{layer}mlp.up_gate_proj")
        names |= {"post_attention_layernorm": f"{layer}attn_ln", "post_feedforward_layernorm": f"{layer}mlp_ln"}
        names |= {"head.norm": "lm_head.norm", "lm_head_bias": "lm_head.decoder"}
        if config.head == "classification":
            names |= {"head.dense": f"{prefix}pooler.dense", "head.score": "classifier"}
    else:
        layer = f"{prefix}encoder.layers.{{}}."
        names |= {f"attention.{name}": f"{layer}mixer.Wqkv" for name in "qkv"}
        names |= {"attention.o": f"{layer}mixer.out_proj", "mlp.up": f"{layer}mlp.fc1", "mlp.down": f"{layer}mlp.fc2"}
        names |= {"post_attention_layernorm": f"{layer}norm1", "post_feedforward_layernorm": f"{layer}norm2"}
        names["embed_norm"] = f"{prefix}emb_ln"
    return encoder_storage.fused_names(config, names)


def leftovers(config: Config) -> tuple[str, ...]:
    """The pooler, which most heads do not read, and the head's bias once more."""
    pooler = rf"({_PREFIXES[config.model_type]})?pooler\.dense\.(weight|bias)"
    unread = () if config.head == "none" or (config.gated and config.head == "classification") else (pooler,)
    return unread if config.gated else (*unread, r"lm_head\.decoder\.bias")


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, H/2, 2]}; arguments as for `decoder.freqs_cis`."""
    return {"full": rotary_table(config.rope, config.head_dim, positions, length)}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of the sum of token (or given) embeddings and those of "token_types", 0 by default."""
    x = embed_tokens(params["embed_tokens"], inputs)
    return encoder.embed_types(params, x, inputs if isinstance(inputs, Mapping) else {}, config)


_BASE: ConfigJson = {
    "architectures": ["GteForMaskedLM"],
    "model_type": "gte",
    "vocab_size": 250048,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 8192,
    "type_vocab_size": 1,
}
PRESETS = {
    "gte-multilingual-base": _BASE,
    "jina-embeddings-v3": _BASE
    | {"architectures": ["JinaEmbeddingsV3Model"], "model_type": "jina_embeddings_v3", "vocab_size": 250002}
    | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    | {"max_position_embeddings": 8194, "layer_norm_eps": 1e-5},
}

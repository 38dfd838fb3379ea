"""DistilBERT (arXiv 1910.01108): BERT without token types."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels.inputs.documents import Documents
from fnmodels.models.common import encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.encoder import (  # noqa: F401
    attention_masks,
    block,
    embed,
    freqs_cis,
    kinds,
    spec,
    unembed,
)
from fnmodels.models.common.family import Traits
from fnmodels.tree import Tree

MODEL_TYPES = ("distilbert",)
TRAITS = Traits(
    dropout={"attention_dropout": ("weights",), "dropout": ("mlp", "embedding")},
    dropout_defaults={"attention_dropout": 0.1, "dropout": 0.1},
    causal=False,
    leftovers=(r"(distilbert\.)?embeddings\.position_ids",),
    resaved={r"distilbert\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)

_RENAMED = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
_RENAMED |= {"hidden_dim": "intermediate_size", "activation": "hidden_act"}
_FIELDS = {ours: theirs for theirs, ours in _RENAMED.items()}
_ABSENT = {"layer_norm_eps": "", "type_vocab_size": ""}
_LAYER = "distilbert.transformer.layer.{}."
_NAMES = {
    "embed_tokens": "distilbert.embeddings.word_embeddings",
    "embed_positions": "distilbert.embeddings.position_embeddings",
    "embed_norm": "distilbert.embeddings.LayerNorm",
    "attention.q": f"{_LAYER}attention.q_lin",
    "attention.k": f"{_LAYER}attention.k_lin",
    "attention.v": f"{_LAYER}attention.v_lin",
    "attention.o": f"{_LAYER}attention.out_lin",
    "post_attention_layernorm": f"{_LAYER}sa_layer_norm",
    "mlp.up": f"{_LAYER}ffn.lin1",
    "mlp.down": f"{_LAYER}ffn.lin2",
    "post_feedforward_layernorm": f"{_LAYER}output_layer_norm",
    "head.score": "classifier",
    "lm_head": "vocab_projector",
    "lm_head_bias": "vocab_projector",
    "head.norm": "vocab_layer_norm",
}


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches."""

    type_vocab_size: int = 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = renamed(Fields(values), _RENAMED)
        model_type = fields.choice("model_type", MODEL_TYPES)
        fields.expect("layer_norm_eps", 1e-12)
        fields.expect("type_vocab_size", 0)
        usual = encoder.encoder_fields(fields, model_type, "DistilBert", type_vocab_size=0)
        # sinusoidal_pos_embds says what the position table was initialized with
        return encoder.finished(Config(**usual), fields, ("output_past", "sinusoidal_pos_embds", "tie_weights_"))

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        return encoder.encoder_to_hf(self, "DistilBert", names=_FIELDS | _ABSENT)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    own = {"head.dense": "vocab_transform" if config.head == "masked_lm" else "pre_classifier"}
    own |= {"head.score": "qa_outputs"} if config.head == "question_answering" else {}
    names = encoder_storage.encoder_names(config, _NAMES | own)
    return {path: name.removeprefix("distilbert.") for path, name in names.items()} if config.head == "none" else names


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Logits [N, labels] of each document's first token."""
    return encoder.classify_with(torch.relu, params, x, documents)


_BASE: ConfigJson = {
    "architectures": ["DistilBertForMaskedLM"],
    "model_type": "distilbert",
    "vocab_size": 30522,
    "dim": 768,
    "n_layers": 6,
    "n_heads": 12,
    "hidden_dim": 3072,
}
PRESETS = {
    "distilbert-base-uncased": _BASE,
    "distilbert-base-cased": _BASE | {"vocab_size": 28996},
    "distilbert-base-multilingual-cased": _BASE | {"vocab_size": 119547},
}

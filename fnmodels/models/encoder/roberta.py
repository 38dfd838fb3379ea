"""RoBERTa (arXiv 1907.11692) and its relatives: BERT whose positions begin after the row of the padding token.

XLM-RoBERTa, CamemBERT (arXiv 1911.03894) and data2vec's texts (arXiv 2202.03555) are RoBERTa by other names.
XLM-RoBERTa XL (arXiv 2105.00572) and RoBERTa-PreLayerNorm have norms before the sublayers, and the first of them has
none of embeddings.
"""

from dataclasses import dataclass

from fnmodels.models.common import encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.encoder import (  # noqa: F401
    attention_masks,
    block,
    classify,
    embed,
    freqs_cis,
    kinds,
    pooled,
    spec,
)
from fnmodels.models.common.encoder import unembed_gelu as unembed  # noqa: F401
from fnmodels.models.common.family import Traits

# {model type: (what its classes begin with, the prefix of a model with a head in files)}
_NAMES = {
    "roberta": ("Roberta", "roberta."),
    "xlm-roberta": ("XLMRoberta", "roberta."),
    "camembert": ("Camembert", "roberta."),
    "data2vec-text": ("Data2VecText", "data2vec_text."),
    "xlm-roberta-xl": ("XLMRobertaXL", "roberta."),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", "roberta_prelayernorm."),
}
MODEL_TYPES = tuple(_NAMES)
TRAITS = Traits(
    dropout=encoder.DROPOUT,
    # whose MLPs drop nothing
    dropout_of={"xlm-roberta-xl": encoder.DROPOUT | {"hidden_dropout_prob": ("attention", "embedding")}},
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    optional={"pooler": "pooler"},
    # a model without a head may be stored with the prefix of one that has it
    resaved={r"(?:roberta|data2vec_text|roberta_prelayernorm)\.(.*)": r"\1"},
)
# {model type with norms first: names of the norms before attention, before the MLP and behind the last layer}
_NORMS = {
    "xlm-roberta-xl": ("attention.self_attn_layer_norm", "LayerNorm", "encoder.LayerNorm"),
    "roberta-prelayernorm": ("attention.LayerNorm", "intermediate.LayerNorm", "LayerNorm"),
}
_DEFAULTS: dict[str, ConfigJson] = {
    "xlm-roberta-xl": {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
}


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. first_position: in the files that is pad_token_id + 1."""

    first_position: int = 2

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        first, default = fields.integer("pad_token_id", 1, low=0) + 1, _DEFAULTS.get(model_type, {})
        usual = encoder.encoder_fields(fields, model_type, _NAMES[model_type][0], first_position=first, **default)
        usual |= {"norm_first": model_type in _NORMS, "embed_norm": model_type != "xlm-roberta-xl"}
        config = Config(**usual, pooler=int(usual["head"] == "none"))
        return encoder.finished(config, fields, ("output_past",))

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        pad = self.first_position - 1
        return encoder.encoder_to_hf(self, _NAMES[self.model_type][0], names={}, pad_token_id=pad)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else _NAMES[config.model_type][1]
    names = encoder_storage.bert_names(prefix) | encoder_storage.ROBERTA_HEADS[config.head]
    if norms := _NORMS.get(config.model_type):
        first, second, last = norms
        layer = f"{prefix}encoder.layer.{{}}."
        names |= {"input_layernorm": layer + first, "post_attention_layernorm": layer + second, "norm": prefix + last}
    return encoder_storage.encoder_names(config, names)


def leftovers(config: Config) -> tuple[str, ...]:
    """See `encoder_storage.roberta_leftovers`."""
    return encoder_storage.roberta_leftovers(_NAMES[config.model_type][1], config)


_BASE: ConfigJson = {
    "architectures": ["RobertaForMaskedLM"],
    "model_type": "roberta",
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_XLM = {"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta", "vocab_size": 250002}
_LONG = {"max_position_embeddings": 8194}
PRESETS = {
    "roberta-base": _BASE,
    "roberta-large": _BASE | _LARGE,
    "xlm-roberta-base": _BASE | _XLM,
    "xlm-roberta-large": _BASE | _XLM | _LARGE,
    "bge-m3": _BASE | _XLM | _LARGE | _LONG | {"architectures": ["XLMRobertaModel"]},
    "bge-reranker-v2-m3": _BASE
    | _XLM
    | _LARGE
    | _LONG
    | {"architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
}
_CAMEMBERT = {"architectures": ["CamembertForMaskedLM"], "model_type": "camembert", "vocab_size": 32005}
_XL: ConfigJson = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 10240,
}
_XL |= {"architectures": ["XLMRobertaXLForMaskedLM"], "model_type": "xlm-roberta-xl", "vocab_size": 250880}
PRESETS |= {"camembert-base": _BASE | _CAMEMBERT, "xlm-roberta-xl": _BASE | _XL}

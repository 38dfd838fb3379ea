"""RoBERTa (arXiv 1907.11692) and XLM-RoBERTa: BERT whose positions begin after the row of the padding token."""

from dataclasses import dataclass

from fnmodels.models.common import encoder
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

MODEL_TYPES = ("roberta", "xlm-roberta")
TRAITS = Traits(
    dropout=encoder.DROPOUT,
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    optional={"pooler": "pooler"},
    resaved={r"roberta\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)

_CLASSES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
_HEADS = {
    "masked_lm": {
        "head.dense": "lm_head.dense",
        "head.norm": "lm_head.layer_norm",
        "lm_head": "lm_head.decoder",
        "lm_head_bias": "lm_head.bias",
    },
    "classification": {"head.dense": "classifier.dense", "head.score": "classifier.out_proj"},
    "tokens": {"head.score": "classifier"},
    "question_answering": {"head.score": "qa_outputs"},
    "none": {},
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
        first = fields.integer("pad_token_id", 1, low=0) + 1
        usual = encoder.encoder_fields(fields, model_type, _CLASSES[model_type], first_position=first)
        config = Config(**usual, pooler=int(usual["head"] == "none"))
        return encoder.finished(config, fields, ("output_past",))

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        pad = self.first_position - 1
        return encoder.encoder_to_hf(self, _CLASSES[self.model_type], names={}, pad_token_id=pad)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else "roberta."
    return encoder.encoder_names(config, encoder.bert_names(prefix) | _HEADS[config.head])


def leftovers(config: Config) -> tuple[str, ...]:
    """Buffers of older files, the pooler, which the heads do not read, and the head's bias once more."""
    buffers = (r"(roberta\.)?embeddings\.position_ids",)
    unread = (r"roberta\.pooler\.dense\.(weight|bias)", r"lm_head\.decoder\.bias")
    return buffers if config.head == "none" else (*buffers, *unread)


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

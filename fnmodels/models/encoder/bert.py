"""BERT (arXiv 1810.04805): an encoder with a norm after each sublayer and learned positions and token types."""

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
    unembed,
)
from fnmodels.models.common.family import Traits

MODEL_TYPES = ("bert",)
TRAITS = Traits(
    dropout=encoder.DROPOUT,
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    optional={"pooler": "pooler"},
    # Files of BERT's first year name a norm's parameters gamma and beta; a model without a head may be stored with the
    # prefix of one that has it.
    resaved={
        r"(.*LayerNorm)\.gamma": r"\1.weight",
        r"(.*LayerNorm)\.beta": r"\1.bias",
        r"bert\.(.*)": r"\1",
    },
)

_NAMES = encoder.bert_names("bert.") | {
    "head.score": "classifier",
    "lm_head": "cls.predictions.decoder",
    "lm_head_bias": "cls.predictions.bias",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
_DENSE = {"masked_lm": "cls.predictions.transform.dense", "classification": "bert.pooler.dense"}


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches."""

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        usual = encoder.encoder_fields(fields, model_type, "Bert")
        config = Config(**usual, pooler=int(usual["head"] == "none"))
        return encoder.finished(config, fields, _POOLER_FIELDS)

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        return encoder.encoder_to_hf(self, "Bert", names={})


# Fields of the published files of multilingual BERT, which no code reads.
_POOLER_FIELDS = (
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type"),
)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    own = {"head.dense": _DENSE.get(config.head, "")}
    own |= {"head.score": "qa_outputs"} if config.head == "question_answering" else {}
    names = encoder.encoder_names(config, _NAMES | own)
    return {path: name.removeprefix("bert.") for path, name in names.items()} if config.head == "none" else names


def leftovers(config: Config) -> tuple[str, ...]:
    """Buffers of older files, and the parts of the pre-training model that the head does not use."""
    buffers = (r"(bert\.)?embeddings\.position_ids",)
    if config.head in ("none", "classification"):
        return buffers
    pretraining = (r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)")
    return (*buffers, *pretraining, r"cls\.predictions\.decoder\.bias")  # the last is the head's bias once more


_BASE: ConfigJson = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_MINI = {"architectures": ["BertModel"], "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
PRESETS = {
    "bert-base-uncased": _BASE,
    "bert-large-uncased": _BASE | _LARGE,
    "all-minilm-l6-v2": _BASE | _MINI,
}

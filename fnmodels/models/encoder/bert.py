"""BERT (arXiv 1810.04805): an encoder with a norm after each sublayer and learned positions and token types.

ERNIE (arXiv 1904.09223) is BERT, in later versions with embeddings of tasks. Megatron's BERT (arXiv 1909.08053) has
norms before the sublayers, and none of embeddings.
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
    unembed,
)
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import embedding
from fnmodels.tree import Tree

_CLASSES = {"bert": "Bert", "ernie": "Ernie", "megatron-bert": "MegatronBert"}
MODEL_TYPES = tuple(_CLASSES)
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
        r"(?:bert|ernie)\.(.*)": r"\1",
    },
)

_HEADS = {
    "head.score": "classifier",
    "lm_head": "cls.predictions.decoder",
    "lm_head_bias": "cls.predictions.bias",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
_NORMS = {"input_layernorm": "encoder.layer.{}.attention.ln", "post_attention_layernorm": "encoder.layer.{}.ln"}
_NORMS |= {"norm": "encoder.ln"}  # of Megatron's


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. task_types: rows of ERNIE's table of tasks, 0 for none."""

    task_types: int = 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        usual = encoder.encoder_fields(fields, model_type, _CLASSES[model_type])
        tasks = 0
        if model_type == "ernie" and fields.boolean("use_task_id", False):
            tasks = fields.integer("task_type_vocab_size", 3)
        first = model_type == "megatron-bert"
        pooler = int(usual["head"] == "none")
        config = Config(**usual, pooler=pooler, task_types=tasks, norm_first=first, embed_norm=not first)
        return encoder.finished(config, fields, (*_POOLER_FIELDS, *(("task_type_vocab_size",) if not tasks else ())))

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        tasks = {"use_task_id": True, "task_type_vocab_size": self.task_types} if self.task_types else {}
        return encoder.encoder_to_hf(self, _CLASSES[self.model_type], names={}, **tasks)


# Fields of the published files of multilingual BERT, which no code reads.
_POOLER_FIELDS = (
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type"),
)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    if not config.task_types:
        return encoder.spec(config)
    tasks = embedding(config.task_types, config.hidden_size, config.initializer_range, axis="type")
    return {"embed_tasks": tasks} | encoder.spec(config)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else ("ernie." if config.model_type == "ernie" else "bert.")
    names = encoder_storage.bert_names(prefix) | _HEADS
    names["embed_tasks"] = f"{prefix}embeddings.task_type_embeddings"
    names["head.dense"] = f"{prefix}pooler.dense"
    if config.head == "masked_lm":
        names["head.dense"] = "cls.predictions.transform.dense"
    if config.head == "question_answering":
        names["head.score"] = "qa_outputs"
    if config.norm_first:
        names |= {path: prefix + name for path, name in _NORMS.items()}
    return encoder_storage.encoder_names(config, names)


def leftovers(config: Config) -> tuple[str, ...]:
    """Buffers of older files, and the parts of the pre-training model that the head does not use."""
    buffers = (r"((bert|ernie)\.)?embeddings\.position_ids",)
    if config.head in ("none", "classification"):
        return buffers
    pretraining = (r"(bert|ernie)\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)")
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

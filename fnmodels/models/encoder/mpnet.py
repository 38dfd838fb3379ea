"""MPNet (arXiv 2004.09297): BERT without token types whose scores have T5's relative position bias, one for all layers.

As published, and as transformers computes it, the distances have the buckets of a longest one of 128.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
)
from fnmodels.models.common.encoder import unembed_gelu as unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import embedding
from fnmodels.ops.attention.relative_bias import RelativeBias, by_distance
from fnmodels.tree import Tree

MODEL_TYPES = ("mpnet",)
TRAITS = Traits(
    dropout=encoder.DROPOUT,
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    biased=True,
    optional={"pooler": "pooler"},
    resaved={r"mpnet\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)
MAX_DISTANCE = 128


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. first_position: the row after that of the padding token, 1, in each model."""

    first_position: int = 2
    type_vocab_size: int = 0
    relative_attention_num_buckets: int = 32

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        fields.expect("type_vocab_size", 0)
        usual = encoder.encoder_fields(fields, model_type, "MPNet", first_position=2, type_vocab_size=0)
        buckets = fields.integer("relative_attention_num_buckets", 32)
        # transformers sizes the table by the field and counts 32 buckets whatever it says
        fields.expect("relative_attention_num_buckets", 32)
        pooler = int(usual["head"] == "none")
        config = Config(**usual, pooler=pooler, relative_attention_num_buckets=buckets)
        return encoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        names, buckets = {"type_vocab_size": ""}, self.relative_attention_num_buckets
        return encoder.encoder_to_hf(self, "MPNet", names=names, relative_attention_num_buckets=buckets)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    sizes = (config.relative_attention_num_buckets, config.num_attention_heads)
    biases = embedding(*sizes, config.initializer_range, axis="bucket", size_axis="heads")
    return encoder.spec(config) | {"relative_bias": biases}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else "mpnet."
    names = encoder_storage.bert_names(prefix) | encoder_storage.ROBERTA_HEADS[config.head]
    names |= {f"attention.{name}": f"{prefix}encoder.layer.{{}}.attention.attn.{name}" for name in "qkvo"}
    names["post_attention_layernorm"] = f"{prefix}encoder.layer.{{}}.attention.LayerNorm"
    # the table's path ends like that of a bias, and it is none
    names["relative_bias"] = f"{prefix}encoder.relative_attention_bias.weight"
    return encoder_storage.encoder_names(config, names)


def leftovers(config: Config) -> tuple[str, ...]:
    """See `encoder_storage.roberta_leftovers`."""
    return encoder_storage.roberta_leftovers("mpnet.", config)


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """The tensors that all layers read: {"bias"}."""
    positions = inputs["positions"]
    values = by_distance(params["relative_bias"], MAX_DISTANCE, bidirectional=True)
    return {"bias": RelativeBias(values, positions, positions)}


_BASE: ConfigJson = {
    "architectures": ["MPNetForMaskedLM"],
    "model_type": "mpnet",
    "vocab_size": 30527,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "layer_norm_eps": 1e-5,
}
PRESETS = {"mpnet-base": _BASE, "all-mpnet-base-v2": _BASE | {"architectures": ["MPNetModel"]}}

"""ALBERT (arXiv 1909.11942): BERT with narrow embeddings, whose layers share their parameters.

A layer here is a group of the file, the same layer of parameters applied `repeats` times: taps and edits of it are of
every pass, and a tap returns that of the last.
"""

from dataclasses import dataclass

from fnmodels.errors import ConfigError
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
    unembed,
)
from fnmodels.models.common.family import Traits

MODEL_TYPES = ("albert",)
TRAITS = Traits(
    dropout={**encoder.DROPOUT, "hidden_dropout_prob": ("attention", "embedding")},
    causal=False,
    optional={"pooler": "pooler"},
    resaved={r"albert\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)
# Fields of the published files that no code reads.
_IGNORED = ("down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type", "num_memory_blocks")


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. num_hidden_layers: groups of the file, each of `repeats` passes."""

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        fields.expect("inner_group_num", 1)
        usual = encoder.encoder_fields(fields, model_type, "Albert", hidden_act="gelu_new")
        layers, groups = usual["num_hidden_layers"], fields.integer("num_hidden_groups", 1)
        if layers % groups:
            raise ConfigError(
                f"{fields.where}: num_hidden_layers {layers} is no multiple of num_hidden_groups {groups}."
            )
        usual |= {"num_hidden_layers": groups, "embedding_size": fields.integer("embedding_size", 128)}
        config = Config(**usual, repeats=layers // groups, pooler=int(usual["head"] == "none"))
        return encoder.finished(config, fields, _IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        groups = self.num_hidden_layers
        layers = {"num_hidden_layers": groups * self.repeats, "num_hidden_groups": groups}
        return encoder.encoder_to_hf(self, "Albert", names={}, embedding_size=self.embedding_size, **layers)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else "albert."
    layer = f"{prefix}encoder.albert_layer_groups.{{}}.albert_layers.0."
    names = encoder_storage.bert_names(prefix) | {
        "attention.q": f"{layer}attention.query",
        "attention.k": f"{layer}attention.key",
        "attention.v": f"{layer}attention.value",
        "attention.o": f"{layer}attention.dense",
        "post_attention_layernorm": f"{layer}attention.LayerNorm",
        "mlp.up": f"{layer}ffn",
        "mlp.down": f"{layer}ffn_output",
        "post_feedforward_layernorm": f"{layer}full_layer_layer_norm",
        "embed_projection.weight": f"{prefix}encoder.embedding_hidden_mapping_in.weight",
        "embed_projection.bias": f"{prefix}encoder.embedding_hidden_mapping_in.bias",
        "pooler.dense": f"{prefix}pooler",
        "head.dense": "predictions.dense" if config.head == "masked_lm" else "albert.pooler",
        "head.norm": "predictions.LayerNorm",
        "head.score": "qa_outputs" if config.head == "question_answering" else "classifier",
        "lm_head": "predictions.decoder",
        "lm_head_bias": "predictions.bias",
    }
    return encoder_storage.encoder_names(config, names)


def leftovers(config: Config) -> tuple[str, ...]:
    """Buffers of older files, the head's bias once more, and what pre-training has beside the masked-LM head."""
    buffers = (r"(albert\.)?embeddings\.position_ids", r"predictions\.decoder\.bias")
    return (
        (*buffers, r"albert\.pooler\.(weight|bias)", r"sop_classifier\..*") if config.head == "masked_lm" else buffers
    )


_BASE: ConfigJson = {
    "architectures": ["AlbertForMaskedLM"],
    "model_type": "albert",
    "vocab_size": 30000,
    "embedding_size": 128,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_XXL = {"hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384}
PRESETS = {"albert-base-v2": _BASE, "albert-large-v2": _BASE | _LARGE, "albert-xxlarge-v2": _BASE | _XXL}

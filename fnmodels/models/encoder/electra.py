"""ELECTRA (arXiv 2003.10555): BERT whose embeddings may be narrower, trained to find replaced tokens.

The generator has a masked-LM head; the discriminator, "replaced", a logit for each token.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.documents import Documents
from fnmodels.models.common import encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.encoder import attention_masks, block, embed, freqs_cis, kinds, spec  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS
from fnmodels.tree import Tree

MODEL_TYPES = ("electra",)
TRAITS = Traits(
    dropout=encoder.DROPOUT,
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    leftovers=(r"(electra\.)?embeddings\.position_ids",),
    resaved={r"electra\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)
_DENSE = {
    "masked_lm": "generator_predictions.dense",
    "replaced": "discriminator_predictions.dense",
    "classification": "classifier.dense",
}
_SCORE = {
    "replaced": "discriminator_predictions.dense_prediction",
    "classification": "classifier.out_proj",
    "tokens": "classifier",
    "question_answering": "qa_outputs",
}


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches."""

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        usual = encoder.encoder_fields(fields, model_type, "Electra", heads=(*encoder.HEADS, "replaced"))
        width = fields.integer("embedding_size", 128)
        config = Config(**usual, embedding_size=0 if width == usual["hidden_size"] else width)
        return encoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        width = self.embedding_size or self.hidden_size
        return encoder.encoder_to_hf(self, "Electra", names={}, embedding_size=width)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    names = encoder_storage.bert_names("" if config.head == "none" else "electra.")
    names |= {"head.norm": "generator_predictions.LayerNorm", "lm_head_bias": "generator_lm_head"}
    names |= {"lm_head": "generator_lm_head", "head.dense": _DENSE.get(config.head, "")}
    return encoder_storage.encoder_names(config, names | {"head.score": _SCORE.get(config.head, "")})


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """As `encoder.unembed_gelu`; of a discriminator logits [B, S, 1], high where a token was replaced."""
    if config.head != "replaced":
        return encoder.unembed_gelu(params, x, config=config)
    weights = params["head"]
    x = ACTIVATIONS[config.hidden_act](linear(x, weights["dense"], weights["dense_bias"]))
    return linear(x, weights["score"], weights["score_bias"])


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Logits [N, labels] of each document's first token."""
    return encoder.classify_with(F.gelu, params, x, documents)


_BASE: ConfigJson = {
    "architectures": ["ElectraForPreTraining"],
    "model_type": "electra",
    "vocab_size": 30522,
    "embedding_size": 768,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_SMALL = {"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
PRESETS = {
    "electra-small-discriminator": _BASE | _SMALL,
    "electra-small-generator": _BASE | _SMALL | {"architectures": ["ElectraForMaskedLM"]},
    "electra-large-generator": _BASE
    | _SMALL
    | {"architectures": ["ElectraForMaskedLM"], "embedding_size": 1024, "num_hidden_layers": 24},
    "electra-base-discriminator": _BASE,
    "electra-large-discriminator": _BASE | _LARGE | {"embedding_size": 1024},
}

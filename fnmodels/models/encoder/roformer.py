"""RoFormer (arXiv 2104.09864): BERT with a rotary embedding of neighboring pairs in place of a table of positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fnmodels.inputs.documents import Documents
from fnmodels.models.common import encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.encoder import attention_masks, block, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.ops import Rope, embed_tokens, rotary_table
from fnmodels.ops.mlp import ACTIVATIONS
from fnmodels.tree import Tree

MODEL_TYPES = ("roformer",)
TRAITS = Traits(
    dropout=encoder.DROPOUT,
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    # sines and cosines, a pooler that no head reads, and the head's bias once more
    leftovers=(r"roformer\.encoder\.embed_positions\.weight", r"encoder\.embed_positions\.weight")
    + (r"roformer\.pooler\.dense\.(weight|bias)", r"cls\.predictions\.decoder\.bias"),
    resaved={r"roformer\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)
_DENSE = {"masked_lm": "cls.predictions.transform.dense", "classification": "classifier.dense"}
_SCORE = {"classification": "classifier.out_proj", "tokens": "classifier", "question_answering": "qa_outputs"}


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches."""

    rotary_interleaved: ClassVar[bool] = True
    max_position_embeddings: int = 1536
    rotary_value: bool = False

    @property
    def rope(self) -> Rope:
        """Of full heads, at 10000."""
        return Rope()

    @property
    def turns_values(self) -> bool:
        return self.rotary_value

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        usual = encoder.encoder_fields(fields, model_type, "RoFormer", max_position_embeddings=1536)
        width = fields.integer("embedding_size", usual["hidden_size"])
        config = Config(
            **usual,
            embedding_size=0 if width == usual["hidden_size"] else width,
            rotary_value=fields.boolean("rotary_value", False),
        )
        return encoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        width = self.embedding_size or self.hidden_size
        return encoder.encoder_to_hf(self, "RoFormer", names={}, embedding_size=width, rotary_value=self.rotary_value)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    return {name: leaf for name, leaf in encoder.spec(config).items() if name != "embed_positions"}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    names = encoder_storage.bert_names("" if config.head == "none" else "roformer.")
    names |= {"head.norm": "cls.predictions.transform.LayerNorm", "lm_head_bias": "cls.predictions.bias"}
    names |= {"lm_head": "cls.predictions.decoder", "head.dense": _DENSE.get(config.head, "")}
    return encoder_storage.encoder_names(config, names | {"head.score": _SCORE.get(config.head, "")})


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}."""
    return {"full": rotary_table(config.rope, config.head_dim, positions, length)}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of the sum of token (or given) and token type embeddings; see `encoder.embed`."""
    x = embed_tokens(params["embed_tokens"], inputs)
    if config.embedding_size not in (0, x.shape[-1]):
        return x
    return encoder.embed_types(params, x, inputs if isinstance(inputs, Mapping) else {}, config)


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Logits [N, labels] of each document's first token."""
    return encoder.classify_with(ACTIVATIONS[config.hidden_act], params, x, documents)


_BASE: ConfigJson = {"architectures": ["RoFormerForMaskedLM"], "model_type": "roformer", "vocab_size": 50000}
_BASE |= {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_SMALL = {"embedding_size": 128, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
_SMALL |= {"intermediate_size": 1536, "max_position_embeddings": 512}
PRESETS: dict[str, ConfigJson] = {
    "roformer-chinese-base": _BASE,
    "roformer-chinese-small": _BASE | _SMALL,
}

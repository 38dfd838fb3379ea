"""ESM-2 (Science 379, 1123) and ESM-1b and 1v: BERT with norms first, over the amino acids of proteins.

ESM-2 rotates queries and keys; the older ones have learned positions. Embeddings are scaled by the share of a
document's tokens that are not masked, as input dropout would: `token_dropout`. The head that predicts contacts of
amino acids from attention is not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.inputs.documents import share_of_document
from fnmodels.models.common import encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.encoder import attention_masks, block, classify, kinds, pooled  # noqa: F401
from fnmodels.models.common.encoder import unembed_gelu as unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.ops import Rope, embed_tokens, look_up, no_rotation, rotary_table
from fnmodels.tree import Tree

MODEL_TYPES = ("esm",)
HEADS = ("masked_lm", "none", "classification", "tokens")
TRAITS = Traits(
    heads=HEADS,
    dropout={**encoder.DROPOUT, "hidden_dropout_prob": ("attention", "mlp")},
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    optional={"pooler": "pooler"},
    resaved={
        # transformers 5.24 saves older names of norms; a model without a head may be stored with the prefix of others
        r"(.*LayerNorm)\.gamma": r"\1.weight",
        r"(.*LayerNorm)\.beta": r"\1.bias",
        r"esm\.(.*)": r"\1",
    },
    leftovers=(
        r"(esm\.)?(encoder\.layer\.[\d*]+\.attention\.self\.)?rotary_embeddings\.inv_freq",
        r"(esm\.)?embeddings\.position_ids",
        r"(esm\.)?contact_head\.regression\.(weight|bias)",
    ),
)
_MASKED = 0.15 * 0.8  # the share of masked tokens in training
_POSITIONS = ("absolute", "rotary")
_IGNORED = ("classifier_dropout", "vocab_list", "esmfold_config")


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. rope: None with learned positions. mask_token: whose embedding is 0; -1: no token dropout."""

    rope: Rope | None = Rope()  # noqa: RUF009 - frozen
    mask_token: int = -1
    norm_first: bool = True
    embed_norm: bool = False
    type_vocab_size: int = 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        rotary = fields.choice("position_embedding_type", _POSITIONS, "absolute") == "rotary"
        rest = {name: value for name, value in values.items() if name != "position_embedding_type"}
        fields = Fields(_DEFAULTS | {"hidden_act": "gelu", "type_vocab_size": 0} | rest)
        fields.expect("hidden_act", "gelu")  # whatever the file says
        fields.expect("type_vocab_size", 0)
        fields.expect("is_folding_model", False)
        first = 0 if rotary else fields.integer("pad_token_id", 1, low=0) + 1
        model_type = fields.choice("model_type", MODEL_TYPES)
        usual = encoder.encoder_fields(fields, model_type, "Esm", first_position=first, heads=HEADS)
        theta, dropped = fields.number("rope_theta", 1e4), fields.boolean("token_dropout", False)
        config = Config(
            **usual,
            rope=Rope(theta) if rotary else None,
            mask_token=fields.integer("mask_token_id", 32, low=0) if dropped else -1,
            embed_norm=fields.boolean("emb_layer_norm_before", False),
            pooler=int(usual["head"] == "none"),
        )
        return encoder.finished(config, fields, _IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        own: ConfigJson = {"position_embedding_type": _POSITIONS[self.rope is not None]}
        own |= {"emb_layer_norm_before": self.embed_norm, "token_dropout": self.mask_token >= 0}
        own |= {"mask_token_id": self.mask_token} if self.mask_token >= 0 else {}
        own |= {"pad_token_id": self.first_position - 1} if self.rope is None else {"rope_theta": self.rope.theta}
        names = {"type_vocab_size": "", "hidden_act": ""}
        return encoder.encoder_to_hf(self, "Esm", names=names, **own)


_DEFAULTS: ConfigJson = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 1026,
}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    tree = encoder.spec(config)
    return tree if config.rope is None else {name: leaf for name, leaf in tree.items() if name != "embed_positions"}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else "esm."
    names = encoder_storage.bert_names(prefix) | encoder_storage.ROBERTA_HEADS[config.head]
    layer = f"{prefix}encoder.layer.{{}}."
    names |= {"input_layernorm": f"{layer}attention.LayerNorm", "post_attention_layernorm": f"{layer}LayerNorm"}
    names |= {"norm": f"{prefix}encoder.emb_layer_norm_after", "embed_norm": f"{prefix}embeddings.layer_norm"}
    return encoder_storage.encoder_names(config, names)


def leftovers(config: Config) -> tuple[str, ...]:
    """See `encoder_storage.roberta_leftovers`; files of ESM-2 may hold a table of positions that nothing reads."""
    table = () if config.rope is None else (r"(esm\.)?embeddings\.position_embeddings\.weight",)
    return (*table, *encoder_storage.roberta_leftovers("esm.", config))


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, H/2, 2]}, without columns for learned positions."""
    rope = config.rope
    return {"full": no_rotation(positions) if rope is None else rotary_table(rope, config.head_dim, positions, length)}


def token_inputs(config: Config, tokens: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
    """{"scale": fp32 [B, S]} of embeddings of ids: 0 for mask tokens, and the more for others the more of them."""
    if config.mask_token < 0 or tokens.is_floating_point():
        return {}
    masked = tokens == config.mask_token
    scale = (1 - _MASKED) / (1 - share_of_document(masked, segment_ids))
    return {"scale": scale.where(~masked, 0)}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: scaled token embeddings (given vectors are not scaled), and learned positions where there are any.

    inputs: those of `prepare`. ValueError for bare tokens, whose documents are not known.
    """
    scaled = config.mask_token >= 0 and isinstance(inputs, Mapping) and not inputs["tokens"].is_floating_point()
    if not isinstance(inputs, Mapping) or (scaled and "scale" not in inputs):
        raise ValueError(
            "ESM scales embeddings by the masked tokens of their document, so it needs the dict of inputs that "
            "`prepare` makes of token ids; bare token ids do not say where documents end."
        )
    x = embed_tokens(params["embed_tokens"], inputs)
    if scaled:
        x = (x * inputs["scale"][..., None]).to(x.dtype)
    if config.rope is None:
        x = x + look_up(params["embed_positions"], inputs["positions"] + config.first_position, "positions")
    return encoder.embed_types(params, x, inputs, config)


_BASE: ConfigJson = {
    "architectures": ["EsmForMaskedLM"],
    "model_type": "esm",
    "vocab_size": 33,
    "mask_token_id": 32,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "rotary",
    "token_dropout": True,
}


def _sized(width: int, layers: int, heads: int) -> ConfigJson:
    inner = {"intermediate_size": 4 * width}
    return _BASE | {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads} | inner


PRESETS = {
    "esm2-8m": _sized(320, 6, 20),
    "esm2-35m": _sized(480, 12, 20),
    "esm2-150m": _sized(640, 30, 20),
    "esm2-650m": _sized(1280, 33, 20),
    "esm2-3b": _sized(2560, 36, 40),
    "esm2-15b": _sized(5120, 48, 40),
    "esm1b-650m": _sized(1280, 33, 20) | {"position_embedding_type": "absolute", "emb_layer_norm_before": True},
}

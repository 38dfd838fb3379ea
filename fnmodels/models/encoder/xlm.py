"""XLM (arXiv 1901.07291): BERT's layers, with a vector for the language of each token where `languages` has several.

The masked-LM head is the embedding with a bias. inputs["languages"] [B, S] says which language a token is of; without
it no vector is added, as in transformers. FlauBERT's dialect of this model is not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder, encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.encoder import attention_masks, block, classify, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, embedding, weight
from fnmodels.ops.embedding import embed_tokens, look_up
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("xlm",)
TRAITS = Traits(
    dropout={"attention_dropout": ("weights",), "dropout": ("attention", "mlp", "embedding")},
    dropout_defaults={"attention_dropout": 0.1, "dropout": 0.1},
    causal=False,
    leftovers=(r"(transformer\.)?position_ids",),
    resaved={r"transformer\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)
_HEADS = ("masked_lm", "none", "tokens")
_LM, _USUAL_LM = "XLMWithLMHeadModel", "XLMForMaskedLM"  # the name of its class, and what it would be in other families
_RENAMED = {"emb_dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
_RENAMED |= {"n_words": "vocab_size", "init_std": "initializer_range"}
_FIELDS = {ours: theirs for theirs, ours in _RENAMED.items() if theirs != "n_words"}
_ABSENT = {"type_vocab_size": "", "intermediate_size": "", "hidden_act": ""}
# Initial values, tokens, and the heads of other classes.
_IGNORED = (
    *("embed_init_std", "mask_index", "unk_index", "bos_index", "eos_index", "pad_index", "lang_id", "is_encoder"),
    *("start_n_top", "end_n_top", "lang2id", "id2lang", "max_vocab", "min_count", "same_enc_dec", "share_inout_emb"),
    "sinusoidal_embeddings",  # what the table of positions was initialized with
)
_NAMES = {
    "embed_tokens": "transformer.embeddings",
    "embed_positions": "transformer.position_embeddings",
    "embed_languages": "transformer.lang_embeddings",
    "embed_norm": "transformer.layer_norm_emb",
    **{f"attention.{name}": f"transformer.attentions.{{}}.{name}_lin" for name in "qkv"},
    "attention.o": "transformer.attentions.{}.out_lin",
    "post_attention_layernorm": "transformer.layer_norm1.{}",
    "mlp.up": "transformer.ffns.{}.lin1",
    "mlp.down": "transformer.ffns.{}.lin2",
    "post_feedforward_layernorm": "transformer.layer_norm2.{}",
    "lm_head": "pred_layer.proj",
    "lm_head_bias": "pred_layer.proj",
    "head.score": "classifier",
}


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. languages: rows of the table of languages, 0 for none."""

    type_vocab_size: int = 0
    languages: int = 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        if values.get("architectures") in ([_LM], None):
            values = values | {"architectures": [_USUAL_LM]}
        fields = renamed(Fields(values), _RENAMED)
        model_type = fields.choice("model_type", MODEL_TYPES)
        for name, only in (("causal", False), ("asm", False), ("is_encoder", True), ("type_vocab_size", 0)):
            fields.expect(name, only)
        gelu, languages = fields.boolean("gelu_activation", True), fields.integer("n_langs", 1)
        derived: ConfigJson = {
            "hidden_act": "gelu" if gelu else "relu",
            "intermediate_size": 4 * fields.integer("hidden_size"),
        }
        for name, value in derived.items():
            fields.expect(name, value)
            fields.values = {**fields.values, name: value}
        usual = encoder.encoder_fields(fields, model_type, "XLM", heads=_HEADS, type_vocab_size=0)
        several = fields.boolean("use_lang_emb", True) and languages > 1
        return encoder.finished(Config(**usual, languages=languages if several else 0), fields, _IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        own = {"gelu_activation": self.hidden_act == "gelu", "n_langs": self.languages or 1}
        out = encoder.encoder_to_hf(self, "XLM", names=_FIELDS | _ABSENT, **own)
        return out | ({"architectures": [_LM]} if out["architectures"] == [_USUAL_LM] else {})


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    tree = encoder.spec(replace(config, head="none") if config.head == "masked_lm" else config)
    if config.languages:
        table = embedding(config.languages, config.hidden_size, config.initializer_range, axis="type")
        tree["embed_languages"] = table
    if config.head != "masked_lm":
        return tree
    untied = {"lm_head": weight((config.vocab_size, config.hidden_size), ("vocab", "embed"), config.initializer_range)}
    return tree | {"lm_head_bias": bias(config.vocab_size, "vocab")} | ({} if config.tie_word_embeddings else untied)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    names = encoder_storage.encoder_names(config, _NAMES)
    return {path: name.removeprefix("transformer.") for path, name in names.items()} if config.head == "none" else names


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of token, position and, where inputs have "languages", language embeddings."""
    if not isinstance(inputs, Mapping) or "embed_languages" not in params or "languages" not in inputs:
        return encoder.embed(params, inputs, config=config)
    x = embed_tokens(params["embed_tokens"], inputs)
    x = x + look_up(params["embed_languages"], inputs["languages"], "languages")
    return encoder.embed(params, {**inputs, "tokens": x}, config=config)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The head, applied to each token: logits [B, S, V] or [B, S, labels]; without a head x [B, S, D]."""
    if config.head != "masked_lm":
        return encoder.unembed(params, x, config=config)
    return linear(x, decoder.head(params, config), params["lm_head_bias"])


def _preset(width: int, layers: int, heads: int, tokens: int, **more: Any) -> ConfigJson:
    names = {"architectures": [_LM], "model_type": "xlm", "vocab_size": tokens}
    return names | {"emb_dim": width, "n_layers": layers, "n_heads": heads} | more


PRESETS = {
    "xlm-mlm-en-2048": _preset(2048, 12, 16, 30145),
    "xlm-mlm-17-1280": _preset(1280, 16, 16, 200000, n_langs=17, use_lang_emb=False),
    "xlm-mlm-100-1280": _preset(1280, 16, 16, 200000, n_langs=100, use_lang_emb=False),
    "xlm-mlm-xnli15-1024": _preset(1024, 12, 8, 95000, n_langs=15),
}

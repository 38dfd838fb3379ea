"""BART (arXiv 1910.13461) and its relatives: the first Transformer with norms after or before sublayers.

| type | norms | positions | after the embedding |
|---|---|---|---|
| bart | after | learned | norm |
| mbart (arXiv 2001.08210) | before | learned | norm |
| pegasus (arXiv 1912.08777) | before | sines and cosines | |
| marian (arXiv 1804.00344) | after | sines and cosines | |
| m2m_100 (arXiv 2010.11125), NLLB | before | sines and cosines of other periods | |
| blenderbot (arXiv 2004.13637) | before | learned | |
| blenderbot-small | after | learned | norm, of the decoder before positions are added |

Sines and cosines are computed from positions; tables of them in files are not read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.dropout import with_dropout
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, embedding, layer_norm_leaves
from fnmodels.models.common.storage import StoredNames, TensorSlice
from fnmodels.models.encoder_decoder import transformer
from fnmodels.models.encoder_decoder.classes import declared_class, headless
from fnmodels.models.encoder_decoder.cross_attention import memory_of
from fnmodels.models.encoder_decoder.stacks import attention_masks, freqs_cis, kinds, stacks  # noqa: F401
from fnmodels.models.encoder_decoder.transformer import block  # noqa: F401
from fnmodels.ops import Rope, embed_tokens, layer_norm, rotary_table
from fnmodels.ops.embedding import look_up
from fnmodels.ops.linear import linear
from fnmodels.ops.rotary import sinusoids
from fnmodels.tree import Tree, flatten


class _Form(NamedTuple):
    """Structure of a model type. first: row of the table of positions, or the number, of a document's first token."""

    norm_first: bool
    learned: bool
    first: int = 0
    embed_norm: bool = False
    has_bias: bool = True
    classes: str = ""
    defaults: dict[str, Any] = {}  # noqa: RUF012 - read only


_BASE: ConfigJson = {"vocab_size": 50265, "d_model": 1024, "activation_function": "gelu", "pad_token_id": 1}
_BASE |= {f"{side}_layers": 12 for side in ("encoder", "decoder")}
_BASE |= {f"{side}_attention_heads": 16 for side in ("encoder", "decoder")}
_BASE |= {f"{side}_ffn_dim": 4096 for side in ("encoder", "decoder")}
_BASE |= {"max_position_embeddings": 1024, "decoder_start_token_id": 2, "scale_embedding": False}
_SMALL = {"encoder_layers": 8, "decoder_layers": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "d_model": 512}
_SMALL |= {"max_position_embeddings": 512, "decoder_start_token_id": 1}
_LARGE = {"encoder_layers": 2, "decoder_layers": 24, "encoder_ffn_dim": 10240, "decoder_ffn_dim": 10240}
_LARGE |= {"d_model": 2560, "encoder_attention_heads": 32, "decoder_attention_heads": 32, "vocab_size": 8008}
_LARGE |= {"max_position_embeddings": 128, "decoder_start_token_id": 1}
_FORMS = {
    "bart": _Form(False, True, 2, True, classes="Bart"),
    "mbart": _Form(True, True, 2, True, classes="MBart"),
    "pegasus": _Form(True, False, classes="Pegasus", defaults={"decoder_start_token_id": 0}),
    "marian": _Form(False, False, classes="Marian", defaults={"vocab_size": 58101, "decoder_start_token_id": 58100}),
    "m2m_100": _Form(
        *(True, False, 2, False, False, "M2M100"),
        {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True},
    ),
    "blenderbot": _Form(True, True, classes="Blenderbot", defaults=_LARGE),
    "blenderbot-small": _Form(False, True, embed_norm=True, classes="BlenderbotSmall", defaults=_SMALL),
}
MODEL_TYPES = tuple(_FORMS)
TRAITS = Traits(
    kinds=("full", "causal"),
    heads=("lm", "none"),
    causal=False,
    dropout=transformer.DROPOUT,
    dropout_defaults={"dropout": 0.1},
    # tables of sines and cosines, and version numbers of the first conversions
    leftovers=(r"(model\.)?(en|de)coder\.(version|embed_positions\.weights)",),
)
# Settings of generation, and a switch of M2M100's layers that each of its encoders and decoders has.
_IGNORED: tuple[str, ...] = (*transformer.IGNORED, "add_final_layer_norm", "normalize_before", "normalize_embedding")
_IGNORED += ("do_blenderbot_90_layernorm", "extra_layer_norm", "layernorm_variant", "force_bos_token_to_be_generated")
_IGNORED += ("add_bias_logits", "static_position_embeddings", "extra_pos_embeddings", "classif_dropout")
_KEPT = ("forced_bos_token_id", "forced_eos_token_id")


@dataclass(frozen=True, kw_only=True)
class Config(transformer.PairConfig):
    """Sizes and switches. first_position: see `_Form`. embed_scale: whether embeddings are multiplied by sqrt(D)."""

    model_type: str = "bart"
    first_position: int = 2
    embed_scale: bool = False

    @property
    def form(self) -> _Form:
        """The structure of the model type."""
        return _FORMS[self.model_type]

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        model_type = Fields(values).choice("model_type", MODEL_TYPES)
        fields, form = Fields({**_rates(model_type), **_layerdrop(model_type), **values}), _FORMS[model_type]
        fields.choice("model_type", MODEL_TYPES)
        default = _BASE | form.defaults
        lm = declared_class(fields, _architecture(model_type)) == _architecture(model_type)
        for name, only in (("is_encoder_decoder", True), ("tie_word_embeddings", True), ("is_decoder", False)):
            fields.expect(name, only)
        sizes = transformer.pair_fields(fields, default)
        if model_type == "marian":
            fields.expect("share_encoder_decoder_embeddings", True)
            fields.expect("decoder_vocab_size", sizes["vocab_size"])
        first = fields.integer("pad_token_id", 1, low=0) + 1 if model_type == "m2m_100" else form.first
        config = Config(
            **sizes,
            max_position_embeddings=fields.integer("max_position_embeddings", default["max_position_embeddings"]),
            norm_first=form.norm_first,
            first_position=first,
            embed_scale=fields.boolean("scale_embedding", default["scale_embedding"]),
            head="lm" if lm else "none",
            model_type=model_type,
        )
        config = with_dropout(config, fields)
        kept = tuple((name, json.dumps(values[name])) for name in _KEPT if values.get(name) is not None)
        object.__setattr__(config, "extra", fields.finish((*_IGNORED, *_KEPT)) + kept)
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of BART; ConfigError for one of the stacks."""
        out = {name: json.loads(value) for name, value in self.extra} | transformer.pair_to_hf(self)
        out |= {"scale_embedding": self.embed_scale, "max_position_embeddings": self.max_position_embeddings}
        out |= {"pad_token_id": self.first_position - 1} if self.model_type == "m2m_100" else {}
        architecture = _architecture(self.model_type)
        name = architecture if self.head == "lm" else headless(architecture)
        classes = {"architectures": [name], "model_type": self.model_type}
        rates = dict.fromkeys(_rates(self.model_type), self.dropout.weights)
        return decoder.expressible(self, out | rates | classes)


def _rates(model_type: str) -> dict[str, float]:
    """Rates of dropout that are not the usual ones where a file has none."""
    return {"attention_dropout": 0.1} if model_type == "m2m_100" else {}


def _layerdrop(model_type: str) -> dict[str, float]:
    """LayerDrop where a file has none, with which `prepare_pair(..., rng=)` is refused."""
    return dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.05) if model_type == "m2m_100" else {}


def _architecture(model_type: str) -> str:
    return "MarianMTModel" if model_type == "marian" else f"{_FORMS[model_type].classes}ForConditionalGeneration"


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. {"encoder", "decoder"} hold the stacks of a model of both."""
    V, D, std = config.vocab_size, config.hidden_size, config.initializer_range
    tree: Tree = {"embed_tokens": embedding(V, D, std)}
    tree |= {name: _stack_spec(inner) for name, inner in stacks(config).items()} or _stack_spec(config)
    if config.form.has_bias and config.head == "lm":
        tree["lm_head_bias"] = replace(bias(V, "vocab"), trainable=False)
    return tree


def _stack_spec(config: Config) -> Tree:
    D, std, form, tree = config.hidden_size, config.initializer_range, config.form, dict[str, Any]()
    if form.learned:
        rows = config.first_position + config.max_position_embeddings
        tree["embed_positions"] = embedding(rows, D, std, axis="position")
    tree |= layer_norm_leaves("embed_norm", D, "embed") if form.embed_norm else {}
    tree["layers"] = [transformer.layer_leaves(config)] * config.num_hidden_layers
    return tree | (layer_norm_leaves("norm", D, "embed") if config.norm_first else {})


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    V = config.vocab_size
    top: ConfigJson = {"embed_tokens": "model.shared.weight"}
    top["lm_head_bias"] = TensorSlice("final_logits_bias", 0, V, V, ones=(1, 0))
    return {path: top.get(path) or transformer.stack_name(path, config) for path in flatten(spec(config))}


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter that it repeats}."""
    names = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
    names += ["lm_head.weight"] if config.head == "lm" else []
    return dict.fromkeys(names, "embed_tokens") if config.stack == "both" else {}


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the names of tables of sines and cosines."""
    return () if config.form.learned else (r"model\.(en|de)coder\.embed_positions\.weight",)


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: scaled token embeddings with those of positions, and their norm."""
    if not isinstance(inputs, Mapping):
        raise ValueError(
            f"A {config.model_type} has a vector for each position, so it needs the dict of inputs that `prepare` "
            "makes, with tokens and positions; bare tokens do not say where they stand."
        )
    x, positions = embed_tokens(params["embed_tokens"], inputs), inputs["positions"] + config.first_position
    if config.embed_scale and not inputs["tokens"].is_floating_point():
        x = x * config.hidden_size**0.5
    if config.form.learned:
        placed = look_up(params["embed_positions"], positions, "positions")
    else:
        placed = _sinusoids(positions, config).to(x.dtype)
    if not config.form.embed_norm:
        return x + placed
    if "valid" in inputs:  # before the norm, through whose backward a NaN in padding would reach its parameters
        x = x.where(inputs["valid"][..., None], 0)
    norm = params["embed_norm"], params["embed_norm_bias"]
    if config.model_type == "blenderbot-small" and config.stack == "decoder":
        return layer_norm(x, *norm, eps=transformer.NORM_EPS) + placed
    return layer_norm(x + placed, *norm, eps=transformer.NORM_EPS)


def _sinusoids(positions: Tensor, config: Config) -> Tensor:
    """[B, S, D], fp32: the sines of positions [B, S] over periods from 2 pi to about 20000 pi, then the cosines."""
    if config.model_type == "m2m_100":  # whose last period is 20000 pi, where the one after the others' last would be
        return sinusoids(positions, config.hidden_size)
    cosines, sines = rotary_table(Rope(), config.hidden_size, positions).unbind(-1)
    return torch.cat((sines, cosines), -1)


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """Tensors that every layer reads: in a decoder {"memory", "memory_mask"}, which `inputs` must hold."""
    return memory_of(inputs) if config.stack == "decoder" else {}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The final norm, and of a decoder the tied head: logits [B, S, V]; without a head the hidden states [B, S, D]."""
    x = transformer.final_norm(params, x)
    return x if config.head == "none" else linear(x, params["embed_tokens"], params.get("lm_head_bias"))


def _preset(model_type: str, width: int, layers: int, **values: Any) -> dict[str, Any]:
    """layers: of either stack; the MLPs are four times as wide as the model, and heads have 64 elements."""
    both: dict[str, Any] = {"layers": layers, "attention_heads": width // 64, "ffn_dim": 4 * width}
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in both.items()}
    names = {"architectures": [_architecture(model_type)], "model_type": model_type, "d_model": width}
    return names | sizes | values


_NLLB = {"vocab_size": 256206}
_WIDE = {"encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192}
_HEADS = {"encoder_attention_heads": 16, "decoder_attention_heads": 16}
_CHAT = {f"{side}_attention_heads": 32 for side in ("encoder", "decoder")} | {"encoder_layers": 2}
_OPUS = {"activation_function": "swish", "scale_embedding": True, "max_position_embeddings": 512}
PRESETS = {
    "bart-base": _preset("bart", 768, 6),
    "bart-large": _preset("bart", 1024, 12),
    "bart-large-cnn": _preset("bart", 1024, 12, vocab_size=50264),
    "mbart-large-50": _preset("mbart", 1024, 12, vocab_size=250054, scale_embedding=True, activation_function="relu"),
    "pegasus-large": _preset("pegasus", 1024, 16, vocab_size=96103, scale_embedding=True, activation_function="relu"),
    "opus-mt-en-de": _preset("marian", 512, 6, **_OPUS),
    "m2m100-418m": _preset("m2m_100", 1024, 12),
    "nllb-200-distilled-600m": _preset("m2m_100", 1024, 12, **_NLLB),
    "nllb-200-1.3b": _preset("m2m_100", 1024, 24, **_NLLB, **_WIDE),
    "nllb-200-3.3b": _preset("m2m_100", 2048, 24, **(_NLLB | _WIDE | _HEADS)),
    "blenderbot-400m-distill": _preset("blenderbot", 1280, 12, **_CHAT, vocab_size=8008, scale_embedding=True),
    "blenderbot-small-90m": _preset("blenderbot-small", 512, 8, vocab_size=54944, scale_embedding=True, **_HEADS),
}

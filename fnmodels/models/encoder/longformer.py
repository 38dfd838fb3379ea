"""Longformer (arXiv 2004.05150): RoBERTa with sliding windows, beside which some tokens see all and are seen by all.

Such a global token has projections of its own. A head with one result per document makes its first token global, as in
transformers; other heads have none, and keep those projections unread, for a later head and for files. Other global
tokens, such as those of a question, are not built.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.documents import first_tokens
from fnmodels.inputs.mask import Create, check_one_axis, masks_of
from fnmodels.inputs.rules import BidirectionalWindow, Rule, Tokens
from fnmodels.models.common import decoder, encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.encoder import classify, embed, pooled  # noqa: F401
from fnmodels.models.common.encoder import unembed_gelu as unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import attention_leaves
from fnmodels.ops.qkv import project_qkv
from fnmodels.ops.rotary import no_rotation
from fnmodels.tree import Tree

MODEL_TYPES = ("longformer",)
HEADS = ("masked_lm", "none", "classification", "tokens")
TRAITS = Traits(
    kinds=("sliding",),
    dropout=encoder.DROPOUT,
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    optional={"pooler": "pooler"},
    resaved={r"longformer\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)
_GLOBAL = tuple(f"{name}_{end}" for name in "qkv" for end in ("proj", "bias"))


@dataclass(frozen=True)
class First(Rule):
    """Pairs with a document's first token, which sees all of its document and is seen by all of it.

    The spans of the mask are 1 at first tokens: positions alone do not say where a document begins.
    """

    def __call__(self, q: Tokens, kv: Tokens) -> Tensor:
        if q.spans is None or kv.spans is None:
            raise ValueError("The rule First needs span ids, 1 at first tokens: pass `spans` where the mask is built.")
        return (q.spans > 0) | (kv.spans > 0)


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. sliding_window: how far it reaches to each side; first_position: pad_token_id + 1."""

    first_position: int = 2
    sliding_window: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_sizes(self, "sliding_window")

    @property
    def first_is_global(self) -> bool:
        """Whether the first token of a document sees all of it."""
        return self.head == "classification"

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        first = fields.integer("pad_token_id", 1, low=0) + 1
        usual = encoder.encoder_fields(fields, model_type, "Longformer", first_position=first, heads=HEADS)
        fields.expect("attention_mode", "longformer")
        window = _window(fields, usual["num_hidden_layers"])
        config = Config(**usual, sliding_window=window, pooler=int(usual["head"] == "none"))
        return encoder.finished(config, fields, ("ignore_attention_mask", "onnx_export"))

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        own = {
            "pad_token_id": self.first_position - 1,
            "attention_window": [2 * self.sliding_window] * self.num_hidden_layers,
        }
        return encoder.encoder_to_hf(self, "Longformer", names={}, **own)


def _window(fields: Fields, layers: int) -> int:
    """How far windows reach to each side: half of `attention_window`, a number or a list of one for each layer."""
    given = fields.take("attention_window", 512)
    sizes = given if isinstance(given, list) else [given] * layers
    if len(sizes) != layers or any(type(size) is not int or size < 2 or size % 2 for size in sizes):
        raise ConfigError(
            f"{fields.where}: 'attention_window' is {shown(given)}; it must be an even number from 2, or one for each "
            f"of {layers} layers."
        )
    if len(set(sizes)) > 1:
        raise UnsupportedError(f"{fields.where}: 'attention_window' is {shown(given)}; only equal windows are built.")
    return int(sizes[0]) // 2


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    tree = encoder.spec(config)
    heads, D, std = config.num_attention_heads, config.hidden_size, config.initializer_range
    leaves = attention_leaves(D, heads, heads, config.head_dim, std=std, qkv_bias=True)
    own = {"global": {name: replace(leaves[name], trainable=config.first_is_global) for name in _GLOBAL}}
    return tree | {"layers": [layer | {"attention": layer["attention"] | own} for layer in tree["layers"]]}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    prefix = "" if config.head == "none" else "longformer."
    names = encoder_storage.bert_names(prefix) | encoder_storage.ROBERTA_HEADS[config.head]
    for which, name in {"q": "query", "k": "key", "v": "value"}.items():
        names[f"attention.global.{which}"] = f"{prefix}encoder.layer.{{}}.attention.self.{name}_global"
    return encoder_storage.encoder_names(config, names)


def leftovers(config: Config) -> tuple[str, ...]:
    """See `encoder_storage.roberta_leftovers`."""
    return encoder_storage.roberta_leftovers("longformer.", config)


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return ("sliding",) * config.num_hidden_layers


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, Any]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`.

    With global tokens it is {"attention": mask, "first": int64 [B, S], 1 at the first token of each document}.
    """
    window: Rule = BidirectionalWindow(config.sliding_window)
    if not config.first_is_global:
        return masks_of({"sliding": window}, positions, segment_ids, create=create)
    check_one_axis(positions)
    first = first_tokens(segment_ids, positions).long()
    masks = masks_of({"sliding": window | First()}, positions, segment_ids, spans=first, create=create)
    return {"sliding": {"attention": masks["sliding"], "first": first}}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 [B, S, 0, 2]}: no rotary embedding, since `embed` adds the positions."""
    return {"sliding": no_rotation(positions)}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    if not config.first_is_global:
        return encoder.passes(layer, x, mask, freqs, config, ctx)

    def attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Global heads beside local ones, of which a first token takes the former: all see the same pairs."""
        extra = project_qkv(weights["global"], x, head_dim=config.head_dim)
        q, k, v = (torch.cat(pair, 2) for pair in zip((q, k, v), extra, strict=True))
        local, of_all = ctx.attend(q, k, v, mask["attention"], scale=config.score_scale).chunk(2, 2)
        return torch.where(mask["first"][..., None, None] > 0, of_all, local)

    return encoder.passes(layer, x, mask, freqs, config, ctx, attend)


_BASE: ConfigJson = {
    "architectures": ["LongformerForMaskedLM"],
    "model_type": "longformer",
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 4098,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
PRESETS = {"longformer-base-4096": _BASE, "longformer-large-4096": _BASE | _LARGE}

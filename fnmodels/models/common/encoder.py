"""BERT and its relatives: an encoder with a norm after each sublayer, learned positions, and its heads."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.documents import Documents, pool
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Everything
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.storage import StoredNames
from fnmodels.ops.dropout import Dropout
from fnmodels.ops.embedding import embed_tokens, look_up
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp, plain_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import apply_rotary, no_rotation
from fnmodels.tree import Tree, flatten

from . import decoder
from .config_json import LAYERS_LIMIT, Fields
from .context import Context, with_context
from .dropout import with_dropout
from .family import field_of, model_types
from .heads import check_problem, head_fields, head_to_hf, label_names
from .registry import family_of
from .spec import attention_leaves, bias, embedding, layer_norm_leaves, plain_mlp_leaves, weight
from .storage import fuse

HEADS = ("masked_lm", "none", "classification", "tokens", "question_answering")
C = TypeVar("C")
# Of the trait `dropout`; not the rate of heads, which transformers reads from the same field.
DROPOUT = {"attention_probs_dropout_prob": ("weights",), "hidden_dropout_prob": ("attention", "mlp", "embedding")}


@dataclass(frozen=True)
class EncoderConfig:
    """The Config fields of BERT and its relatives. A document of more than max_position_embeddings tokens is an error.

    first_position: the row of the position table that a document's first token reads; files count the rows before it
    in their max_position_embeddings. type_vocab_size: rows of the table of token types, 0 for none. head, num_labels,
    problem_type: see `heads`. pooler: 1 if a model without a head has the dense layer of `pooled`, else 0.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 512
    first_position: int = 0
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    tie_word_embeddings: bool = True
    head: str = "masked_lm"
    num_labels: int = 0
    problem_type: str = ""
    pooler: int = 0
    initializer_range: float = 0.02
    dropout: Dropout = Dropout()  # noqa: RUF009 - frozen
    # kept for saving only
    model_type: str = field(default="", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        decoder.check_sizes(self, *sizes, "max_position_embeddings")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}."
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")
        if self.head not in HEADS:
            raise ConfigError(f"head is {self.head!r}; it must be one of {', '.join(HEADS)}.")
        check_problem(self)
        if not self.model_type:
            object.__setattr__(self, "model_type", model_types(family_of(self))[0])

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_attention_heads

    def to_hf(self) -> ConfigJson:
        """A config.json, which each family writes."""
        raise NotImplementedError


_DEFAULTS = {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}


def encoder_fields(
    fields: Fields, model_type: str, classes: str, *, first_position: int = 0, **defaults: Any
) -> dict[str, Any]:
    """The fields of EncoderConfig from a config.json; `finished` keeps the rest.

    classes: as for `head_fields`. defaults: the model type's, where they are not BERT's.
    """
    default = _DEFAULTS | defaults
    fields.expect("is_decoder", False)
    fields.expect("is_encoder_decoder", False)
    fields.expect("position_embedding_type", "absolute")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    heads = head_fields(fields, classes, HEADS)
    if heads["head"] == "masked_lm":  # else no head reads the embeddings
        fields.expect("tie_word_embeddings", True)
    fields.take("tie_word_embeddings", None)
    return {
        **{size: fields.integer(size) for size in sizes},
        "num_hidden_layers": fields.integer("num_hidden_layers", high=LAYERS_LIMIT),
        "max_position_embeddings": fields.integer("max_position_embeddings", default["max_position_embeddings"])
        - first_position,
        "first_position": first_position,
        "type_vocab_size": fields.integer("type_vocab_size", default["type_vocab_size"], low=0),
        "layer_norm_eps": fields.number("layer_norm_eps", default["layer_norm_eps"]),
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), default["hidden_act"]),
        "initializer_range": fields.number("initializer_range", 0.02, above=-1e-9),
        "model_type": model_type,
        **heads,
    }


def finished(config: C, fields: Fields, ignored: tuple[str, ...] = ()) -> C:
    """The config with the fields kept for saving; ConfigError for fields that the family did not read."""
    names = label_names(fields) if field_of(config, "num_labels") else ()
    object.__setattr__(config, "extra", fields.finish((*ignored, "gradient_checkpointing", "directionality")) + names)
    return with_dropout(config, fields)


_WRITTEN = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "type_vocab_size", "layer_norm_eps", "hidden_act"),
    *("tie_word_embeddings", "initializer_range"),
)


def encoder_to_hf(config: EncoderConfig, classes: str, *, names: Mapping[str, str], **rest: Any) -> dict[str, Any]:
    """A config.json.

    names: {Config field: its name in the file} where they differ, "" where the file has none. rest: further fields.
    """
    saved = {key: json.loads(value) for key, value in config.extra}
    own = {name: getattr(config, key) for key in _WRITTEN if (name := names.get(key, key))}
    own["max_position_embeddings"] += config.first_position
    out = saved | {"model_type": config.model_type} | own | rest | head_to_hf(config, classes, saved)
    return decoder.expressible(config, out)


def spec(config: EncoderConfig) -> Tree:
    """The parameters: weights [out, in]."""
    V, D, std = config.vocab_size, config.hidden_size, config.initializer_range
    heads = config.num_attention_heads
    layer = {
        "attention": attention_leaves(D, heads, heads, config.head_dim, std=std, qkv_bias=True, o_bias=True),
        **layer_norm_leaves("post_attention_layernorm", D, "embed"),
        "mlp": plain_mlp_leaves(D, config.intermediate_size, std=std),
        **layer_norm_leaves("post_feedforward_layernorm", D, "embed"),
    }
    tree: Tree = {
        "embed_tokens": embedding(V, D, std),
        "embed_positions": embedding(config.first_position + config.max_position_embeddings, D, std, axis="position"),
    }
    if config.type_vocab_size:
        tree["embed_types"] = embedding(config.type_vocab_size, D, std, axis="type")
    tree |= layer_norm_leaves("embed_norm", D, "embed") | {"layers": [layer] * config.num_hidden_layers}
    return tree | head_leaves(config)


def head_leaves(config: Any) -> Tree:
    """The parameters of the config's head: a dense layer D to D where it has one, and the projection to its results."""
    D, std = config.hidden_size, config.initializer_range
    dense = {"dense": weight((D, D), ("features", "embed"), std), "dense_bias": bias(D, "embed")}
    if config.head == "none":
        return {"pooler": dense} if config.pooler else {}
    if config.head == "masked_lm":
        tree: Tree = {"head": dense | layer_norm_leaves("norm", D, "embed")}
        tree["lm_head_bias"] = bias(config.vocab_size, "vocab")
        untied = {"lm_head": weight((config.vocab_size, D), ("vocab", "embed"), std)}
        return tree if config.tie_word_embeddings else tree | untied
    labels = config.num_labels
    score = {"score": weight((labels, D), ("label", "embed"), std), "score_bias": bias(labels, "label")}
    return {"head": dense | score if config.head == "classification" else score}


def bert_names(prefix: str) -> dict[str, str]:
    """The names, as for `encoder_names`, of everything but the heads in files of BERT, with the prefix of its model."""
    layer = f"{prefix}encoder.layer.{{}}."
    return {
        "embed_tokens": f"{prefix}embeddings.word_embeddings",
        "embed_positions": f"{prefix}embeddings.position_embeddings",
        "embed_types": f"{prefix}embeddings.token_type_embeddings",
        "embed_norm": f"{prefix}embeddings.LayerNorm",
        "attention.q": f"{layer}attention.self.query",
        "attention.k": f"{layer}attention.self.key",
        "attention.v": f"{layer}attention.self.value",
        "attention.o": f"{layer}attention.output.dense",
        "post_attention_layernorm": f"{layer}attention.output.LayerNorm",
        "mlp.up": f"{layer}intermediate.dense",
        "mlp.down": f"{layer}output.dense",
        "post_feedforward_layernorm": f"{layer}output.LayerNorm",
        "pooler.dense": f"{prefix}pooler.dense",
    }


def encoder_names(config: Any, names: Mapping[str, str]) -> dict[str, str]:
    """{path of a parameter: its name on disk}.

    names: {path within a layer, or outside: the name on disk, with {} for the layer}. "attention.q" stands for q_proj
    and q_bias, another path for a parameter and its bias; without .weight or .bias at its end, a name gets one.
    """
    names_on_disk = {}
    for path in flatten(family_of(config).spec(config)):
        parts = path.split(".")
        layer, inner = (parts[1], ".".join(parts[2:])) if parts[0] == "layers" else ("", path)
        stem = inner.removesuffix("_proj").removesuffix("_bias")
        name = names[inner] if inner in names else names[stem]
        if not name.endswith((".weight", ".bias")):
            name += ".bias" if inner.endswith("_bias") else ".weight"
        names_on_disk[path] = name.format(layer)
    return names_on_disk


def fused_names(config: Any, names: Mapping[str, str]) -> StoredNames:
    """As `encoder_names`, where parameters of one name are rows of one tensor, in their order."""
    names_on_disk: dict[str, Any] = dict(encoder_names(config, names))
    rows: dict[str, dict[str, int]] = {}
    for path, leaf in flatten(family_of(config).spec(config)).items():
        rows.setdefault(names_on_disk[path], {})[path] = leaf.shape[0]
    for name, parts in rows.items():
        names_on_disk |= fuse(name, parts) if len(parts) > 1 else {}
    return names_on_disk


def kinds(config: Any) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return ("full",) * config.num_hidden_layers


def attention_masks(
    config: Any, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: every token sees its whole document. positions and segment_ids [B, S]."""
    return masks_of({"full": Everything()}, positions, segment_ids, create=create)


def freqs_cis(config: Any, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 [B, S, 0, 2]}: no rotary embedding, since `embed` adds the positions."""
    return {"full": no_rotation(positions)}


def embed(params: Tree, inputs: Tree, /, *, config: EncoderConfig) -> Tensor:
    """x [B, S, D]: the norm of the sum of token (or given) embeddings, position and token type embeddings.

    inputs: those of `prepare`; "token_types" [B, S] is optional, 0 by default. ValueError for bare tokens, which have
    no positions.
    """
    if not isinstance(inputs, Mapping):
        raise ValueError(
            "This encoder has a learned vector for each position, so it needs the dict of inputs that `prepare` makes, "
            "with tokens and positions; bare token ids or vectors do not say where they stand."
        )
    positions = inputs["positions"]
    x = embed_tokens(params["embed_tokens"], inputs)
    x = x + look_up(params["embed_positions"], positions + config.first_position, "positions")
    return embed_types(params, x, inputs, config)


def embed_types(params: Tree, x: Tensor, inputs: Mapping[str, Tensor], config: Any) -> Tensor:
    """The norm of x [B, S, D] and the token type embeddings, if the model has them."""
    if config.type_vocab_size:
        types = inputs.get("token_types")
        types = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device) if types is None else types
        x = x + look_up(params["embed_types"], types, "token types")
    if "valid" in inputs:  # before the norm, through whose backward a NaN in padding would reach its parameters
        x = x.where(inputs["valid"][..., None], 0)
    return layer_norm(x, params["embed_norm"], params["embed_norm_bias"], eps=config.layer_norm_eps)


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: EncoderConfig, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x. Its MLP has a gate if there is one in its parameters."""
    eps, weights = config.layer_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5, bias=ctx.shared("bias"))
    mixed = ctx.tap("attention", project_out(weights, mixed))
    name = "post_attention_layernorm"
    x = ctx.tap("middle", layer_norm(x + mixed, layer[name], layer[f"{name}_bias"], eps=eps))
    feed = gated_mlp if "gate_proj" in layer["mlp"] else plain_mlp
    inner = ctx.tap("mlp", feed(layer["mlp"], x, activation=config.hidden_act, tap=ctx.shown))
    name = "post_feedforward_layernorm"
    return layer_norm(x + inner, layer[name], layer[f"{name}_bias"], eps=eps)


def unembed(params: Tree, x: Tensor, /, *, config: EncoderConfig) -> Tensor:
    """The head, applied to each token: logits [B, S, V] or [B, S, labels]; without a head x [B, S, D]."""
    return _unembed(params, x, config, config.hidden_act)


def unembed_gelu(params: Tree, x: Tensor, /, *, config: EncoderConfig) -> Tensor:
    """As `unembed`; the activation of a masked-LM head is GELU whatever that of the layers."""
    return _unembed(params, x, config, "gelu")


def _unembed(params: Tree, x: Tensor, config: EncoderConfig, activation: str) -> Tensor:
    if config.head == "none":
        return x
    weights = params["head"]
    if config.head != "masked_lm":
        return linear(x, weights["score"], weights["score_bias"])
    x = ACTIVATIONS[activation](linear(x, weights["dense"], weights["dense_bias"]))
    x = layer_norm(x, weights["norm"], weights["norm_bias"], eps=config.layer_norm_eps)
    return linear(x, decoder.head(params, config), params["lm_head_bias"])


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: EncoderConfig) -> Tensor:
    """Logits [N, labels] of each document's first token."""
    return classify_with(torch.tanh, params, x, documents)


def classify_with(activation: Callable[[Tensor], Tensor], params: Tree, x: Tensor, documents: Documents) -> Tensor:
    """score(activation(dense(first token))): logits [N, labels] of hidden states x [B, S, D]."""
    weights = params["head"]
    inner = activation(linear(pool(x, documents, how="first"), weights["dense"], weights["dense_bias"]))
    return linear(inner, weights["score"], weights["score_bias"])


def pooled(params: Tree, x: Tensor, documents: Documents) -> Tensor:
    """The pooler_output of transformers, [N, D]: tanh(dense) of each document's first token, of x [B, S, D]."""
    weights = params["pooler"]
    return torch.tanh(linear(pool(x, documents, how="first"), weights["dense"], weights["dense_bias"]))

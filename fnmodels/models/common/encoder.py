"""BERT and its relatives: an encoder with a norm after or before each sublayer, learned positions, and its heads."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.documents import Documents, pool
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Everything
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.ops.attention.disentangled import DistanceEmbeddings
from fnmodels.ops.dropout import Dropout, dropped
from fnmodels.ops.embedding import embed_tokens, look_up
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp, plain_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import apply_rotary, apply_rotary_interleaved, no_rotation
from fnmodels.tree import Tree

from . import decoder
from .config_json import LAYERS_LIMIT, Fields
from .context import Context, with_context
from .dropout import with_dropout
from .family import field_of, model_types
from .heads import check_problem, head_fields, head_to_hf, label_names
from .registry import family_of
from .spec import attention_leaves, bias, embedding, layer_norm_leaves, plain_mlp_leaves, weight

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
    embedding_size: the width E of the embeddings, which a projection brings to hidden_size, and of what a masked-LM
    head reads; 0: both are hidden_size wide. norm_first: norms are before the sublayers, and one after the last layer.
    embed_norm: embeddings are normalized. repeats: passes of each layer's parameters in a row (ALBERT).
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
    embedding_size: int = 0
    norm_first: bool = False
    embed_norm: bool = True
    repeats: int = 1
    initializer_range: float = 0.02
    dropout: Dropout = Dropout()  # noqa: RUF009 - frozen
    # kept for saving only
    model_type: str = field(default="", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    rotary_interleaved: ClassVar[bool] = False  # whether a rotary embedding turns pairs of neighbors, not of halves

    @property
    def turns_values(self) -> bool:
        """Whether values are turned as queries and keys are."""
        return False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        decoder.check_sizes(self, *sizes, "max_position_embeddings")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}."
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")
        if self.head not in (*HEADS, "replaced"):
            raise ConfigError(f"head is {self.head!r}; it must be one of {', '.join(HEADS)}.")
        check_problem(self)
        if not self.model_type:
            object.__setattr__(self, "model_type", model_types(family_of(self))[0])

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def score_scale(self) -> float:
        """The factor of the products of queries and keys."""
        return float(self.head_dim**-0.5)

    def to_hf(self) -> ConfigJson:
        """A config.json, which each family writes."""
        raise NotImplementedError


_DEFAULTS = {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}


def encoder_fields(
    fields: Fields,
    model_type: str,
    classes: str,
    *,
    first_position: int = 0,
    heads: tuple[str, ...] = HEADS,
    **defaults: Any,
) -> dict[str, Any]:
    """The fields of EncoderConfig from a config.json; `finished` keeps the rest.

    classes, heads: as for `head_fields`. defaults: the model type's, where they are not BERT's.
    """
    default = _DEFAULTS | defaults
    fields.expect("is_decoder", False)
    fields.expect("is_encoder_decoder", False)
    fields.expect("position_embedding_type", "absolute")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    head = head_fields(fields, classes, heads)
    if head["head"] == "masked_lm":  # else no head reads the embeddings
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
        **head,
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


def encoder_to_hf(config: EncoderConfig, classes: str, *, names: Mapping[str, str], **rest: Any) -> ConfigJson:
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
    E, axis = embedded_width(config)
    tree: Tree = {"embed_tokens": embedding(V, E, std, size_axis=axis)}
    rows = config.first_position + config.max_position_embeddings
    tree["embed_positions"] = embedding(rows, E, std, axis="position", size_axis=axis)
    if config.type_vocab_size:
        tree["embed_types"] = embedding(config.type_vocab_size, E, std, axis="type", size_axis=axis)
    tree |= layer_norm_leaves("embed_norm", E, axis) if config.embed_norm else {}
    tree |= projection_leaves(config) | {"layers": [layer_leaves(config)] * config.num_hidden_layers}
    tree |= layer_norm_leaves("norm", D, "embed") if config.norm_first else {}
    return tree | head_leaves(config)


def embedded_width(config: Any) -> tuple[int, str]:
    """(width of the embeddings, the logical axis of that width)."""
    return (config.embedding_size, "features") if config.embedding_size else (config.hidden_size, "embed")


def projection_leaves(config: Any) -> Tree:
    """The projection of embeddings [.., E] to the residual stream, where they are of another width."""
    if not config.embedding_size:
        return {}
    sizes, D = (config.hidden_size, config.embedding_size), config.hidden_size
    projection = weight(sizes, ("embed", "features"), config.initializer_range)
    return {"embed_projection": {"weight": projection, "bias": bias(D, "embed")}}


def layer_leaves(config: Any) -> Tree:
    """The parameters of a layer, with biases everywhere."""
    D, heads, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    first, second = NORMS[config.norm_first]
    return {
        **layer_norm_leaves(first, D, "embed"),
        "attention": attention_leaves(D, heads, heads, config.head_dim, std=std, qkv_bias=True, o_bias=True),
        **layer_norm_leaves(second, D, "embed"),
        "mlp": plain_mlp_leaves(D, config.intermediate_size, std=std),
    }


# Of attention and of the MLP, after them and before them.
NORMS = ("post_attention_layernorm", "post_feedforward_layernorm"), ("input_layernorm", "post_attention_layernorm")


def head_leaves(config: Any) -> Tree:
    """The parameters of the config's head: a dense layer D to D where it has one, and the projection to its results."""
    D, std = config.hidden_size, config.initializer_range
    dense = {"dense": weight((D, D), ("features", "embed"), std), "dense_bias": bias(D, "embed")}
    if config.head == "none":
        return {"pooler": dense} if config.pooler else {}
    if config.head == "replaced":
        return {"head": dense | {"score": weight((1, D), ("label", "embed"), std), "score_bias": bias(1, "label")}}
    if config.head == "masked_lm":
        E, axis = embedded_width(config)
        if config.embedding_size:
            dense = {"dense": weight((E, D), ("features", "embed"), std), "dense_bias": bias(E, axis)}
        tree: Tree = {"head": dense | layer_norm_leaves("norm", E, axis)}
        tree["lm_head_bias"] = bias(config.vocab_size, "vocab")
        untied = {"lm_head": weight((config.vocab_size, E), ("vocab", axis), std)}
        return tree if config.tie_word_embeddings else tree | untied
    labels = config.num_labels
    score = {"score": weight((labels, D), ("label", "embed"), std), "score_bias": bias(labels, "label")}
    return {"head": dense | score if config.head == "classification" else score}


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

    inputs: those of `prepare`; "token_types" [B, S] is optional, 0 by default. Where embeddings are narrower than the
    residual stream, vectors of its width are returned unchanged. ValueError for bare tokens, which have no positions.
    """
    if not isinstance(inputs, Mapping):
        raise ValueError(
            "This encoder has a learned vector for each position, so it needs the dict of inputs that `prepare` makes, "
            "with tokens and positions; bare token ids or vectors do not say where they stand."
        )
    positions = inputs["positions"]
    x = embed_tokens(params["embed_tokens"], inputs)
    if config.embedding_size not in (0, x.shape[-1]):
        return x
    x = x + look_up(params["embed_positions"], positions + config.first_position, "positions")
    if "embed_tasks" in params:  # ERNIE's, of which a text has the first unless inputs say another
        x = x + _row_of(params["embed_tasks"], inputs.get("task_types"), x, "task types")
    return embed_types(params, x, inputs, config)


def _row_of(table: Tensor, ids: Tensor | None, x: Tensor, name: str) -> Tensor:
    """The rows of the table for ids [B, S], 0 by default."""
    ids = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device) if ids is None else ids
    return look_up(table, ids, name)


def embed_types(params: Tree, x: Tensor, inputs: Mapping[str, Tensor], config: Any) -> Tensor:
    """x [B, S, E] with the token type embeddings, if the model has them, then normalized and projected, [B, S, D]."""
    if config.type_vocab_size:
        x = x + _row_of(params["embed_types"], inputs.get("token_types"), x, "token types")
    if "valid" in inputs:  # before the norm, through whose backward a NaN in padding would reach its parameters
        x = x.where(inputs["valid"][..., None], 0)
    if "embed_norm" in params:
        x = layer_norm(x, params["embed_norm"], params["embed_norm_bias"], eps=config.layer_norm_eps)
    if projection := params.get("embed_projection"):
        if "rng" in inputs and (rate := config.dropout.embedding):
            x = dropped(x, inputs["rng"], rate, "embed")
        x = linear(x, projection["weight"], projection["bias"])
    return x


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: EncoderConfig, kind: str, ctx: Context
) -> Tensor:
    """One layer, or as many passes of it as the config has: x [B, S, D] -> x."""
    return passes(layer, x, mask, freqs, config, ctx)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (x, q, k, v) -> heads [B, S, N, H]


def passes(
    layer: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Any, ctx: Context, attend: Attend | None = None
) -> Tensor:
    """x after as many passes of a layer as the config has. attend: None: `ctx.attend`."""
    for _ in range(config.repeats):
        x = _pass(layer, x, mask, freqs, config, ctx, attend)
    return x


def _pass(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Any, ctx: Context, attend: Attend | None) -> Tensor:
    """One pass of a layer, whose MLP has a gate if there is one in its parameters."""
    weights, (first, second) = layer["attention"], NORMS[config.norm_first]

    def norm(name: str, x: Tensor, *, before: bool) -> Tensor:
        if before is not config.norm_first:
            return x
        return layer_norm(x, layer[name], layer[f"{name}_bias"], eps=config.layer_norm_eps)

    q, k, v = project_qkv(weights, norm(first, x, before=True), head_dim=config.head_dim)
    rotate = apply_rotary_interleaved if config.rotary_interleaved else apply_rotary
    q, k = rotate(q, freqs), rotate(k, freqs)
    v = rotate(v, freqs) if config.turns_values else v
    scale, bias = config.score_scale, ctx.shared("bias")
    if isinstance(bias, DistanceEmbeddings):
        if rate := ctx.dropout.embedding:
            bias = bias.dropped(ctx.tensors["noise"], rate, ctx.options.layout)
        bias = bias.of_layer(weights, q, k, scale=scale)
    mixed = attend(x, q, k, v) if attend else ctx.attend(q, k, v, mask, scale=scale, bias=bias)
    mixed = ctx.tap("attention", project_out(weights, mixed))
    x = ctx.tap("middle", norm(first, x + mixed, before=False))
    feed, read = gated_mlp if "gate_proj" in layer["mlp"] else plain_mlp, norm(second, x, before=True)
    inner = ctx.tap("mlp", feed(layer["mlp"], read, activation=config.hidden_act, tap=ctx.shown))
    return norm(second, x + inner, before=False)


def unembed(params: Tree, x: Tensor, /, *, config: EncoderConfig) -> Tensor:
    """The head, applied to each token: logits [B, S, V] or [B, S, labels]; without a head x [B, S, D]."""
    return _unembed(params, x, config, config.hidden_act)


def unembed_gelu(params: Tree, x: Tensor, /, *, config: EncoderConfig) -> Tensor:
    """As `unembed`; the activation of a masked-LM head is GELU whatever that of the layers."""
    return _unembed(params, x, config, "gelu")


def _unembed(params: Tree, x: Tensor, config: EncoderConfig, activation: str) -> Tensor:
    x = final_norm(params, x, config)
    if config.head == "none":
        return x
    weights = params["head"]
    if config.head != "masked_lm":
        return linear(x, weights["score"], weights["score_bias"])
    x = ACTIVATIONS[activation](linear(x, weights["dense"], weights["dense_bias"]))
    x = layer_norm(x, weights["norm"], weights["norm_bias"], eps=config.layer_norm_eps)
    return linear(x, decoder.head(params, config), params["lm_head_bias"])


def final_norm(params: Tree, x: Tensor, config: Any) -> Tensor:
    """x [..., D] after the norm behind the last layer, where there is one."""
    return layer_norm(x, params["norm"], params["norm_bias"], eps=config.layer_norm_eps) if "norm" in params else x


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: EncoderConfig) -> Tensor:
    """Logits [N, labels] of each document's first token."""
    return classify_with(torch.tanh, params, final_norm(params, x, config), documents)


def classify_with(activation: Callable[[Tensor], Tensor], params: Tree, x: Tensor, documents: Documents) -> Tensor:
    """score(activation(dense(first token))): logits [N, labels] of hidden states x [B, S, D]."""
    weights = params["head"]
    inner = activation(linear(pool(x, documents, how="first"), weights["dense"], weights["dense_bias"]))
    return linear(inner, weights["score"], weights["score_bias"])


def pooled(params: Tree, x: Tensor, documents: Documents) -> Tensor:
    """The pooler_output of transformers, [N, D]: tanh(dense) of each document's first token, of x [B, S, D]."""
    weights = params["pooler"]
    return torch.tanh(linear(pool(x, documents, how="first"), weights["dense"], weights["dense_bias"]))

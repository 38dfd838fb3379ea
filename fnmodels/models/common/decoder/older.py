"""Common parts of decoders of 2019 to 2022: GPT-2's names of fields, learned positions, layers with LayerNorms."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.values import constants
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.ops import ACTIVATIONS, layer_norm, look_up, plain_mlp, project_out, project_qkv
from fnmodels.ops.attention.alibi import alibi_slopes
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.rotary import Rope, no_rotation
from fnmodels.tree import Tree

from ..config_json import LAYERS_LIMIT, Fields
from ..config_json import renamed as renamed_fields
from ..context import Context
from ..heads import decoder_head_to_hf
from ..spec import Leaf, embedding
from .config import BaseConfig, check_width
from .config_json import expressible

# {GPT-2's name of a field: the name in Config, which for sizes is also read from config.json}
GPT_NAMES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
GPT_NAMES |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
GPT_NAMES |= {"layer_norm_epsilon": "layer_norm_eps", "activation_function": "hidden_act"}
# Heads for other tasks, and n_ctx, an unused duplicate of n_positions: its old default 1024 is also in files of models
# with other lengths.
UNUSED = ("n_ctx", "n_special", "predict_special_tokens")
_WRITTEN = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("max_position_embeddings", "layer_norm_eps", "tie_word_embeddings", "initializer_range"),
)


@dataclass(frozen=True)
class OlderConfig(BaseConfig):
    """Sizes and switches; the heads divide the width. A learned position beyond the last one is an error."""

    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_width(self)


@dataclass(frozen=True)
class PlacedConfig(OlderConfig):
    """Config of a model with positions that are added to the embeddings, and no rope."""

    rope: Rope = field(default=Rope(), init=False, compare=False, repr=False)


def no_freqs(config: BaseConfig, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 [B, S, 0, 2]}: no rotary embedding, since `embed` adds the positions."""
    return dict.fromkeys(sorted(set(config.layer_kinds)), no_rotation(positions))


def alibi_tables(
    config: BaseConfig, positions: Tensor, *, length: int | Tensor | None = None
) -> dict[str, dict[str, Tensor]]:
    """{kind: {"slopes": fp32 [B, S, heads], "positions": fp32 [B, S]}} of linear biases, and a table of no rotation.

    See `fnmodels.ops.attention.alibi`.
    """
    slopes = constants(alibi_slopes(config.num_attention_heads), torch.float32, positions.device)
    table = {"slopes": slopes.expand(*positions.shape, -1), "positions": positions.float()}
    table["table"] = no_rotation(positions)
    return dict.fromkeys(sorted(set(config.layer_kinds)), table)


def older_fields(
    values: Mapping[str, Any],
    model_types: Sequence[str],
    names: Mapping[str, str],
    *,
    positions: int,
    tied: bool,
    activation: str,
    inner: Callable[[int], int] = lambda hidden: 4 * hidden,
) -> tuple[Fields, dict[str, Any]]:
    """(the fields under common names, those of OlderConfig but layer_kinds and extra), from a config.json.

    names: {name in the file: common name}. inner: the width of the MLP where the file has none.
    """
    model_type = Fields(values).choice("model_type", model_types)
    for name in (*(name for name, ours in names.items() if ours == "num_hidden_layers"), "num_hidden_layers"):
        Fields(values).integer(name, 1, high=LAYERS_LIMIT)
    fields = renamed_fields(Fields(values), names)
    for name in ("add_cross_attention", "is_encoder_decoder"):
        fields.expect(name, False)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return fields, {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", inner(hidden)),
        "num_hidden_layers": fields.integer("num_hidden_layers", high=LAYERS_LIMIT),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": fields.integer("max_position_embeddings", positions),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", tied),
        "initializer_range": fields.number("initializer_range", 0.02, above=-1e-9),
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), activation),
        "layer_norm_eps": fields.number("layer_norm_eps", 1e-5),
        "model_type": model_type,
    }


def older_to_hf(config: Any, architecture: str, names: Mapping[str, str], **rest: Any) -> ConfigJson:
    """A config.json under the names of the family's files, and `rest`; a value that `rest` has as None is left out."""
    saved = {name: json.loads(value) for name, value in config.extra}
    theirs = {ours: name for name, ours in names.items()}
    sizes = {theirs.get(name, name): getattr(config, name) for name in _WRITTEN}
    found = saved | decoder_head_to_hf(config, architecture, saved) | {"model_type": config.model_type} | sizes | rest
    return expressible(config, {name: value for name, value in found.items() if value is not None or name in saved})


def position_table(config: BaseConfig, more: int = 0) -> Leaf:
    """The leaf of learned positions, with `more` rows before the first."""
    rows = config.max_position_embeddings + more
    return embedding(rows, config.hidden_size, config.initializer_range, axis="position")


def placed(params: Tree, inputs: Tree | Tensor, x: Tensor, *, first: int = 0) -> Tensor:
    """x [B, S, D] plus learned positions, of which a document's first token reads row `first`."""
    return x + look_up(params["embed_positions"], positions_of(inputs) + first, "positions")


def positions_of(inputs: Tree | Tensor) -> Tensor:
    """The positions [B, S] of inputs; ValueError for bare tokens, which have none."""
    if not isinstance(inputs, dict):
        raise ValueError(
            "This model has a vector for each position, so it needs the dict of inputs that `prepare` makes, "
            "with tokens and positions; bare token ids or vectors do not say where they stand."
        )
    positions: Tensor = inputs["positions"]
    return positions


def embed_placed(params: Tree, inputs: Tree, /, *, config: BaseConfig) -> Tensor:
    """x [B, S, D]: token or given embeddings plus learned positions."""
    return placed(params, inputs, embed_tokens(params["embed_tokens"], inputs))


def post_norm_layer(layer: Tree, x: Tensor, mask: Any, ctx: Context, *, config: Any, scale: float) -> Tensor:
    """One layer with LayerNorms after the sublayers and an MLP without a gate: x [B, S, D] -> x."""
    eps, weights = config.layer_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    mixed = ctx.attend(q, k, v, mask, scale=scale)
    x = x + ctx.tap("attention", project_out(weights, mixed))
    x = layer_norm(x, layer.get("input_layernorm"), layer.get("input_layernorm_bias"), eps=eps)
    x = ctx.tap("middle", x)
    x = x + ctx.tap("mlp", plain_mlp(layer["mlp"], x, activation=config.hidden_act, tap=ctx.tap))
    return layer_norm(x, layer.get("post_attention_layernorm"), layer.get("post_attention_layernorm_bias"), eps=eps)


def layer_norm_layer(
    layer: Tree,
    x: Tensor,
    mask: Any,
    ctx: Context,
    *,
    config: Any,
    scale: float,
    rotate: Callable[[Tensor], Tensor] | None = None,
    alibi: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """One pre-norm layer with LayerNorms and an MLP without a gate: x [B, S, D] -> x.

    rotate: of queries and keys. alibi: see `Context.attend`.
    """
    eps, weights = config.layer_norm_eps, layer["attention"]
    normed = layer_norm(x, layer.get("input_layernorm"), layer.get("input_layernorm_bias"), eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = (q, k) if rotate is None else (rotate(q), rotate(k))
    mixed = ctx.attend(q, k, v, mask, scale=scale, alibi=alibi)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, layer.get("post_attention_layernorm"), layer.get("post_attention_layernorm_bias"), eps=eps)
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))

"""Inputs of the layers of Gemma 3n and 4 beside the residual stream: an embedding of the token for each layer.

It is gated by a projection of the residual stream, projected to its width, normalized and added to it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops import ACTIVATIONS, look_up
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm_fp32_weight
from fnmodels.tree import Tree

from ..context import Context
from ..spec import Leaf, embedding, norm, weight


def table_leaves(config: Any) -> dict[str, Leaf]:
    """The embeddings for all layers, and the projection and norm of what the residual stream adds to them."""
    P, std = config.hidden_size_per_layer_input, config.initializer_range
    width = P * config.num_hidden_layers
    table = embedding(config.vocab_size_per_layer_input, width, std)
    return {
        "embed_tokens_per_layer": replace(table, axes=("per_layer_vocab", "per_layer")),
        "per_layer_model_projection": weight((width, config.hidden_size), ("per_layer", "embed"), std),
        "per_layer_projection_norm": norm(P, "per_layer"),
    }


def gate_leaves(config: Any) -> dict[str, Leaf]:
    """The parameters of a layer: the gate, the projection and the norm."""
    D, P, std = config.hidden_size, config.hidden_size_per_layer_input, config.initializer_range
    return {
        "per_layer_input_gate": weight((P, D), ("per_layer", "embed"), std),
        "per_layer_projection": weight((D, P), ("embed", "per_layer"), std),
        "post_per_layer_input_norm": norm(D, "embed"),
    }


def layer_inputs(params: Tree, inputs: Tree, x: Tensor, /, *, config: Any) -> Tensor:
    """Inputs of each layer beside the residual stream, [B, S, layers, P]: the tokens' embeddings, and x projected.

    Ids beyond the table, of sounds and images, read its first row. Inputs that are embeddings need "token_ids" [B, S]
    beside them; ValueError without.
    """
    given = inputs if isinstance(inputs, Mapping) else {"tokens": inputs}
    ids = given.get("token_ids") if given["tokens"].is_floating_point() else given["tokens"]
    if ids is None:
        raise ValueError('Each layer of this model embeds token ids: add "token_ids" [B, S] to inputs of embeddings.')
    P, rows = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
    ids = ids.where(ids < rows, 0) if rows < config.vocab_size else ids
    tokens = look_up(params["embed_tokens_per_layer"], ids, "token ids").unflatten(-1, (-1, P))
    context = linear(x, params["per_layer_model_projection"]).unflatten(-1, (-1, P)) * config.hidden_size**-0.5
    context = rms_norm_fp32_weight(context, params["per_layer_projection_norm"], eps=config.rms_norm_eps)
    return (context + tokens * torch.tensor(P**0.5, dtype=tokens.dtype)) * 2**-0.5


def of_layer(layer: Tree, x: Tensor, config: Any, ctx: Context) -> Tensor:
    """The tap "per_layer" [B, S, D], which a layer adds to the residual stream: of x [B, S, D] and its own input."""
    gate = elementwise(ACTIVATIONS[config.hidden_act], linear(x, layer["per_layer_input_gate"]))
    added = linear(gate * ctx.layer_input(), layer["per_layer_projection"])
    normed = rms_norm_fp32_weight(added, layer["post_per_layer_input_norm"], eps=config.rms_norm_eps)
    return ctx.tap("per_layer", normed)

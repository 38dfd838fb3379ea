"""The embedding before the layers, and the final norm and output head after them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.documents import Documents, pool
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import layer_norm, rms_norm, rms_norm_fp32_weight, rms_norm_zero_centered
from fnmodels.tree import Tree

from ..family import DecoderConfig, LayerNormConfig, RMSNormConfig, UsualConfig, field_of
from ..heads import DECODER_HEADS
from ..registry import family_of


def embed(params: Tree, inputs: Tree, /, *, config: UsualConfig) -> Tensor:
    """Token embeddings [B, S, D]; inputs that are embeddings already are returned unchanged, as in transformers."""
    return embed_tokens(params["embed_tokens"], inputs)


def embed_by_width(params: Tree, inputs: Tree, /, *, config: UsualConfig) -> Tensor:
    """x [B, S, D]: token embeddings scaled by sqrt(D) rounded to their dtype; given embeddings are not scaled."""
    tokens = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    x = embed_tokens(params["embed_tokens"], tokens)
    return x if tokens.is_floating_point() else x * torch.tensor(config.hidden_size**0.5, dtype=x.dtype)


def ngram_inputs(inputs: Any) -> tuple[Tensor, Tensor]:
    """(ids [B, S], those before each in its document [B, S, n - 1]) of the inputs of a model that embeds n-grams.

    ValueError where they are not there.
    """
    given: Mapping[str, Tensor] = inputs if isinstance(inputs, Mapping) else {"tokens": inputs}
    tokens = given["token_ids"] if "token_ids" in given else given["tokens"]
    if "preceding" not in given or tokens.is_floating_point():
        raise ValueError(
            "This model embeds n-grams of tokens: pass the inputs of fnmodels.prepare, which hold the tokens before "
            'each one in its document, "preceding", and beside vectors their ids, "token_ids".'
        )
    return tokens.long(), given["preceding"]


def without_padding(x: Tensor, inputs: Any) -> Tensor:
    """x [B, S, D] with zeros for padding, if `inputs` say where it is: for a norm of embeddings.

    A NaN in padding would reach the norm's parameters through its backward.
    """
    if not isinstance(inputs, Mapping) or "valid" not in inputs:
        return x
    return torch.where(inputs["valid"][..., None], x, torch.zeros((), dtype=x.dtype, device=x.device))


def head(params: Tree, config: DecoderConfig) -> Tensor:
    """The output head's weight: [V, D], the embedding's if tied, or [labels, D] of a head with labels."""
    if field_of(config, "head") in DECODER_HEADS:
        weight: Tensor = params["score"]
        return weight
    return token_head(params, config)


def token_head(params: Tree, config: Any) -> Tensor:
    """The weight of a head for tokens [V, D]: the embedding's if tied."""
    weight: Tensor = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return weight


def project(params: Tree, normed: Tensor, config: Any) -> Tensor:
    """The output head of hidden states [B, S, D] after the final norm: [B, S, V or labels], or they without a head."""
    kind = field_of(config, "head")
    if kind == "none":
        return normed
    bias = params.get("lm_head_bias") if kind == "lm" else None
    return linear(normed, params["score"] if kind in DECODER_HEADS else token_head(params, config), bias)


def is_lm(config: Any) -> bool:
    """Whether the head gives logits of tokens, so that biases, factors and soft-caps of those apply."""
    return bool(field_of(config, "head") == "lm")


def scores(params: Tree, x: Tensor, /, *, config: Any) -> Tensor:
    """Logits [B, S, labels] of every token, after the final norm. x [B, S, D]: the hidden states."""
    found = family_of(config).unembed(params, x, config=config)
    return found + params["score_bias"] if "score_bias" in params else found


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Any) -> Tensor:
    """Logits [N, labels] of each document's last token, after the final norm. x [B, S, D]: the hidden states."""
    last = pool(x, documents, how="last")[:, None]
    return family_of(config).unembed(params, last, config=config)[:, 0]


def unembed(params: Tree, x: Tensor, /, *, config: RMSNormConfig) -> Tensor:
    """Final RMSNorm and head: logits [B, S, V]."""
    return project(params, rms_norm(x, params["norm"], eps=config.rms_norm_eps), config)


def unembed_fp32_weight(params: Tree, x: Tensor, /, *, config: RMSNormConfig) -> Tensor:
    """Final RMSNorm with its weight multiplied in fp32, and head: logits [B, S, V]."""
    return project(params, rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps), config)


def unembed_layer_norm(params: Tree, x: Tensor, /, *, config: LayerNormConfig) -> Tensor:
    """Final LayerNorm and head: logits [B, S, V]."""
    normed = layer_norm(x, params["norm"], params.get("norm_bias"), eps=config.layer_norm_eps)
    return project(params, normed, config)


def unembed_zero_centered(params: Tree, x: Tensor, /, *, config: Any) -> Tensor:
    """Final RMSNorm that multiplies by 1 + weight, head, and the config's `final_softcap`, if any: logits [B, S, V]."""
    logits = project(params, rms_norm_zero_centered(x, params["norm"], eps=config.rms_norm_eps), config)
    cap = getattr(config, "final_softcap", None)
    return cap * elementwise(torch.tanh, logits / cap) if cap is not None and is_lm(config) else logits

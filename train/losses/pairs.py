"""The loss of a model of an encoder and a decoder: each token of a target, given its source and the tokens before."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

import fnmodels
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree
from train.batch import check_entries

from .cross_entropy import check_labels, check_targets, cross_entropy
from .lm_head import head_name

_SOURCE = ("tokens", "positions", "segment_ids")
_TARGET = ("decoder_tokens", "decoder_positions", "decoder_segment_ids")


def pair_loss(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor]:
    """The cross entropy of the decoder's labels of an encoder-decoder, over packed pairs.

    Args:
        params: The parameters of both stacks.
        batch: tokens, positions and segment_ids [B, K] of the encoder; decoder_tokens, which are labels shifted by one,
            decoder_positions, decoder_segment_ids and labels [B, S], -100 ignored. `fnmodels.pair_batch` makes it. rng
            [B, K] and decoder_rng [B, S], the keys of dropout, are optional: `fnmodels.inputs.noise_keys` of two
            seeds.
        config: The model's config.
        label_smoothing: The share of the target that is spread uniformly over the vocabulary.
        z_loss: The coefficient of log(sum(exp(logits)))^2.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The sum of the labels' cross entropies in nats, and the number of labels that count.

    Raises:
        ValueError: An entry is missing, the model has a single stack, or it has no head.
    """
    check_entries(batch, *_SOURCE, *_TARGET, "labels")
    head_name(config)  # refuses a model without one
    check_labels(batch["labels"], batch["decoder_tokens"].shape, "decoder_tokens")
    check_targets(batch["labels"], config.vocab_size)
    given = {name: batch[name] for name in (*_SOURCE[1:], *_TARGET[1:])}
    given |= {name: batch[name] for name in ("rng", "decoder_rng") if name in batch}
    prepared = fnmodels.prepare_pair(config, batch["tokens"], batch["decoder_tokens"], **given)
    logits = fnmodels.forward(params, *prepared, config=config, **options)
    return cross_entropy(logits, batch["labels"], label_smoothing=label_smoothing, z_loss=z_loss)

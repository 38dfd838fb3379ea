"""The loss of a model of an encoder and a decoder: each token of a target, given its source and the tokens before."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

import fnmodels
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree
from train.batch import check_entries

from .cross_entropy import check_labels, check_targets, cross_entropy

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
    """(sum of the labels' cross entropies, count of labels that count) of packed pairs, see `fnmodels.pair_batch`.

    batch: tokens, positions, segment_ids [B, K]; decoder_tokens, which are labels one later, decoder_positions,
    decoder_segment_ids and labels [B, S], -100 ignored. options: see `fnmodels.forward`. ValueError for a missing entry
    and for a model of one stack.
    """
    check_entries(batch, *_SOURCE, *_TARGET, "labels")
    check_labels(batch["labels"], batch["decoder_tokens"].shape, "decoder_tokens")
    check_targets(batch["labels"], config.vocab_size)
    given = {name: batch[name] for name in (*_SOURCE[1:], *_TARGET[1:])}
    prepared = fnmodels.prepare_pair(config, batch["tokens"], batch["decoder_tokens"], **given)
    logits = fnmodels.forward(params, *prepared, config=config, **options)
    return cross_entropy(logits, batch["labels"], label_smoothing=label_smoothing, z_loss=z_loss)

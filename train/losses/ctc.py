"""Connectionist temporal classification (CTC, Graves et al. 2006): what clips say, without saying when."""

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels.inputs.packing import IGNORE
from fnmodels.ops.dtypes import upcast
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree
from train.batch import Entries, check_entries

from .batch_checks import checked_by
from .cross_entropy import check_targets

PER = ("clip", "label")


def _check(batch: Entries, config: Any, options: Any) -> None:
    check_entries(batch, "tokens", "positions", "segment_ids", "labels")
    _check_labels(batch["labels"], batch["segment_ids"], config)


@checked_by(_check)
def ctc_loss(
    params: Tree,
    batch: Entries,
    *,
    config: Any,
    per: str = "clip",
    zero_infinity: bool = False,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor]:
    """The loss of an encoder of sound with the head "lm", such as wav2vec 2.0, on clips packed in rows.

    Args:
        params: The parameters.
        batch: tokens, positions and segment_ids of `fnmodels.inputs.wave_rows`, and labels [B, C, L]: what the clip of
            segment c + 1 of each row says, then -100.
        config: The model's Config; its `blank` stands between characters.
        per: What is averaged: "clip", the negative log-likelihood of a clip; "label", that divided by its labels
            (`ctc_loss_reduction` "mean" of transformers).
        zero_infinity: Whether a clip with more labels than its tokens can say has the loss 0, and not infinity.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        (sum of the clips' losses in nats, fp32 at least; count of clips). torch's loss, which is under it, has neither
        `torch.func.vmap` nor forward derivatives.

    Raises:
        ValueError: For a batch without an entry, labels of another shape or outside of the vocabulary, another `per`,
            and a model without this head.
    """
    if per not in PER:
        raise ValueError(f"per is {per!r}; it must be one of {', '.join(PER)}.")
    if config.head != "lm":
        raise ValueError(f'ctc_loss needs a model with the head "lm"; this one has the head {config.head!r}.')
    _check(batch, config, options)
    places = {name: batch[name] for name in ("positions", "segment_ids")}
    prepared = fnmodels.prepare(config, batch["tokens"], **places)
    logits = fnmodels.forward(params, *prepared, config=config, **options)
    clips, lengths = _by_clip(upcast(logits).log_softmax(-1), batch["segment_ids"], batch["labels"].shape[1])
    labels, has = batch["labels"].flatten(0, 1), lengths > 0
    counts = (labels != IGNORE).sum(-1).where(has, 0)
    losses = F.ctc_loss(
        clips.transpose(0, 1),
        labels.clamp(min=0),
        lengths.clamp(min=1),
        counts,
        blank=config.blank,
        reduction="none",
        zero_infinity=zero_infinity,
    )
    losses = losses / counts.clamp(min=1) if per == "label" else losses
    return losses.where(has, 0).sum(), has.sum()


def ctc_greedy(logits: Tensor, segment_ids: Tensor, *, blank: int = 0) -> list[list[int]]:
    """The labels of each clip by its most likely path: runs of one label are one, and blanks go.

    Args:
        logits: [B, S, V], of clips in the order of their tokens.
        segment_ids: [B, S], 0 at padding.
        blank: The label between characters, `config.blank`.

    Returns:
        A list for each clip, in the order of `fnmodels.documents(segment_ids)`.
    """
    best, found = logits.argmax(-1), fnmodels.documents(segment_ids)
    paths = [best[found.number == i].unique_consecutive() for i in range(len(found))]
    return [path[path != blank].tolist() for path in paths]


def _by_clip(values: Tensor, segment_ids: Tensor, clips: int) -> tuple[Tensor, Tensor]:
    """(values [B C, S, V] of values [B, S, V] by clip, its tokens first; the number of its tokens, [B C])."""
    numbers = torch.arange(1, clips + 1, device=segment_ids.device)
    owned = segment_ids[:, None] == numbers[:, None]  # [B, C, S]
    order = owned.int().argsort(dim=-1, descending=True, stable=True)[..., None].expand(-1, -1, -1, values.shape[-1])
    return values[:, None].expand(-1, clips, -1, -1).gather(2, order).flatten(0, 1), owned.sum(-1).flatten()


def _check_labels(labels: Tensor, segment_ids: Tensor, config: Any) -> None:
    """ValueError for labels that are not [B, C, L], or not of the vocabulary, or fewer than the clips of a row."""
    if labels.ndim != 3 or len(labels) != len(segment_ids) or labels.is_floating_point():
        raise ValueError(
            f"labels must be integers [B, C, L], of {len(segment_ids)} rows, for the C clips of each row; they are "
            f"{labels.dtype} {list(labels.shape)}."
        )
    check_targets(labels, config.vocab_size)
    if segment_ids.device.type == "cpu" and segment_ids.numel() and int(segment_ids.max()) > labels.shape[1]:
        raise ValueError(
            f"A row holds {int(segment_ids.max())} clips, and labels {list(labels.shape)} are for {labels.shape[1]}."
        )

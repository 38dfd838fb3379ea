"""`Segments`: what layers read that depend on the order of tokens (recurrent layers, convolutions)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels import tree

from .segments import integers, previous
from .values import at_hand


@tree.pytree
@dataclass(frozen=True)
class Segments:
    """The segment id of each token, in the place of a mask for layers that read the sequence in its order.

    A permuted batch would compute another function: `fnmodels.permute` refuses it.

    Args:
        segment_ids: int64 [B or 1, S]; 0 or less is padding.
    """

    segment_ids: Tensor


def build_segments(segment_ids: Tensor, positions: Tensor) -> Segments:
    """The `Segments` of a batch, segment_ids and positions [B, S].

    ValueError for tensors that are not integers, and for tokens that are not in the order of their positions, where
    values are at hand.
    """
    made = Segments(integers("segment_ids", segment_ids))
    check_ascending(positions, made.segment_ids)
    return made


def check_ascending(positions: Tensor, segment_ids: Tensor) -> None:
    """ValueError with the first token of a document, [B, S], whose position is below that of the token before it.

    Nothing reads the positions otherwise, and the batch would be taken for another text. Values are read where that
    waits for no device: not on GPUs, under vmap or in graphs.
    """
    given, ids = at_hand(positions), at_hand(segment_ids)
    if given is None or ids is None or given.shape[-1] < 2 or bool((given[:, 1:] >= given[:, :-1]).all()):
        return
    given, ids = torch.broadcast_tensors(given, ids)
    valid = ids > 0
    back = valid & (ids == previous(ids, valid, first=0)) & (given < previous(given, valid, first=0))
    for row, place in back.nonzero()[:1].tolist():
        raise ValueError(
            f"Row {row} has position {int(given[row, place])} at token {place}, below that of the token before it in "
            f"document {int(ids[row, place])}, and layers of this model (recurrent ones, convolutions) read tokens in "
            "the order of the row: give each document's tokens in the order of their positions."
        )


def runs(segment_ids: Tensor, last: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(run, before), int64 [B, S]: the number of each token's document in its row, and that of the token before it.

    Documents count from 1; 0 is the one that goes on from before the row, whose segment id is `last` [B] (0 or less:
    none). A document is a run of one segment id; padding inside it and after it belongs to its run.
    """
    valid = segment_ids > 0
    first = 0 if last is None else last[:, None].clamp(min=0)
    begins = valid & (segment_ids != previous(segment_ids, valid, first=first))
    run = begins.cumsum(-1)
    return run, run - begins.long()


def last_segment(segment_ids: Tensor, before: Tensor | None = None) -> Tensor:
    """int64 [B]: the segment id of each row's last token that is no padding, or `before` [B], or 0."""
    valid = segment_ids > 0
    none = segment_ids.new_zeros(segment_ids.shape[0]) if before is None else before.expand(segment_ids.shape[0])
    if not segment_ids.shape[1]:
        return none
    if segment_ids.shape[1] == 1:
        return segment_ids[:, 0].where(valid[:, 0], none)
    index = (valid.long().cumsum(-1) * valid).argmax(-1, keepdim=True)  # the first of the highest counts
    return segment_ids.gather(-1, index)[:, 0].where(valid.any(-1), none)

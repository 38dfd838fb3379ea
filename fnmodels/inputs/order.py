"""`Segments`: what layers read that depend on the order of tokens (recurrent layers, convolutions)."""

from dataclasses import dataclass

from torch import Tensor

from fnmodels import tree

from .segments import integers, previous


@tree.pytree
@dataclass(frozen=True)
class Segments:
    """The segment id of each token, in the place of a mask for layers that read the sequence in its order.

    A permuted batch would compute another function: `fnmodels.permute` refuses it.

    Args:
        segment_ids: int64 [B or 1, S]; 0 or less is padding.
    """

    segment_ids: Tensor


def build_segments(segment_ids: Tensor) -> Segments:
    """The `Segments` of a batch; ValueError for tensors that are not integers."""
    return Segments(integers("segment_ids", segment_ids))


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

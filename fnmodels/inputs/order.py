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

    ValueError for tensors that are not integers, and for tokens in another order than that of their documents, where
    values are at hand.
    """
    made = Segments(integers("segment_ids", segment_ids))
    check_order(positions, made.segment_ids)
    return made


def check_order(positions: Tensor, segment_ids: Tensor) -> None:
    """ValueError for a document, [B, S], whose tokens are not next to each other in the order of their positions.

    Layers that read rows in their order would take them for another text, or for two. Values are read where that waits
    for no device: not on GPUs, under vmap or in graphs.
    """
    given, ids = at_hand(positions), at_hand(segment_ids)
    if given is None or ids is None or given.shape[-1] < 2:
        return
    given, ids = torch.broadcast_tensors(given, ids)
    valid = ids > 0
    if not bool(((ids == ids.cummax(-1).values) | ~valid).all()):  # not in the usual order, of documents by number
        begins = valid & (ids != previous(ids, valid, first=0))
        for row, place in begins.nonzero().tolist():
            if bool((ids[row, :place] == ids[row, place]).any()):
                raise ValueError(
                    f"Row {row} goes on with document {int(ids[row, place])} at token {place}, behind another one, and "
                    f"{_ORDERED}: keep the tokens of a document together."
                )
    if bool((given[:, 1:] >= given[:, :-1]).all()):
        return
    back = valid & (ids == previous(ids, valid, first=0)) & (given < previous(given, valid, first=0))
    for row, place in back.nonzero()[:1].tolist():
        raise ValueError(
            f"Row {row} has position {int(given[row, place])} at token {place}, below that of the token before it in "
            f"document {int(ids[row, place])}, and {_ORDERED}: give them in the order of their positions."
        )


def check_own_positions(positions: Tensor, segment_ids: Tensor) -> None:
    """ValueError for two tokens of a document, [B, S], at one position, where it names a token.

    Values are read where that waits for no device, as in `check_order`.
    """
    given, ids = at_hand(positions), at_hand(segment_ids)
    if given is None or ids is None or given.shape[-1] < 2:
        return
    given, ids = torch.broadcast_tensors(given, ids)
    order = given.argsort(dim=-1, stable=True)
    order = order.gather(-1, ids.gather(-1, order).argsort(dim=-1, stable=True))  # by document, then by position
    place, document = given.gather(-1, order), ids.gather(-1, order)
    same = (place[:, 1:] == place[:, :-1]) & (document[:, 1:] == document[:, :-1]) & (document[:, 1:] > 0)
    for row, at in same.nonzero()[:1].tolist():
        first, second = order[row, at : at + 2].tolist()
        raise ValueError(
            f"Row {row} has position {int(place[row, at])} twice in document {int(document[row, at])}, at tokens "
            f"{first} and {second}, and layers of this model know a token of a document by its position (windows of "
            "tokens): give each token a position of its own."
        )


_ORDERED = "layers of this model (recurrent ones, convolutions) read tokens in the order of the row"


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

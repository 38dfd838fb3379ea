"""The last document of each row, which is the only one that can go on where layers keep a state of what came before."""

import torch
from torch import Tensor

from fnmodels.inputs.order import last_segment
from fnmodels.inputs.segments import previous

from .value import Cache, Slots

_STATES = {"segment", "window_segments"}  # entries of recurrent layers and convolutions, and of open windows


def last_documents(cache: Cache, held: Slots | None) -> Tensor | None:
    """int64 [B]: the last document of each row, 0 for an empty row; None for a cache whose layers keep no state.

    held: the slots that hold the most of each row; None: the cache has none.
    """
    entry = next((entry for entry in cache.layers if _STATES & entry.keys()), None)
    if entry is None:
        return None
    if "segment" in entry:
        return entry["segment"]
    assert held is not None  # open windows stand beside slots
    return held.segments.amax(dim=1) if held.ring else last_segment(held.segments)  # in the order of their arrival


def check_order(last: Tensor, held: Slots | None, segment_ids: Tensor) -> None:
    """ValueError that names the first row where a document goes on behind a later one.

    last: of `last_documents`. held: as there. Without slots the last document alone is known: one with a lower id is
    taken for one that goes on. segment_ids: [B, S], of the new tokens.
    """
    valid = segment_ids > 0
    begins = valid & (segment_ids != previous(segment_ids, valid, first=last[:, None]))
    for row, place in begins.nonzero().tolist():
        document = segment_ids[row, place]
        new = segment_ids[row, :place]
        earlier = new if held is None else torch.cat((held.segments[row], new))
        if bool((earlier == document).any()) or (held is None and bool(document < last[row])):
            raise ValueError(
                f"Row {row} goes on with document {int(document)} behind another one, and layers of this model "
                "(recurrent ones, convolutions, windows) keep a state of the last document alone: give each document a "
                "row of its own."
            )

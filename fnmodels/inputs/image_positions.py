"""Positions [B, S, 3] of text with images (Qwen2-VL, arXiv 2409.12191): time, height and width.

The tokens of a text count up on all three axes. An image of h x w tokens that begins at p has the time p, heights from
p to p + h - 1 and widths from p to p + w - 1, and the text after it goes on at p + max(h, w).
"""

import torch
from torch import Tensor


def image_positions(is_image: Tensor, segment_ids: Tensor, grids: Tensor, intervals: Tensor | None = None) -> Tensor:
    """int64 [B, S, 3]; each document begins at 0, and padding (segment 0) is at 0.

    is_image: bool [B, S], the tokens that stand for features. segment_ids: [B, S]. grids: [images, 3], the frames, rows
    and columns of each image's or video's features in the order of their tokens, counted row by row of the batch;
    each is a run of frames * rows * columns tokens. intervals: [images], the time between two frames, 1 by default,
    such as a video's tokens per second times its seconds per frame; times are rounded down.
    The causal order follows from times; where frames of a long interval are later than the text after them, it is to be
    given: `prepare` takes torch.cat((positions_from_segments(segment_ids)[..., None], positions), -1).
    Reads values: not for use in transforms. ValueError for grids that are not those of the tokens.
    """
    found = (is_image & (segment_ids > 0)).nonzero()
    sizes = _sizes(grids, len(found))
    advance = ((segment_ids > 0) & ~is_image).long()
    inside = torch.zeros(*segment_ids.shape, 3, dtype=torch.int64, device=segment_ids.device)
    begin = 0
    for i, size in enumerate(sizes):
        row, column = found[begin : begin + size].unbind(-1)
        here = segment_ids[row[0], column[0]]
        whole = torch.arange(size, device=column.device) + column[0]
        if (row != row[0]).any() or not torch.equal(column, whole) or (segment_ids[row, column] != here).any():
            raise ValueError(f"Image {i} has {size} tokens by its grid {grids[i].tolist()}, but not in one run.")
        cell = torch.cartesian_prod(*(torch.arange(int(n), device=column.device) for n in grids[i]))
        if intervals is not None:
            cell[:, 0] = (cell[:, 0] * intervals[i]).long()
        inside[row, column] = cell
        advance[row[-1], column[-1]] = grids[i, 1:].max()
        begin += size
    return _starts(advance, segment_ids)[..., None] * (segment_ids > 0)[..., None] + inside


def _sizes(grids: Tensor, tokens: int) -> list[int]:
    """The number of tokens of each image."""
    if not isinstance(grids, Tensor) or grids.ndim != 2 or grids.shape[-1] != 3 or grids.is_floating_point():
        shown = f"{grids.dtype} {list(grids.shape)}" if isinstance(grids, Tensor) else f"a {type(grids).__name__}"
        raise ValueError(f"grids are (frames, rows, columns), integers [images, 3], not {shown}.")
    sizes: list[int] = grids.prod(-1).tolist()
    if sum(sizes) != tokens or (grids < 1).any():
        raise ValueError(
            f"The images have {sum(sizes)} tokens by their grids {grids.tolist()}, but the text has {tokens} for them."
        )
    return sizes


def _starts(advance: Tensor, segment_ids: Tensor) -> Tensor:
    """[B, S]: how far the document has advanced before each token. advance [B, S]: what each token adds."""
    before = advance.cumsum(-1) - advance
    first = torch.ones_like(segment_ids, dtype=torch.bool)
    first[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    at = torch.where(first, torch.arange(segment_ids.shape[1], device=segment_ids.device), 0).cummax(-1).values
    return before - before.gather(-1, at)

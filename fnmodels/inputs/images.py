"""Images as rows of patches: resizing, cropping, normalization, and `patch_rows`, which packs several images in a row.

image = normalized(resize(pixels, (224, 224)), mean, std)
patches, positions, segment_ids = patch_rows([image], config)
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import places_in_rows


class PatchConfig(Protocol):
    """The fields of a tower's Config that say what its patches are."""

    @property
    def patch_size(self) -> int: ...
    @property
    def num_channels(self) -> int: ...
    @property
    def special_tokens(self) -> int: ...
    @property
    def channels_last(self) -> bool: ...


def resize(image: Tensor, size: tuple[int, int], *, how: str = "bicubic") -> Tensor:
    """An image [C, H, W] at (height, width) with antialiasing, in its dtype; uint8 is rounded, as by torchvision.

    how: "bicubic" or "bilinear".
    """
    if image.ndim != 3:
        raise ValueError(f"An image is [C, H, W], not {list(image.shape)}.")
    if tuple(image.shape[1:]) == size:
        return image
    return F.interpolate(image[None], size, mode=how, antialias=True, align_corners=False)[0]


def shortest_edge(image: Tensor, edge: int) -> tuple[int, int]:
    """(height, width) at which the shorter side of an image [C, H, W] is `edge`; the longer is rounded down."""
    height, width = image.shape[-2:]
    long = int(edge * max(height, width) / min(height, width))
    return (edge, long) if height <= width else (long, edge)


def center_crop(image: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle (height, width) of an image [C, H, W], which is padded with 0 where it is smaller."""
    for axis, side in ((1, size[0]), (2, size[1])):
        missing = max(side - image.shape[axis], 0)
        pad = [0, 0, 0, 0]
        at = 2 * (2 - axis)
        pad[at], pad[at + 1] = missing // 2, missing - missing // 2
        image = F.pad(image, pad) if missing else image
        image = image.narrow(axis, (image.shape[axis] - side) // 2, side)
    return image


def normalized(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(image / 255 - mean) / std per channel of an image [C, H, W], in fp32, by scaling mean and std."""
    if len(mean) != image.shape[0] or len(std) != image.shape[0]:
        raise ValueError(f"mean {list(mean)} and std {list(std)} must have {image.shape[0]} values, one per channel.")
    of_channels = [torch.tensor(v, dtype=torch.float32, device=image.device)[:, None, None] for v in (mean, std)]
    middle, width = (value / (1 / 255) for value in of_channels)
    return (image.float() - middle) / width


def patches_of(image: Tensor, patch: int, *, channels_last: bool = False) -> Tensor:
    """[rows, columns, C p p] of an image [C, H, W], each patch [C, p, p] flattened, or [p, p, C] with channels_last.

    ValueError unless height and width are multiples of `patch`.
    """
    return _cells(image, patch, channels_last=channels_last).flatten(2)


def _cells(image: Tensor, patch: int, *, channels_last: bool) -> Tensor:
    """A view [rows, columns, C, p, p] of an image, or [rows, columns, p, p, C] with channels_last."""
    if image.ndim != 3 or image.shape[1] % patch or image.shape[2] % patch:
        raise ValueError(f"An image must be [C, H, W] with H and W multiples of {patch}, not {list(image.shape)}.")
    cells = image.unflatten(1, (-1, patch)).unflatten(3, (-1, patch))  # [C, rows, p, columns, p]
    return cells.permute((1, 3, 2, 4, 0) if channels_last else (1, 3, 0, 2, 4))


def patch_rows(
    images: Sequence[Tensor], config: PatchConfig, *, length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packs images into rows of patches for `fnmodels.prepare`.

    Each image is its special tokens, then its patches row by row. The k-th of n special tokens is at row and column k -
    n and has zeros for pixels, which are not read.

    Args:
        images: Floats [C, H, W] of each image, normalized as the model reads them.
        config: The config of the vision tower, which has the size p of patches.
        length: Tokens in a row, into which images are packed in their order; None: each image has a row to itself.
            Either way image i is document i of `fnmodels.documents(segment_ids)`.

    Returns:
        (patches [B, S, C p p], positions [B, S, 4], segment_ids [B, S]). A position is (row, column, rows, columns);
        rows are padded at the end, with segment 0.

    Raises:
        ValueError: An image does not fit in a row, or there are no images.
    """
    special, cells = config.special_tokens, [_checked_cells(image, config) for image in images]
    if not cells:
        raise ValueError("patch_rows needs at least one image.")
    places, shape = places_in_rows([special + len(grid) * grid.shape[1] for grid in cells], length, "Image")
    width = cells[0].shape[2:].numel()
    patches = cells[0].new_empty(*shape, width)  # each image is copied once, right here
    segment_ids = torch.zeros(shape, dtype=torch.long, device=patches.device)
    positions = segment_ids.new_zeros(*shape, 4)
    for grid, (row, here, number) in zip(cells, places, strict=True):
        patches[row, here][:special] = 0
        patches[row, here][special:].unflatten(0, grid.shape[:2]).unflatten(2, grid.shape[2:]).copy_(grid)
        positions[row, here] = _positions(grid, special)
        segment_ids[row, here] = number
    patches[segment_ids == 0] = 0
    return patches, positions, segment_ids


def _checked_cells(image: Tensor, config: PatchConfig) -> Tensor:
    if image.shape[0] != config.num_channels or not image.is_floating_point():
        raise ValueError(
            f"An image must be floats [{config.num_channels}, H, W], not {image.dtype} {list(image.shape)}: see "
            "fnmodels.inputs.images.normalized."
        )
    return _cells(image, config.patch_size, channels_last=config.channels_last)


def _positions(cells: Tensor, special: int) -> Tensor:
    """[T, 4] of an image's special tokens and its patches [rows, columns, ...]."""
    place = torch.cartesian_prod(*(torch.arange(n, device=cells.device) for n in cells.shape[:2]))
    before = torch.arange(-special, 0, device=cells.device)[:, None].expand(special, 2)
    where = torch.cat((before, place))
    return torch.cat((where, torch.tensor(cells.shape[:2], device=cells.device).expand_as(where)), -1)

"""The sizes to which vision-language models resize images (`fnmodels.inputs.images.resize`), and Gemma 3's crops."""

import math

from torch import Tensor


def fit_area(image: Tensor, factor: int, least: int, most: int) -> tuple[int, int]:
    """(height, width), multiples of `factor`, of about the aspect of an image [C, H, W]: Qwen's `smart_resize`.

    factor: the pixels of a side of a cell, patch_size * merge. least, most: the bounds of height * width, pixels;
    by default of Qwen's files 3136 and 1003520 up to Qwen2.5-VL, 65536 and 16777216 in Qwen3-VL. ValueError for an
    image more than 200 times as long as wide.
    """
    size = _sides(image)
    if max(size) / min(size) > 200:
        raise ValueError(f"An image of {size[0]} x {size[1]} pixels is more than 200 times as long as wide.")
    found = [round(side / factor) * factor for side in size]
    if math.prod(found) > most:
        shrink = math.sqrt(math.prod(size) / most)
        found = [max(factor, math.floor(side / shrink / factor) * factor) for side in size]
    elif math.prod(found) < least:
        grow = math.sqrt(least / math.prod(size))
        found = [math.ceil(side * grow / factor) * factor for side in size]
    return found[0], found[1]


def fit_edge(image: Tensor, factor: int, edge: int) -> tuple[int, int]:
    """(height, width), multiples of `factor`, with no side of an image [C, H, W] longer than `edge`: Pixtral's.

    factor: the pixels of a side of a cell, patch_size * merge. Smaller images are only rounded up.
    """
    size = _sides(image)
    ratio = max(side / edge for side in size)
    if ratio > 1:
        size = tuple(math.floor(side / ratio) for side in size)
    height, width = (((side - 1) // factor + 1) * factor for side in size)
    return height, width


def pan_and_scan(image: Tensor, *, least: int = 256, most: int = 4, ratio: float = 1.2) -> list[Tensor]:
    """The crops [C, h, w] along the longer side of an image [C, H, W], which Gemma 3 reads after the whole image.

    least: the pixels of a crop's side; most: how many there are; ratio: the longer side by the shorter one, below which
    there are none. Each crop, as the image, is then resized to the tower's square.
    """
    height, width = _sides(image)
    axis, long, short = (2, width, height) if width >= height else (1, height, width)
    if long / short < ratio:
        return []
    count = min(most, max(2, min(math.floor(long / least), math.floor(long / short + 0.5))))
    length = math.ceil(long / count)
    return [] if min(length, short) < least else list(image.split(length, dim=axis))


def _sides(image: Tensor) -> tuple[int, ...]:
    if image.ndim != 3 or not image.numel():
        raise ValueError(f"An image is [C, H, W], not {list(image.shape)}.")
    return tuple(image.shape[1:])

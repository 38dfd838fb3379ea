"""The sizes to which vision-language models resize images, Gemma 3's crops and Llama 4's tiles; see `images`."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .images import resize


@dataclass(frozen=True)
class TiledImage:
    """A picture as tiles of one size, which a model puts together again and ends each row of with a newline.

    tiles: floats [1 + n, C, side, side], the whole picture and then its tiles, row by row; size: (height, width) of the
    picture in pixels, by which features of padding are left out. A picture of the whole one alone has no tiles.
    """

    tiles: Tensor
    size: tuple[int, int]


def fit_area(image: Tensor, factor: int, least: int, most: int) -> tuple[int, int]:
    """(height, width), multiples of `factor`, of about the aspect of an image [C, H, W]: Qwen's `smart_resize`.

    factor: the pixels of a side of a cell, patch_size * merge. least, most: the bounds of height * width, pixels;
    by default of Qwen's files 3136 and 1003520 up to Qwen2.5-VL, 65536 and 16777216 in Qwen3-VL. ValueError for an
    image more than 200 times as long as wide.
    """
    size = _sides(image)
    if max(size) / min(size) > 200:
        raise ValueError(f"An image of {size[0]} x {size[1]} pixels is more than 200 times as long as wide.")
    fitted = [round(side / factor) * factor for side in size]
    if math.prod(fitted) > most:
        shrink = math.sqrt(math.prod(size) / most)
        fitted = [max(factor, math.floor(side / shrink / factor) * factor) for side in size]
    elif math.prod(fitted) < least:
        grow = math.sqrt(least / math.prod(size))
        fitted = [math.ceil(side * grow / factor) * factor for side in size]
    return fitted[0], fitted[1]


def padded_to_cells(image: Tensor, factor: int, least: int, most: int, *, how: str = "bicubic") -> Tensor:
    """[C, rows * factor, columns * factor]: the image [C, H, W], with 0 at the right and below: GLM 5.3's.

    factor: the pixels of a side of a cell. least, most: the bounds of rows * columns. A picture of fewer pixels than
    `least` cells is enlarged, one of more than `most` cells shrunk, and others keep their size.
    """
    height, width = _sides(image)

    def cells(high: int, wide: int) -> tuple[int, int]:
        return math.ceil(high / factor), math.ceil(wide / factor)

    def shrunk(high: int) -> tuple[int, int]:
        return cells(high, max(1, width * high // height))

    grid = cells(height, width)
    if math.prod(grid) < least:
        grow = math.sqrt(least * factor**2 / (height * width))
        grid = cells(math.ceil(height * grow), math.ceil(width * grow))
    if math.prod(grid) > most:
        tallest = bisect.bisect_right(range(1, height + 1), most, key=lambda high: math.prod(shrunk(high)))
        grid = shrunk(tallest) if tallest else (1, 1)
    room = [n * factor for n in grid]
    scale = min(room[0] / height, room[1] / width)
    scale = min(1.0, scale) if height * width >= factor**2 * least else scale
    sides = zip(room, (height, width), strict=True)
    high, wide = (max(1, min(bound, math.floor(side * scale))) for bound, side in sides)
    return F.pad(resize(image, (high, wide), how=how), (0, room[1] - wide, 0, room[0] - high))


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


def fit_patches(image: Tensor, factor: int, most: int) -> tuple[int, int]:
    """(height, width), multiples of `factor`, of the greatest size with at most `most` cells: Gemma 4's.

    factor: the pixels of a side of a cell, patch_size * pooled, for an image [C, H, W]. ValueError where no cell fits.
    """
    size = _sides(image)
    scale = math.sqrt(most * factor**2 / math.prod(size))
    height, width = (math.floor(side * scale / factor) for side in size)
    if not height and not width:
        raise ValueError(f"An image of {size[0]} x {size[1]} pixels has no cell of {factor} pixels within {most}.")
    if not height:  # a strip one cell high
        height, width = 1, min(size[1] // size[0], most)
    elif not width:
        height, width = min(size[0] // size[1], most), 1
    return height * factor, width * factor


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


def tiles(image: Tensor, side: int, most: int = 16) -> Tensor:
    """[n, C, side, side]: the tiles of an image [C, H, W], row by row, and then the whole image where n > 1: Llama 4's.

    The image is `on_canvas`.
    """
    padded = on_canvas(image, side, most)
    rows, columns = (length // side for length in padded.shape[1:])
    tile_grid = padded.unflatten(1, (rows, side)).unflatten(3, (columns, side)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    whole = [resize(image, (side, side), how="bilinear")[None]] if rows * columns > 1 else []
    return torch.cat([tile_grid, *whole])


def on_canvas(image: Tensor, side: int, most: int, *, how: str = "bilinear") -> Tensor:
    """[C, rows * side, columns * side]: the image [C, H, W] fitted into its `canvas`, with 0 at the right and below."""
    size = _sides(image)
    rows, columns = canvas(image, side, most)
    room = [min(max(length, side), count * side) for length, count in zip(size, (rows, columns), strict=True)]
    if room[1] / size[1] < room[0] / size[0]:
        fitted = (min(math.floor(size[0] * (room[1] / size[1])), room[0]), room[1])
    else:
        fitted = (room[0], min(math.floor(size[1] * (room[0] / size[0])), room[1]))
    height, width = max(fitted[0], 1), max(fitted[1], 1)
    return F.pad(resize(image, (height, width), how=how), (0, columns * side - width, 0, rows * side - height))


def canvas(image: Tensor, side: int, most: int) -> tuple[int, int]:
    """(rows, columns) of tiles: the least enlargement, or else the least reduction, and then the fewest. Meta's."""
    size = _sides(image)
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in (n for n in range(1, count + 1) if count % n == 0):
            by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
    every = [pair for pairs in by_ratio.values() for pair in pairs]  # in the order in which the reference breaks ties
    scales = (torch.tensor(every) * side / torch.tensor(size)).amin(-1)  # fp32, as there
    larger = scales[scales >= 1]
    best = larger.min() if len(larger) else scales.max()
    return min((pair for pair, scale in zip(every, scales, strict=True) if scale == best), key=math.prod)


def best_canvas(size: tuple[int, int], canvases: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The one of `canvases` (height, width) on which a picture of `size` keeps most pixels: LLaVA-NeXT's.

    Of several that keep as many, the one with the least room beside the picture.
    """
    best, kept = canvases[0], (0, -math.inf)
    for height, width in canvases:
        scale = min(width / size[1], height / size[0])
        pixels = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        if (pixels, pixels - width * height) > kept:
            best, kept = (height, width), (pixels, pixels - width * height)
    return best


def tiled(image: Tensor, side: int, canvases: Sequence[tuple[int, int]], *, how: str = "bicubic") -> Tensor:
    """[1 + n, C, side, side]: the whole image [C, H, W], and its tiles row by row: LLaVA-NeXT's.

    The image is fitted into the middle of its `best_canvas`, whose sides are multiples of `side`, with 0 around it.
    """
    size = _sides(image)
    height, width = best_canvas((size[0], size[1]), canvases)
    scales = width / size[1], height / size[0]
    if scales[0] < scales[1]:
        fitted = min(math.ceil(size[0] * scales[0]), height), width
    else:
        fitted = height, min(math.ceil(size[1] * scales[1]), width)
    (top, below), (left, right) = ((room // 2, room - room // 2) for room in (height - fitted[0], width - fitted[1]))
    padded = F.pad(resize(image, fitted, how=how), (left, right, top, below))
    cells = padded.unflatten(1, (-1, side)).unflatten(3, (-1, side)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return torch.cat((resize(image, (side, side), how=how)[None], cells))


def whole_and_crops(
    image: Tensor, side: int, crop: int, *, most: int, how: str = "bilinear"
) -> tuple[Tensor, list[Tensor], int]:
    """(the image [C, side, side], its crops [C, crop, crop] row by row, how many are in a row): Step 3.7's.

    A picture longer than `side` is cut into windows of `crop` pixels, or of its shorter side where it is more than 4
    times as long as wide, to whole numbers of which it is resized; a smaller one is cut into windows of its shorter
    side where it is more than 1.5 times as long as wide. most: the longest side, to which pictures are shrunk. Narrow
    strips are padded to squares. ValueError for an image that shrinks to nothing.
    """
    height, width = _sides(image)
    if min(height, width) < 32 and max(height, width) > 4 * min(height, width):
        image = F.pad(image, (0, max(height - width, 0), 0, max(width - height, 0)))
        height = width = max(height, width)
    if max(height, width) > most:
        scale = most / max(height, width)
        height, width = int(height * scale), int(width * scale)
    short, long = min(height, width), max(height, width)
    if not short:
        raise ValueError(f"An image of {image.shape[1]} x {image.shape[2]} pixels is too narrow.")
    whole = resize(resize(image, (height, width), how=how), (side, side), how=how)
    window = (short if long / short > 1.5 else 0) if long <= side else crop if long / short <= 4 else min(short, crop)
    if not window:
        return whole, [], 0
    down, right = (_whole_windows(length, window) for length in (height, width))
    parts = [part for row in resize(image, (down, right), how=how).split(window, 1) for part in row.split(window, 2)]
    return whole, [resize(part, (crop, crop), how=how) for part in parts], max(1, right // window)


def _whole_windows(length: int, window: int) -> int:
    """The length in whole windows: one more where more than a fifth of a window is left; a shorter one stays."""
    return length if length < window else window * (length // window + (length % window > 0.2 * window))


def without_padding(rows: int, columns: int, size: tuple[int, int]) -> tuple[slice, slice]:
    """The (rows, columns) of a canvas of features on which a picture of `size` (height, width) lies in the middle."""
    height, width = size
    if width / height > columns / rows:
        pad = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(pad, rows - pad), slice(0, columns)
    pad = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(0, rows), slice(pad, columns - pad)


def _sides(image: Tensor) -> tuple[int, ...]:
    if image.ndim != 3 or not image.numel():
        raise ValueError(f"An image is [C, H, W], not {list(image.shape)}.")
    return tuple(image.shape[1:])

"""Files of pictures as pixels: of captions, and of folders of a class each; and pixels as a file."""

import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import CheckpointError, UserError
from fnmodels.files import read_bytes, write_atomic
from fnmodels.inputs.images import center_crop, normalized, resize, shortest_edge
from fnmodels.models.common.config_json import shown
from params.io.files import read_json

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # whatever a file is called: Pillow hands some other formats to programs
BYTES_LIMIT = 250_000_000  # of a file
PIXELS_LIMIT = 50_000_000  # of a picture: a few kilobytes can stand for any number
PIXELS, PIXELS_FACTOR = 16_000_000, 1000  # of any file, and those for each byte of it: scans of text have less than 500
_STRIP = 1 << 20  # pixels that are converted at a time
LONGEST = 4  # the longer side over the shorter one, from which on the ends are cut off before the picture is resized

_HALF = (0.5, 0.5, 0.5)
_LARGEST = 1e6  # of a mean or deviation; they are near 0.5


@dataclass(frozen=True)
class Pixels:
    """The side of a square, and the mean and deviation that pixels from 0 to 1 are normalized by."""

    side: int
    mean: tuple[float, ...] = _HALF
    std: tuple[float, ...] = _HALF

    @staticmethod
    def of(folder: Path, side: int) -> "Pixels":
        """The reader with the mean and deviation of the folder's preprocessor_config.json, if it has one. UserError."""
        file = folder / "preprocessor_config.json"
        values: Any = read_json(file) if os.path.lexists(file) else {}
        return Pixels(side, *mean_and_std(values, file))


def mean_and_std(values: Any, file: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and deviation in settings of pictures, 0.5 where they have none. UserError for what is no number."""
    found = []
    for name, above in (("image_mean", -_LARGEST), ("image_std", 0)):
        value = values.get(name, list(_HALF)) if isinstance(values, dict) else None
        numbers = value if isinstance(value, list) and len(value) == 3 else []
        if not numbers or not all(type(one) in (int, float) and above < one < _LARGEST for one in numbers):
            what = "three numbers" if above else "three numbers above 0"
            raise UserError(f"{file}: {name!r} is {shown(value)}; it must be {what}, of red, green and blue")
        found.append(tuple(numbers))
    mean, std = found
    return mean, std


def read_picture(file: Path, pixels: Pixels) -> Tensor:
    """A picture, resized so that its shorter edge is the side; its middle is cropped and normalized.

    Args:
        file: of one of FORMATS, with at most PIXELS_LIMIT pixels, and no more than its size can stand for.
        pixels: the side, mean and deviation.

    Returns:
        [3, side, side]. At most LONGEST times its square is held on the way, however long the picture is.

    Raises:
        UserError: the file is no such picture, or damaged.
    """
    image = _decoded(file)
    resized = resize(image, shortest_edge(image, pixels.side))
    return normalized(center_crop(resized, (pixels.side, pixels.side)), pixels.mean, pixels.std)


def whole_picture(file: Path) -> Tensor:
    """uint8 [3, H, W] of a picture, upright as its camera was held; as for `read_picture`, but nothing is cut off."""
    return _decoded(file, whole=True)


def _decoded(file: Path, *, whole: bool = False) -> Tensor:
    """uint8 [3, H, W]: the picture, or where one side is more than LONGEST times the other, the middle of it."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        data = io.BytesIO(read_bytes(file, BYTES_LIMIT, follow=True))
        with warnings.catch_warnings():  # Pillow's own limit is another, and is no error
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(data, formats=FORMATS)
        with opened as picture:
            (width, height), most = picture.size, min(PIXELS_LIMIT, PIXELS + PIXELS_FACTOR * data.getbuffer().nbytes)
            if not 0 < width * height <= most:
                of = "a picture" if most == PIXELS_LIMIT else f"one of {data.getbuffer().nbytes:,} bytes"
                raise UserError(f"{file} has {width:,} x {height:,} pixels; {of} has at most {most:,}")
            if whole:
                ImageOps.exif_transpose(picture, in_place=True)
                return _rgb(picture, (0, 0, *picture.size))
            longest = LONGEST * min(picture.size)
            left, top = (max(0, side - longest) // 2 for side in (width, height))
            return _rgb(picture, (left, top, left + min(width, longest), top + min(height, longest)))
    except (UserError, CheckpointError):
        raise
    except FileNotFoundError as error:
        raise UserError(f"{file}: there is no such picture") from error
    except Exception as error:  # decoders of damaged files raise what they please: SyntaxError, struct.error, ...
        unknown = isinstance(error, UnidentifiedImageError)
        why = "" if unknown else f" ({getattr(error, 'strerror', None) or error})"
        raise UserError(f"{file} is no picture that can be read{why}; one is {', '.join(FORMATS)}") from error


def _rgb(picture: Any, box: tuple[int, int, int, int]) -> Tensor:
    """uint8 [3, H, W] of a part of a Pillow image, in strips: converted whole, it would be in memory four times."""
    left, top, right, bottom = box
    found = np.empty((bottom - top, right - left, 3), np.uint8)
    rows = max(1, _STRIP // (right - left))
    for begin in range(0, len(found), rows):
        strip = picture.crop((left, top + begin, right, min(top + begin + rows, bottom)))
        found[begin : begin + rows] = np.asarray(strip.convert("RGB"))
    return torch.from_numpy(found).permute(2, 0, 1)


_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def classes_of(folder: Path) -> dict[str, list[Path]]:
    """{class: its pictures} of a folder with a folder for each class, or with pictures, which are one class. UserError.

    Both in the order of their names.
    """
    folders = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()} or {folder.name: folder}
    found = {
        name: sorted(path for path in own.iterdir() if path.suffix.lower() in _SUFFIXES)
        for name, own in folders.items()
    }
    if empty := [name for name, files in found.items() if not files]:
        raise UserError(f"{folders[empty[0]]} has no picture; a class is a folder of {', '.join(_SUFFIXES)}")
    return found


def picture_latents(classes: dict[str, list[Path]], side: int, patch: int) -> dict[str, Tensor]:
    """Pictures as the data of `train.data.latents`: pixels from -1 to 1 are the latents, so there is no VAE.

    A token is a patch of `patch` x `patch` pixels: latents [n, 3 patch^2 / 4, 2 side / patch, 2 side / patch]. The text
    is one vector, 1 at the number of the class, and so is the pooled text: the model's projections of them are what it
    learns of each class. UserError for sizes that do not divide.
    """
    if patch % 2 or side % patch:
        raise UserError(f"--patch {patch} and --side {side}: the patch must be even, and divide the side")
    pixels = Pixels(side)
    images = torch.stack([read_picture(file, pixels) for files in classes.values() for file in files])
    numbers = torch.tensor([number for number, files in enumerate(classes.values()) for _ in files])
    return {"latents": F.pixel_unshuffle(images, patch // 2), **class_texts(numbers, len(classes))}


def class_texts(numbers: Tensor, classes: int) -> dict[str, Tensor]:
    """The texts [n, 1, classes] of pictures of these classes, as in `picture_latents`."""
    vectors = F.one_hot(numbers, classes).float()
    return {"text": vectors[:, None], "pooled": vectors, "text_lengths": torch.ones_like(numbers)}


def write_grid(path: Path, rows: Sequence[Sequence[Tensor]]) -> None:
    """Pictures [3, side, side] from -1 to 1 as one file, in rows, with 2 white pixels between them."""
    from PIL import Image

    lines = [torch.cat([F.pad(one, (0, 2, 0, 2), value=1.0) for one in row], 2) for row in rows]
    bytes_ = torch.cat(lines, 1).add(1).mul(127.5).round().clamp(0, 255).byte()
    picture = Image.fromarray(bytes_.permute(1, 2, 0).contiguous().numpy())
    write_atomic(path, picture.save)

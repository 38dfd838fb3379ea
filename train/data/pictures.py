"""Files of pictures as the pixels that a model of captions reads."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnmodels.errors import UserError
from fnmodels.inputs.images import center_crop, normalized, resize, shortest_edge

_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Pixels:
    """The side of a square, and the mean and deviation that pixels from 0 to 1 are normalized by."""

    side: int
    mean: tuple[float, ...] = _HALF
    std: tuple[float, ...] = _HALF

    @staticmethod
    def of(folder: Path, side: int) -> "Pixels":
        """With the mean and deviation of the folder's preprocessor_config.json, if it has one. UserError."""
        file = folder / "preprocessor_config.json"
        values: Any = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        mean, std = (tuple(values.get(name, _HALF)) for name in ("image_mean", "image_std"))
        if len(mean) != 3 or len(std) != 3 or not all(isinstance(one, int | float) and one > 0 for one in std):
            raise UserError(f"{file}: image_mean and image_std must be three numbers each")
        return Pixels(side, mean, std)


def read_picture(file: Path, pixels: Pixels) -> Tensor:
    """[3, side, side]: the shorter edge resized to the side, the middle cropped, normalized. UserError."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            image = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
    except OSError as error:
        raise UserError(f"{file} is no picture that can be read ({error})") from error
    resized = resize(image, shortest_edge(image, pixels.side))
    return normalized(center_crop(resized, (pixels.side, pixels.side)), pixels.mean, pixels.std)

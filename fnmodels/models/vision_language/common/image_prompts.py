"""Steps that families share between a picture and the images that a tower reads, with the text that stands for them.

`read_image(image, settings, name, *, config)` of a family takes a picture, uint8 [3, H, W], the fields of
preprocessor_config.json, and a function from ids to their tokens. It returns the images, sized but not normalized, and
the text that replaces the family's `placeholder` in a prompt.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.images import resize
from fnmodels.models.common.config_json import shown

ImageSettings = Mapping[str, Any]
Name = Callable[[int], str]
_WAYS = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them


def placeholder(config: Any, name: Name) -> tuple[str, str]:
    """(what stands for an image in a prompt, the same for a prompt without a chat template)."""
    return name(config.image_token), name(config.image_token)


def resized(image: Tensor, size: tuple[int, int], settings: ImageSettings, usual: str = "bicubic") -> Tensor:
    """The image at a size in the way that the settings name. ConfigError for another one."""
    if 0 in size:
        raise ValueError(f"A picture of {image.shape[1]} x {image.shape[2]} pixels is too narrow for this model.")
    return resize(image, size, how=how(settings, usual))


def how(settings: ImageSettings, usual: str = "bicubic") -> str:
    """The way of resizing that the settings name. ConfigError for another one."""
    way = settings.get("resample")
    if way is None:
        return usual
    if not isinstance(way, int) or way not in _WAYS:
        raise ConfigError(f"'resample' is {shown(way)}; 2 (bilinear) and 3 (bicubic) are supported.")
    return _WAYS[way]


def number(settings: ImageSettings, name: str, key: str, usual: int, *, most: int) -> int:
    """settings[name], a number or an object whose `key` is one. ConfigError unless it is from 1 to `most`, for a file
    of a few bytes must not ask for any amount of memory."""
    value = settings.get(name)
    value = value.get(key) if isinstance(value, Mapping) else value
    if value is None:
        return usual
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name!r} is {shown(value)}; it must be a number from 1 to {most:,}.")
    return value


def expect_side(settings: ImageSettings, name: str, key: str, side: int) -> None:
    """ConfigError where the settings have another side of the square than the tower reads."""
    found = number(settings, name, key, side, most=side)
    if found != side:
        raise ConfigError(f"{name!r} is {found}, and the tower reads squares of {side} pixels.")


def refuse(settings: ImageSettings, name: str) -> None:
    """ConfigError where a setting that is not supported is on."""
    if settings.get(name):
        raise ConfigError(f"{name!r} is {shown(settings[name])}; only false is supported.")


def kept_id(config: Any, names: tuple[str, ...], usual: int) -> int:
    """An id among the fields that the config keeps for saving."""
    found = {name: json.loads(value) for name, value in config.extra}
    return next((found[name] for name in names if isinstance(found.get(name), int)), usual)

"""Pictures in prompts of a vision-language model: its images, and the tokens of their features in the text."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

import params as P
from fnmodels.errors import ConfigError, UserError
from fnmodels.image_text import Image
from fnmodels.inputs.image_sizes import TiledImage
from fnmodels.inputs.images import normalized
from fnmodels.models.common.registry import family_of, text_config
from params.io.files import read_json

from .pictures import mean_and_std, whole_picture

LONGEST = 200  # the longer side over the shorter one, as in Qwen's processor
FILES = ("preprocessor_config.json", "processor_config.json")  # of transformers: the usual one, and that of version 5


def check_places(prompt: str, placeholder: str, pictures: int) -> None:
    """UserError for another number of placeholders than of pictures."""
    if (places := prompt.count(placeholder)) != pictures:
        raise UserError(
            f"the prompt has {places} places for images ({placeholder}), and there are {pictures}: each image needs one"
        )


def placeholder_in(folder: Path, tokenizer: Tokenizer) -> str | None:
    """The text that stands for an image in prompts of a checkpoint folder's model; None for one that reads none."""
    try:
        config = P.load_config(folder)
    except P.CheckpointError:  # of a whole model that is not supported, though its text is
        return None
    family: Any = family_of(config)
    if text_config(config) is config or not hasattr(family, "placeholder"):
        return None
    found: str | None = family.placeholder(config, tokenizer.id_to_token)[0]
    return found


def settings_file(folder: Path) -> Path | None:
    """The file that says how a checkpoint folder's model reads pictures; None where there is none."""
    return next((folder / name for name in FILES if os.path.lexists(folder / name)), None)


def _normalized(image: Image, mean: Sequence[float], std: Sequence[float]) -> Image:
    """The image, or the picture's tiles, as the tower reads them."""
    if isinstance(image, TiledImage):
        return replace(image, tiles=torch.stack([normalized(tile, mean, std) for tile in image.tiles]))
    return normalized(image, mean, std)


@dataclass(frozen=True)
class ImagePrompts:
    """Reads pictures as the model's processor does. config: of the whole model; settings: those of `file`."""

    config: Any
    tokenizer: Tokenizer
    file: Path
    settings: dict[str, Any]
    known: dict[Path, tuple[list[Image], str]] = field(default_factory=dict)  # a picture that several prompts have

    @staticmethod
    def of(folder: Path, config: Any, tokenizer: Tokenizer) -> "ImagePrompts":
        """The reader of a checkpoint folder. UserError without settings of pictures, or with some that it has not."""
        if not hasattr(family_of(config), "read_image"):
            raise UserError(
                f"pictures for {config.model_type} are not read from files yet: pass its images as tensors, sized and "
                "normalized, to train.generate"
            )
        file = settings_file(folder)
        if file is None:
            raise UserError(f"{folder} has no {' and no '.join(FILES)}, which say how the model's pictures are read")
        values: Any = read_json(file)
        values = values.get("image_processor", values) if isinstance(values, dict) else None
        if not isinstance(values, dict):
            raise UserError(f"{file} holds no settings of pictures")
        for name in ("do_resize", "do_rescale"):
            if values.get(name, True) is not True:
                raise UserError(f"{file}: {name!r} must be true, as every processor of these models has it")
        return ImagePrompts(config, tokenizer, file, values)

    def read(self, picture: Path) -> tuple[list[Image], str]:
        """(the images of a picture for the tower, the text that stands for them). UserError for one that has none."""
        if picture not in self.known:
            image = whole_picture(picture)
            if max(image.shape[1:]) > LONGEST * min(image.shape[1:]):
                size = " x ".join(map(str, image.shape[1:]))
                raise UserError(f"{picture}: a picture of {size} pixels is more than {LONGEST} times as long as wide")
            try:
                found, text = self._family.read_image(image, self.settings, self._name, config=self.config)
            except ConfigError as error:
                raise UserError(f"{self.file}: {error}") from error
            except ValueError as error:
                raise UserError(f"{picture}: {error}") from error
            unchanged: tuple[tuple[float, ...], tuple[float, ...]] = (0, 0, 0), (1, 1, 1)
            normalizes = self.settings.get("do_normalize", True)
            mean, std = mean_and_std(self.settings, self.file) if normalizes else unchanged
            self.known[picture] = [_normalized(one, mean, std) for one in found], text
        return self.known[picture]

    def with_pictures(self, prompt: str, pictures: Sequence[Path], *, chat: bool) -> tuple[str, list[Image]]:
        """(the prompt with the tokens of the features, the images). A prompt, other than of a chat, that has no
        placeholder begins with the images. UserError for another number of placeholders than of pictures.

        That of a caption stays as it is, see `ids`; UserError for a chat, and for another number of pictures than 1.
        """
        if self.captions:
            if chat or len(pictures) != 1:
                raise UserError(f"a text of {self.config.model_type} is the caption of one picture, and not a chat")
            return prompt, self.read(pictures[0])[0]
        placeholder, alone = self._family.placeholder(self.config, self._name)
        if pictures and placeholder not in prompt and not chat:
            prompt = alone * len(pictures) + prompt
        check_places(prompt, placeholder, len(pictures))
        pieces = prompt.split(placeholder)
        images: list[Image] = []
        found = pieces[0]
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            own, text = self.read(picture)
            images, found = [*images, *own], found + text + piece
        return found, images

    @property
    def captions(self) -> bool:
        """Whether a text is a caption: it begins with the image token, which tokenizers may lack, and has no other."""
        return not hasattr(self._family, "placeholder")

    def ids(self, text: str) -> list[int] | None:
        """The token ids of a caption's beginning; None for a model that reads other texts."""
        if not self.captions:
            return None
        return [self.config.image_token, *self.tokenizer.encode(text, add_special_tokens=False).ids]

    @property
    def _family(self) -> Any:
        return family_of(self.config)

    def _name(self, token: int) -> str:
        """The text of a token. UserError where the tokenizer does not have it."""
        found = self.tokenizer.id_to_token(token)
        if found is None:
            raise UserError(f"the tokenizer has no token {token}, which stands for images in this model")
        return found

"""Pictures in the prompts of reinforcement learning: a text that learns, before a tower that does not."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import params as P
from fnmodels.errors import UserError
from fnmodels.files import copy_file, read_bytes
from fnmodels.image_text import Image
from fnmodels.tree import Tree
from params.io.files import plain_file
from train.data.chat import Template, render_prompt
from train.data.image_prompts import FILES, ImagePrompts
from train.data.pictures import BYTES_LIMIT
from train.data.token_budget import PackedRow
from train.data.turns.image_rows import check_causal, image_batch, image_entries
from train.data.turns.pictured import with_images
from train.eval import pretrained

TEMPLATE = "chat_template.json"  # of a processor, in older folders
IMAGES = "images"  # of a record: the files of its pictures


@dataclass(frozen=True)
class Seen:
    """A prompt's ids and its images."""

    ids: list[int]
    images: Sequence[Image] = ()


@dataclass(frozen=True)
class Pictures:
    """The model around the text that learns.

    Attributes:
        config: Of the whole model.
        params: Of the whole model; those of its text are the first ones.
        reader: Reads pictures as the model's processor does.
    """

    config: Any
    params: Tree
    reader: ImagePrompts

    @staticmethod
    def load(folder: Path) -> "Pictures":
        """The whole model of a checkpoint folder, adapters merged. UserError for one that reads no pictures here."""
        config, params, reader = pretrained.load_reader(folder, copy=True)
        if reader is None:
            raise UserError(
                f"--data has prompts with {IMAGES!r}, and --init {folder} reads no pictures here: that takes a "
                f"model of images whose pictures are read from files, and {' or '.join(FILES)} in its folder"
            )
        check_causal(config, "GRPO with pictures")
        return Pictures(config, {**params, "text": P.lora.merge(params["text"])}, reader)

    def whole(self, text: Tree) -> Tree:
        """The params of the whole model with those of a text."""
        return {**self.params, "text": text}

    def prompts(self, template: Template, records: Sequence[Mapping[str, Any]]) -> list[Seen]:
        """The records' prompts, whose pictures stand before the text of the user's first message unless messages say
        where they are. A picture that several have is read once, and is kept by these prompts alone. UserError."""
        reader = replace(self.reader, known={})
        return [self._prompt(reader, template, record) for record in records]

    @staticmethod
    def _prompt(reader: ImagePrompts, template: Template, record: Mapping[str, Any]) -> Seen:
        files = [Path(name) for name in record.get(IMAGES, ())]
        text = render_prompt(template, with_images(list(record["messages"]), len(files)))
        text, images = reader.with_pictures(text, files, chat=True)
        return Seen(reader.tokenizer.encode(text, add_special_tokens=False).ids, images)

    def entries(self, tokens: Sequence[Tensor], prompts: Sequence[Seen]) -> dict[str, list[Tensor]]:
        """The entries of `token_budget` for the images of prompts. Answers may have the id of image tokens, as text.

        tokens: of the prompts with their answers.
        """
        marks = [row == self.config.image_token for row in tokens]
        for own, prompt in zip(marks, prompts, strict=True):
            own[len(prompt.ids) :] = False
        images = [prompt.images for prompt in prompts]
        return image_entries(self.params, tokens, images, config=self.config, marks=marks)

    def batch(self, row: PackedRow, prompts: Sequence[Seen]) -> dict[str, Tensor]:
        """The batch of a packed row."""
        return image_batch(row, [prompt.images for prompt in prompts], config=self.config)

    def save(self, source: Path, run: Path, text: Tree) -> None:
        """The whole model with a learned text, and the settings of its pictures."""
        P.save_pretrained(run, self.config, self.whole(text))
        for folder, name in ((pretrained.weights_folder(source), self.reader.file.name), (source, TEMPLATE)):
            if os.path.lexists(folder / name):
                copy_file(plain_file(folder, name), run / name, pretrained.COMPANION_LIMIT)


def files_of(place: str, value: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """{"images": the paths} of a record's pictures, which are named beside the file of the record; {} without any.

    UserError, which begins with `place`, for what is no list of names, and for a picture that is not there.
    """
    names = value.get(IMAGES)
    if not names:
        return {}
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{place}: "{IMAGES}" must be a list of names of files')
    files = [folder / name for name in names]
    for file in files:
        try:
            read_bytes(file, BYTES_LIMIT, follow=True)
        except (OSError, ValueError) as error:  # P.CheckpointError, and a null character in a name
            raise UserError(f"{place}: the picture {file} cannot be read ({error})") from error
    return {IMAGES: [str(file) for file in files]}

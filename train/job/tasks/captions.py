"""CLIP or SigLIP on pictures and their captions: {"image", "text"}."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels.errors import UserError
from fnmodels.tree import Tree
from params.io.files import inner_file
from train.batch import Entries
from train.command_line import check_installed
from train.data.pictures import Pixels, read_picture
from train.losses.image_text import image_text_batch, image_text_loss

from .encoder import Encoder, Examples, encoder_of_texts, of_family, refuse
from .settings import DocumentSettings


def captions(settings: DocumentSettings, examples: Examples) -> Encoder:
    check_installed(("PIL",))
    config, params = _load(settings)
    if not hasattr(fnmodels.family_of(config), "similarity"):
        raise refuse(settings.init, f"it is a {config.model_type}; captions need a CLIP or a SigLIP")
    pixels = Pixels.of(Path(str(settings.init)), config.vision.image_size)
    encode = encoder_of_texts(settings, config.text)

    def batch(chosen: Examples, generator: torch.Generator, rows: int) -> Entries:
        images: list[Tensor] = [read_picture(one["file"], pixels) for one in chosen]
        return image_text_batch([encode(one["text"]) for one in chosen], images, config)  # a row for each pair

    return of_family(
        config,
        params,
        kind="model of pictures and texts",
        pipeline_tag="zero-shot-image-classification",
        loss=functools.partial(image_text_loss, config=config),
        load=functools.partial(_params, settings),
        batch=batch,
    )


def with_files(data: Path, examples: Examples) -> Examples:
    """The examples with the "file" of each picture; UserError for missing ones, UnsafePathError for those outside."""
    names = [one["image"] for one in examples]
    if missing := [name for name in names if not (data.parent / name).is_file()]:
        raise UserError(f"{data} names {data.parent / missing[0]}, which is no file; {len(missing)} are missing")
    return [one | {"file": inner_file(data.parent, one["image"])} for one in examples]


def _load(settings: DocumentSettings) -> tuple[Any, Tree]:
    ignored = settings.ignore_fields or ()
    return P.load_pretrained(str(settings.init), dtype=torch.float32, copy=True, ignore_fields=ignored)


def _params(settings: DocumentSettings) -> Tree:
    return _load(settings)[1]

"""Inputs of Tinker with images: a chunk of a picture stands for the tokens of its features."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import CheckpointError, UserError
from fnmodels.files import read_bytes
from fnmodels.image_text import Image
from train.data.image_prompts import ImagePrompts
from train.data.pictures import BYTES_LIMIT
from train.data.token_budget import PackedRow, token_budget
from train.data.turns.image_rows import image_batch, image_entries

from .base import Base

BUDGET = 4096  # tokens of a packed row; a longer sequence has a row of its own
FORMATS = ("png", "jpeg")
TEXT, IMAGE, POINTER = "encoded_text", "image", "image_asset_pointer"  # types of chunks


@dataclass(frozen=True)
class InputTokens:
    """The ids of a sequence, an image token for each feature of an image, its images in order, and for each id whether
    it is of an image: text may have the id of image tokens too."""

    tokens: list[int]
    images: tuple[Image, ...] = ()
    marks: tuple[bool, ...] = ()

    def to_ints(self) -> list[int]:
        """The ids."""
        return self.tokens


@dataclass
class InputReader:
    """Reads the inputs of a call. A picture that several of them have is read once, and is one object.

    Args:
        base: The base model.
        files: Whether a chunk may name a file of this machine.
        most: Different pictures that are read, at most; None: any number.
        context: Tokens of a sequence after which no further picture of it is read; None: any number.
    """

    base: Base
    files: bool = True
    most: int | None = None
    context: int | None = None
    _known: dict[bytes, tuple[list[int], tuple[Image, ...]]] = field(default_factory=dict)

    def read(self, given: Any, what: str) -> InputTokens:
        """The tokens and images of a `ModelInput`. ValueError, which begins with `what`, for a chunk of another kind.

        given: with chunks that have the fields of `types.EncodedTextChunk`, `ImageChunk` or `ImageAssetPointerChunk`;
            or what was read before.
        """
        if isinstance(given, InputTokens):
            return given
        tokens, images, marks = list[int](), list[Image](), list[bool]()
        for number, chunk in enumerate(given.chunks):
            kind = getattr(chunk, "type", TEXT)
            if kind == TEXT:
                tokens += map(int, chunk.tokens)
                marks += [False] * len(chunk.tokens)
                continue
            where = f"Chunk {number} of {what}"
            if kind not in (IMAGE, POINTER):
                raise ValueError(f"{where} is of the type {kind!r}; {TEXT}, {IMAGE} and {POINTER} are supported.")
            if self.context is not None and len(tokens) >= self.context:
                raise ValueError(
                    f"{where} begins after {len(tokens)} tokens, and the context is {self.context} tokens."
                )
            own, pictures = self._picture(chunk, kind, where)
            expected = chunk.expected_tokens
            if expected is not None and expected != len(own):
                raise ValueError(f"{where} has an image of {len(own)} tokens; its expected_tokens are {expected}.")
            tokens += own
            images += pictures
            marks += [token == self.base.run["config"].image_token for token in own]
        return InputTokens(tokens, tuple(images), tuple(marks))

    def _picture(self, chunk: Any, kind: str, where: str) -> tuple[list[int], tuple[Image, ...]]:
        if self.base.whole is None:
            raise ValueError(f"{where} is an image, and the model of {self.base.folder.name!r} reads no images here.")
        if chunk.format not in FORMATS:
            raise ValueError(f"{where} has the format {chunk.format!r}; it must be one of {', '.join(FORMATS)}.")
        try:
            data = chunk.data if kind == IMAGE else self._file(chunk.location, where)
            if data not in self._known:
                if self.most is not None and len(self._known) >= self.most:
                    raise ValueError(f"{where} is one picture too many: a call has at most {self.most} different ones.")
                self._known[data] = _tokens_and_images(self.base.whole.pictures, data)
        except (UserError, CheckpointError, OSError) as error:
            raise ValueError(f"{where}: {str(error).rstrip('.')}.") from error
        return self._known[data]

    def _file(self, location: str, where: str) -> bytes:
        if not self.files:
            raise ValueError(f"{where} names a file or an address, and this server fetches none: send its data.")
        if "://" in location:
            raise ValueError(f"{where} has the location {location!r}; a file of this machine is read, and no address.")
        try:
            return read_bytes(Path(location), BYTES_LIMIT, follow=True)
        except CheckpointError:
            raise
        except ValueError as error:  # a null character, or half of one of two
            raise ValueError(f"{where} has the location {location!r}, which names no file: {error}.") from error


def _tokens_and_images(pictures: ImagePrompts, data: bytes) -> tuple[list[int], tuple[Image, ...]]:
    """The tokens from the first feature's to the last one's, with what the model's processor puts between, and the
    images: what begins and ends an image is of the text around it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture"
        file.write_bytes(data)
        try:
            images, text = replace(pictures, known={}).read(file)
        except UserError as error:
            raise UserError(str(error).replace(str(file), "the picture")) from error
    ids = pictures.tokenizer.encode(text, add_special_tokens=False).ids
    image = pictures.config.image_token
    return ids[ids.index(image) : len(ids) - ids[::-1].index(image)], tuple(images)


def packed_rows(
    base: Base, entries: dict[str, list[Tensor]], read: Sequence[InputTokens], names: Sequence[str]
) -> list[PackedRow]:
    """Sequences in packed rows with the features of their images. ValueError for image tokens without an image.

    entries: of `token_budget`, but for the tokens. names: of the sequences, for sentences.
    """
    given: dict[str, list[Tensor]] = {
        "tokens": [torch.tensor(one.tokens, dtype=torch.int64) for one in read],
        **entries,
    }
    budget = max(BUDGET, *(len(one.tokens) for one in read))
    if base.whole is None:
        return token_budget(given, budget)[0]
    images, config = [one.images for one in read], base.whole.config
    how: dict[str, Any] = {"config": config, "kernel": base.kernel, "names": names}
    marks = [torch.tensor(one.marks, dtype=torch.bool) for one in read]
    given |= image_entries(base.whole.params, given["tokens"], images, marks=marks, **how)
    rows = token_budget(given, budget)[0]
    return [replace(row, batch=image_batch(row, images, config=config)) for row in rows]

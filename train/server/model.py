"""`Model`: a checkpoint folder's model, its tokenizer, chat template and pictures, as requests need them."""

import base64
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fnmodels.errors import UserError
from fnmodels.models.common.registry import stack_configs, text_config
from train.data.chat import Template, read_template, render_prompt
from train.data.image_prompts import ImagePrompts, check_places, placeholder_in
from train.eval import pretrained
from train.generation.text import prompt_ids

from .errors import ApiError, sentence
from .token_bytes import TokenBytes
from .worker import Served

PICTURES = 16  # of one request
DATA = "data:"


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt, its text, and its images, see `train.Request`."""

    ids: list[int]
    text: str
    images: Sequence[Any] = ()


@dataclass(frozen=True)
class Model:
    """The model that answers, under the name that clients use.

    Args:
        folder: The checkpoint.
        name: The name in requests.
        served: Parameters, config and tokenizer.
        ends: Token ids that end an answer.
        pictures: How pictures are read; None: the model reads none.
    """

    folder: Path
    name: str
    served: Served
    ends: tuple[int, ...]
    pictures: ImagePrompts | None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder."""
        found: Tokenizer = self.served.tokenizer
        return found

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        size: int = text_config(self.served.config).vocab_size
        return size

    @cached_property
    def _placeholder(self) -> str | None:
        return None if self.pictures else placeholder_in(pretrained.weights_folder(self.folder), self.tokenizer)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.tokenizer)

    def check_name(self, name: Any) -> None:
        """ApiError for the name of another model."""
        if name not in (None, self.name):
            raise ApiError(404, f"There is no model {name!r} here; this server has {self.name!r}.", param="model")

    def text_prompt(self, text: str) -> Prompt:
        """A text, as the tokenizer begins it. ApiError where it has no tokens."""
        try:
            ids = prompt_ids(self.tokenizer, text)
        except UserError as error:
            raise ApiError(400, sentence(str(error)), param="prompt") from error
        return Prompt(ids, text)

    @cached_property
    def template(self) -> Template:
        """The chat template. ApiError where the folder has none."""
        try:
            return read_template(self.folder, images=self.pictures is not None)
        except UserError as error:
            raise ApiError(400, f"{self.name} has no chat template: use /v1/completions.") from error

    def chat_prompt(self, messages: list[dict[str, Any]], urls: Sequence[str], extra: dict[str, Any]) -> Prompt:
        """A conversation up to the assistant's cue, with the pictures of these data URLs. ApiError says what is wrong.

        extra: further variables of the template.
        """
        if urls and self.pictures is None:
            raise ApiError(400, f"{self.name} reads no images here: leave image_url out.", param="messages")
        try:
            text = render_prompt(self.template, messages, **extra)
            images: Sequence[Any] = ()
            if self.pictures is not None:
                with tempfile.TemporaryDirectory() as folder:
                    files = [_picture(url, Path(folder) / f"picture-{i}") for i, url in enumerate(urls)]
                    text, images = replace(self.pictures, known={}).with_pictures(text, files, chat=True)
            elif self._placeholder is not None:
                check_places(text, self._placeholder, 0)
        except UserError as error:
            raise ApiError(400, sentence(str(error)), param="messages") from error
        # the template renders special tokens, such as <bos>, itself
        return Prompt(list(self.tokenizer.encode(text, add_special_tokens=False).ids), text, images)


def _picture(url: str, file: Path) -> Path:
    head, comma, data = url.partition(",")
    if not url.startswith(DATA) or not comma or not head.endswith(";base64"):
        raise ApiError(
            400,
            "An image_url must be a data URL, data:image/png;base64,...: this server fetches nothing.",
            param="messages",
        )
    try:
        file.write_bytes(base64.b64decode(data, validate=True))
    except ValueError as error:  # of other characters, and binascii.Error
        raise ApiError(400, f"The data of an image_url are not base64: {error}.", param="messages") from error
    return file


def load(folder: Path, name: str | None = None) -> Model:
    """The model of a folder: the whole one where it reads images from files. UserError for one that cannot answer."""
    tokenizer = pretrained.load_tokenizer(folder)
    config, params, pictures = pretrained.load_reader(folder)
    if stack_configs(config):
        raise UserError(f"{folder}: a {config.model_type} has an encoder; the server answers with decoders alone")
    pretrained.check_vocabulary(tokenizer, text_config(config), folder)
    ends = pretrained.answer_end_ids(folder, tokenizer)
    served = Served(params, config, tokenizer)
    return Model(folder, name or folder.resolve().name, served, ends, pictures)

"""Futures, tokenizers and base models, which training and sampling clients share."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import Kernel
from fnmodels.tree import Tree
from train.data.image_prompts import ImagePrompts
from train.data.turns.image_rows import check_causal
from train.eval import pretrained
from train.generation.images import text_model

T = TypeVar("T")


class Future(Generic[T]):
    """A result that is there already."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> T:
        return self._value

    async def result_async(self, timeout: float | None = None) -> T:
        return self._value

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class Ready:
    """A client is its own future: releases of Tinker before 0.38 return clients, later ones futures of clients."""

    def result(self, timeout: float | None = None) -> Self:
        return self

    async def result_async(self, timeout: float | None = None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.result_async().__await__()


class TextTokenizer:
    """A checkpoint's tokenizer.json with ids as plain lists."""

    def __init__(self, folder: Path) -> None:
        self.inner = pretrained.load_tokenizer(folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        ids = [tokens] if isinstance(tokens, int) else list(tokens)
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))


@dataclass(frozen=True)
class Whole:
    """The model around a text that reads images. pictures: how its pictures are read."""

    config: Any
    params: Tree
    pictures: ImagePrompts


@dataclass(frozen=True)
class Base:
    """A base model; its weights are read by all clients and written by none.

    config, params: of its text. kernel: of sampling and of training, see `fnmodels.forward`; with "invariant" both have
    the same bits. whole: of a model that reads images; its tower is not trained.
    """

    folder: Path
    config: DecoderConfig
    params: Tree
    kernel: Kernel = "auto"
    whole: Whole | None = None

    @staticmethod
    def of(folder: Path, config: Any, params: Tree, pictures: ImagePrompts | None, kernel: Kernel) -> "Base":
        """The base of what `train.eval.pretrained.load_reader` returns. UserError for a prompt that sees all of
        itself."""
        if pictures is None:
            return Base(folder, *text_model(params, config)[::-1], kernel)
        check_causal(config, "Tinker's interface")
        return Base(folder, config.text, params["text"], kernel, Whole(config, params, pictures))

    @property
    def run(self) -> dict[str, Any]:
        """The keywords by which all losses run the model."""
        return {"config": self.config if self.whole is None else self.whole.config, "kernel": self.kernel}

    def sampled(self, params: Tree) -> tuple[Tree, Any]:
        """(params, config) of the model that generates, of which `params` are the text's."""
        if self.whole is None:
            return params, self.config
        return {**self.whole.params, "text": params}, self.whole.config

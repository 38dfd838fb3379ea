"""Scores of a checkpoint on texts: loss, perplexity and bits per byte of each document and of all."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fnmodels.options import Kernel
from fnmodels.tree import Tree
from train.parallel.mesh import Mesh

from .over_mesh import load_sharded, score_over_mesh
from .pretrained import begin_id, check_vocabulary, load_model, load_tokenizer
from .scoring import ROW_TOKENS, ContextPair, score_continuations
from .text_ids import TextIds

DOCUMENTS = 64  # scored at once: packed into common rows


@dataclass(frozen=True)
class TextScore:
    """The cross entropy of a text, or of several.

    Attributes:
        nats: The negative log-probability of all tokens, each behind as many others as the model reads.
        tokens: How many tokens were predicted: all of the text, none of those in front of it.
        bytes: The size of the text in UTF-8.
    """

    nats: float
    tokens: int
    bytes: int

    def __add__(self, other: "TextScore") -> "TextScore":
        return TextScore(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


@dataclass(frozen=True)
class Evaluator:
    """A checkpoint with its tokenizer, ready to score texts. batch_tokens, kernel: see `score_continuations`.

    family: the module that reads it; None: that of its type. as_harness: see `TextIds`.
    mesh: the processes that score together, each with the same texts; None: this one alone.
    """

    folder: Path
    dtype: torch.dtype | None = None
    device: str | None = None
    batch_tokens: int = ROW_TOKENS
    kernel: Kernel = "auto"
    family: Any = None
    as_harness: bool = False
    mesh: Mesh | None = None

    def scores(self, texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, TextScore]]:
        """(name, score) of each (name, text), in their order, without texts that have no token.

        A text longer than the model reads is cut into windows: a token has as much context as fits.
        """
        tokenizer = load_tokenizer(self.folder)
        config, params = self._model()
        check_vocabulary(tokenizer, config, self.folder)
        begin = begin_id(self.folder, tokenizer)
        ids = TextIds(self.folder, tokenizer, begin, as_harness=self.as_harness, config=config)
        remaining = iter(texts)
        while some := list(islice(remaining, DOCUMENTS)):
            windows = [ids.windows(text, config.max_position_embeddings) for _, text in some]
            pairs = [pair for own in windows for pair in own]
            logps = iter(self._logps(config, params, pairs))
            for (name, text), own in zip(some, windows, strict=True):
                nats = -sum(islice(logps, len(own)))
                if own:
                    yield name, TextScore(nats, sum(len(targets) for _, targets in own), len(text.encode()))

    def _model(self) -> tuple[Any, Tree]:
        if self.mesh is not None:
            return load_sharded(self.folder, self.mesh, family=self.family, dtype=self.dtype)
        return load_model(self.folder, merge=True, family=self.family, dtype=self.dtype, device=self.device)

    def _logps(self, config: Any, params: Tree, pairs: Sequence[ContextPair]) -> list[float]:
        """The log-probability of each continuation."""
        if self.mesh is not None:
            return score_over_mesh(params, config, pairs, self.mesh, batch_tokens=self.batch_tokens)
        options: Any = {"batch_tokens": self.batch_tokens, "kernel": self.kernel}
        return [logp for logp, _ in score_continuations(params, config, pairs, **options)]

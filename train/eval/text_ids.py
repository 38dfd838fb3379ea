"""Texts as token ids for scoring: contexts, continuations and windows of long texts, each with one begin token."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fnmodels.errors import UserError
from train.data.encoder import added_in_front

from .pretrained import check_tokens

ContextPair = tuple[list[int], list[int]]  # context, at least one id; continuation


@dataclass(frozen=True)
class TextIds:
    """The tokenizer of a checkpoint folder, and how its special tokens count.

    begin: the token that an empty context is replaced by where the tokenizer adds none in front of a text; None: there
    is none. add_special_tokens: whether the tokenizer adds its special tokens. as_harness: counts them as the `hf`
    model of EleutherAI's harness does: a rolled text begins twice, with the second begin token as its first target, and
    what the tokenizer adds behind a text, such as <eos>, ends contexts and is a target. config: of the model, which
    must have rows of the ids; None: any ids.
    """

    folder: Path
    tokenizer: Tokenizer
    begin: int | None
    add_special_tokens: bool = True
    as_harness: bool = False
    config: Any = None

    @cached_property
    def start(self) -> list[int]:
        """The tokens in front of a text without a context. UserError where the checkpoint names none."""
        if self._front:
            return self._front
        if self.begin is None:
            raise UserError(
                f"{self.folder}: config.json has neither bos_token_id nor eos_token_id to begin a text with"
            )
        return [self.begin]

    def of(self, text: str) -> list[int]:
        """The ids of a text that goes on, without a second <bos> where a rendered conversation starts with one."""
        if self.as_harness:
            begin = None if self.begin is None else self.tokenizer.id_to_token(self.begin)
            begun = begin is not None and text.startswith(begin)
            return self._encoded(text, add_special_tokens=self.add_special_tokens and not begun)
        ids, front = self._own(text), self._front
        begun = ids[: len(front)] == front or (bool(ids) and ids[0] == self.begin)
        return ids if begun else front + ids

    def pair(self, context: str, continuation: str) -> ContextPair:
        """(context ids, continuation ids) of the joined text; spaces between belong to the continuation."""
        if not context:
            return self.start, self._behind_start(continuation)
        before, ids = self.of(context.rstrip()), self.of(context + continuation)
        # a context of spaces only has no ids, and the first token still needs a context
        return (before, ids[len(before) :]) if before else (self.start, ids)

    def windows(self, text: str, longest: int) -> list[ContextPair]:
        """(context, targets) such that each token of a text is a target once, behind as many others as a model reads.

        The start is in front of the first window alone. longest: the tokens that a model reads at once.
        """
        start, ids = self.start, self.of(text) if self.as_harness else self._behind_start(text)
        end = longest + 1 - len(start)
        found = [(start, ids[:end])] if ids else []
        for begin in range(end, len(ids), longest):
            targets = ids[begin : begin + longest]
            found.append((ids[max(0, begin + len(targets) - longest - 1) : begin], targets))
        return found

    @cached_property
    def _front(self) -> list[int]:
        return added_in_front(self.tokenizer) if self.add_special_tokens and not self.as_harness else []

    def _own(self, text: str) -> list[int]:
        return self._encoded(text, add_special_tokens=False)

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokenizer's ids. UserError for an added token that the model has no row of."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        if self.config is not None:
            check_tokens(self.tokenizer, ids, self.config)
        return ids

    def _behind_start(self, text: str) -> list[int]:
        """The ids of a text without a context, which may be written with its start."""
        ids, start = self._own(text), self.start
        return ids[len(start) :] if ids[: len(start)] == start else ids

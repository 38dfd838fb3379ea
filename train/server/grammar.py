"""Answers that are JSON of a schema: a grammar of llguidance sets the logits of what must not come next to -inf."""

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .body import Body
from .errors import ApiError

ANY_OBJECT = {"type": "object"}


class Grammars:
    """The grammars of one tokenizer.

    Args:
        tokenizer: Of the model.
        vocab_size: The number of logits.
        ends: Token ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._ends[0])

    def hook(self, form: Body | None) -> Callable[[], Callable[[Tensor, list[int]], Tensor]] | None:
        """A function that makes the `logits_fn` of each answer for a response_format; None where texts are free.

        Raises:
            ApiError: The format is unknown, or the schema is not supported.
        """
        if form is None:
            return None
        kind = form.take("type")
        if kind == "text":
            form.finish()
            return None
        if kind not in ("json_object", "json_schema"):
            raise form.wrong("type", '"text", "json_object" or "json_schema"')
        schema: Any = ANY_OBJECT
        named = form.object("json_schema") if kind == "json_schema" else None
        form.finish()
        if kind == "json_schema":
            schema = None if named is None else named.take("schema")
            if named is None or not isinstance(schema, dict):
                raise ApiError(400, "response_format.json_schema.schema must be an object.", param="response_format")
            named.finish((), ("name", "description", "strict"))  # every answer is strictly of the schema
        if not self._ends:
            raise ApiError(400, "The model has no end-of-text token, so JSON would not end.", param="response_format")
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
            wrong = LLMatcher.validate_grammar(grammar, self._vocabulary)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise ApiError(400, f"The schema is not supported: {wrong}.", param="response_format")
        return lambda: _follow(LLMatcher(self._vocabulary, grammar))


def _follow(matcher: Any) -> Callable[[Tensor, list[int]], Tensor]:
    """The hook of one answer, which is called with all of its tokens at each step; ApiError where it cannot go on."""
    seen = 0

    def edited(logits: Tensor, tokens: list[int]) -> Tensor:
        nonlocal seen
        for token in tokens[seen:]:
            matcher.consume_token(token)
        seen = len(tokens)
        mask = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        if matcher.is_error() or not bool(mask.any()):  # as on a schema that takes too long
            reason = str(matcher.get_error() or "no token may follow").strip().splitlines()[0]
            raise ApiError(
                400,
                f"The grammar of response_format gave up after {seen} tokens: {reason}. Use a simpler schema.",
                param="response_format",
            )
        return logits.masked_fill(~mask.to(logits.device), -torch.inf)

    return edited

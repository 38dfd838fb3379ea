"""Answers that are valid JSON of a schema, from any model: a grammar allows tokens through the hook on logits.

    pip install llguidance
    python examples/json_schema.py [CHECKPOINT]     # without one, a model with random weights, and JSON all the same

`json_hook` is what to copy. It keeps no state of its own that could go wrong: what may come next is a function of the
schema and of an answer's tokens so far, so it works with `train.generate`, `train.stream` and `train.serve`, for any
number of slots and in any order of requests.
"""

import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from torch import Tensor

import params as P
import train
from fnmodels import llama
from train.data.tokenizer import END_OF_TEXT, train_tokenizer
from train.eval.pretrained import answer_end_ids, load_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,7}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


def json_hook(
    tokenizer: Tokenizer, schema: dict[str, Any], *, vocab_size: int, end: int
) -> Callable[[Tensor, list[list[int]]], Tensor]:
    """A `logits_fn` under which answers are JSON of the schema, then the token `end`, which is also a stop id.

    vocab_size: of the model. ValueError for a schema that llguidance does not support. An answer that reaches max_new
    is cut off before it is valid: bound strings and arrays in the schema.
    """
    vocabulary = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=end)
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    if wrong := LLMatcher.validate_grammar(grammar, vocabulary):
        raise ValueError(f"The schema is not supported: {wrong}")

    @lru_cache(maxsize=1024)
    def matcher(tokens: tuple[int, ...]) -> LLMatcher:
        """The state after these tokens, from that of the step before where it is still held."""
        if not tokens:
            return LLMatcher(vocabulary, grammar)
        found = matcher(tokens[:-1]).deep_copy()
        if not found.consume_token(tokens[-1]):
            raise ValueError(f"The answer has left the schema: {found.get_error()}")
        return found

    def hook(logits: Tensor, answers: list[list[int]]) -> Tensor:
        masks = b"".join(matcher(tuple(answer)).compute_logit_bias() for answer in answers)
        allowed = torch.frombuffer(bytearray(masks), dtype=torch.uint8).view(len(answers), -1) > 0
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    return hook


def main(folder: str | None = None, answers: int = 4) -> list[str]:
    """Prints, and returns, answers to a prompt."""
    if folder is None:
        tokenizer = train_tokenizer([json.dumps(SCHEMA)] * 2, 300)
        config = llama.Config(tokenizer.get_vocab_size(), 32, 64, 1, 2, 2)
        params, end = P.init(config, seed=0), tokenizer.token_to_id(END_OF_TEXT)
    else:
        tokenizer = load_tokenizer(Path(folder))
        config, params = P.load_pretrained(folder)
        end = answer_end_ids(Path(folder), tokenizer)[0]
    found = train.generate(
        params,
        config,
        [tokenizer.encode("A person as JSON: ").ids] * answers,
        max_new=100,
        stop_ids=[end],
        logits_fn=json_hook(tokenizer, SCHEMA, vocab_size=config.vocab_size, end=end),
    )
    texts = [tokenizer.decode([token for token in tokens if token != end]) for tokens in found.tokens]
    print("\n".join(texts))
    return texts


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Continuations of texts, for commands and reports."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from fnmodels.errors import UserError
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from train.data.encoder import beginning_ids

from .loops import generate
from .sampling import Sampling
from .stop import text_of

READABLE = Sampling(temperature=0.8, top_k=50)  # where nothing else is known of a model


def fitted(config: DecoderConfig, ids: Sequence[int], tokens: int) -> tuple[list[int], int]:
    """(the prompt's last ids, the number of new tokens) that fit into the model's context together.

    The prompt is truncated from the left as far as the answer needs it, but not below half of the context; then the
    answer gets the rest.
    """
    context = config.max_position_embeddings
    kept = list(ids)[-max(context - tokens, context // 2, 1) :]
    return kept, max(min(tokens, context - len(kept)), 1)


def complete(
    params: Tree,
    config: DecoderConfig,
    tokenizer: Tokenizer,
    prompt: str,
    end: Sequence[int],
    *,
    tokens: int,
    sampling: Sampling = READABLE,
) -> str:
    """The prompt and its continuation by at most `tokens` tokens, up to one of `end`, as text.

    UserError where the prompt has no tokens.
    """
    ids = prompt_ids(tokenizer, prompt)
    kept, new = fitted(config, ids, tokens)
    # In eager mode, for the text of a run must not depend on what earlier processes compiled.
    found = generate(params, config, [kept], max_new=new, sampling=sampling, seeds=0, stop_ids=end, compile="none")
    # together: the last token of the prompt and the first new one may share a character's bytes
    answer = [token for token in found.tokens[0] if token not in end]
    return text_of(tokenizer, ids + answer)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a text, with the special tokens that the tokenizer adds in front. UserError where there are none."""
    ids = beginning_ids(tokenizer, prompt)
    if not ids:
        raise UserError(
            "the prompt is empty, and this tokenizer adds no token in front of a text: give at least one character"
        )
    return ids

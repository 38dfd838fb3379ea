"""Autoregressive sampling of a continuation, token by token, without a KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fnmodels
from fnmodels.errors import UserError
from fnmodels.models.common.registry import DecoderConfig
from fnmodels.tree import Tree

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def sample_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token from logits [V]: the argmax at temperature 0, else drawn from the `top_k` likeliest (None: all)."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.float() / temperature
    if top_k is not None and top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(scaled.softmax(0).cpu(), 1, generator=generator))


@torch.no_grad()
def continuation(
    params: Tree,
    config: DecoderConfig,
    ids: Sequence[int],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end: Sequence[int] = (),
) -> Iterator[int]:
    """Yields at most `tokens` token ids that continue `ids`, and stops at one of `end`.

    The context is truncated to the last `max_position_embeddings` tokens. ValueError where `ids` is empty.
    """
    if not ids:
        raise ValueError("ids is empty: there must be at least one token to continue.")
    generator = torch.Generator().manual_seed(seed)
    family = fnmodels.family_of(config)
    device = next(iter(fnmodels.tree.leaves(params))).device
    context = list(ids)
    for _ in range(tokens):
        context = context[-config.max_position_embeddings :]
        inputs, masks, freqs = fnmodels.prepare(config, torch.tensor([context], device=device))
        x = fnmodels.hidden(params, inputs, masks, freqs, config=config)
        logits = family.unembed(params, x[:, -1:], config=config)[0, 0]
        token = sample_token(logits, temperature, top_k, generator)
        if token in end:
            return
        yield token
        context.append(token)


def complete(
    params: Tree, config: DecoderConfig, tokenizer: Tokenizer, prompt: str, end: Sequence[int], **options: Any
) -> str:
    """The prompt and its continuation as text; `options` are keywords of `continuation`. UserError without tokens."""
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise UserError(
            "--prompt is empty, and this tokenizer adds no token in front of a text: give at least one character"
        )
    new = list(continuation(params, config, ids, end=end, **options))
    # Decoded together: the last token of the prompt and the first new one may share a character's bytes.
    return tokenizer.decode(ids + new, skip_special_tokens=True)

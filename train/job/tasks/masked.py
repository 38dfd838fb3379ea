"""Masked language modeling: {"text"}. The corruption is a function of (seed, step)."""

import functools
from pathlib import Path
from typing import Any

import torch

import params as P
from fnmodels.models.common.family import field_of
from fnmodels.tree import Tree
from train.batch import Entries
from train.eval.pretrained import load_tokenizer
from train.losses.masked_tokens import mask_tokens
from train.losses.next_token import next_token_loss

from .encoder import Encoder, Examples, encoder_of_texts, in_rows, of_family, packed, refuse
from .settings import DocumentSettings

_MASKS = ("[MASK]", "<mask>")


def masked(settings: DocumentSettings, examples: Examples) -> Encoder:
    config, params = _load(settings)
    if field_of(config, "head") != "masked_lm":
        raise refuse(settings.init, f"its head is {config.head!r}, and masked tokens need 'masked_lm'")
    encode, tokenizer = encoder_of_texts(settings, config), load_tokenizer(Path(str(settings.init)))
    mask = next((number for name in _MASKS if (number := tokenizer.token_to_id(name)) is not None), None)
    if mask is None:
        raise refuse(settings.init, f"its tokenizer has none of {', '.join(_MASKS)}")
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]

    def batch(chosen: Examples, generator: torch.Generator, rows: int) -> Entries:
        row, sizes = packed([[encode(one["text"])] for one in chosen])
        tokens, labels = mask_tokens(
            *(row["tokens"], row["segment_ids"], generator),
            mask_id=mask,
            vocab_size=min(tokenizer.get_vocab_size(), config.vocab_size),
            special_ids=special,
        )
        return in_rows(row | {"tokens": tokens, "labels": labels}, sizes, rows)

    return of_family(
        config,
        params,
        kind="masked language model",
        pipeline_tag="fill-mask",
        loss=functools.partial(next_token_loss, config=config),
        load=functools.partial(_params, settings),
        batch=batch,
    )


def _load(settings: DocumentSettings) -> tuple[Any, Tree]:
    options: Any = {"part": "text", "dtype": torch.float32, "copy": True, "ignore_fields": settings.ignore_fields or ()}
    return P.load_pretrained(str(settings.init), **options)


def _params(settings: DocumentSettings) -> Tree:
    return _load(settings)[1]

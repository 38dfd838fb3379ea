"""An embedder on pairs of texts, by in-batch negatives: {"query", "positive"} and {"negatives"} if there are some."""

import functools
from typing import Any

import torch

import params as P
from fnmodels.embedding import Embedder
from fnmodels.errors import UserError
from fnmodels.tree import Tree
from train.batch import Entries
from train.losses.documents import contrastive_loss

from .encoder import Encoder, Examples, encoder_of_texts, in_rows, is_embedder, packed, without_pooler
from .settings import DocumentSettings


def pairs(settings: DocumentSettings, examples: Examples) -> Encoder:
    whole, params, embedder = _load(settings)
    config, params, rest = without_pooler(whole, params)
    encode = encoder_of_texts(settings, config, embedder.max_length, lower_case=embedder.lower_case)

    def batch(chosen: Examples, generator: torch.Generator, rows: int) -> Entries:
        texts = [[one["query"], one["positive"], *one["negatives"]] for one in chosen]
        labels = [i for i, some in enumerate(texts) for _ in some]
        roles = [min(role, 2) for some in texts for role in range(len(some))]
        documents = [[encode(text) for text in some] for some in texts]
        return in_rows(*packed(documents, labels=labels, roles=roles), rows)

    loss: Any = functools.partial(contrastive_loss, config=config, embedder=embedder, temperature=settings.temperature)
    return Encoder(
        kind="embedder of texts",
        pipeline_tag="sentence-similarity",
        usage='config, params, embedder = P.load_embedder("path/to/this/folder/model")',
        config=config,
        params=params,
        spec=embedder.spec(config),
        loss=loss,
        load=functools.partial(_trained, settings),
        batch=batch,
        save=lambda folder, trained: P.save_embedder(folder, whole, {**trained, **rest}, embedder),
    )


def _load(settings: DocumentSettings) -> tuple[Any, Tree, Embedder]:
    options: Any = {"dtype": torch.float32, "copy": True}
    if is_embedder(str(settings.init)):
        if settings.ignore_fields:
            raise UserError(f"--ignore-fields: --init {settings.init} is an embedder's folder, which is read as it is")
        return P.load_embedder(str(settings.init), **options)
    config, params = P.load_pretrained(
        str(settings.init), head="none", part="text", ignore_fields=settings.ignore_fields or (), **options
    )
    return config, params, Embedder(("mean",), max_length=min(settings.length, config.max_position_embeddings))


def _trained(settings: DocumentSettings) -> Tree:
    return without_pooler(*_load(settings)[:2])[1]

"""`Encoder`: a model that is trained on documents, with its loss and its batches; and what its files have in common."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels.errors import UserError
from fnmodels.tree import Tree
from train.batch import Entries
from train.eval.pretrained import check_vocabulary, load_tokenizer
from train.losses.documents import document_batch
from train.parallel.padding import padded

from .settings import DocumentSettings

Examples = Sequence[dict[str, Any]]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Encoder:
    """A model, its loss and its batches.

    Attributes:
        kind: completes "A bert ..." in the model card.
        pipeline_tag: the Hub's name of what the model is for.
        usage: a line of Python that loads the model.
        spec: that of the params.
        load: reads the params again, in another process.
        batch: (examples, generator, rows) -> a batch of at least so many rows.
        save: writes a folder from (folder, trained params).
    """

    kind: str
    pipeline_tag: str
    usage: str
    config: Any
    params: Tree
    spec: Tree
    loss: Callable[..., Any]
    load: Callable[[], Tree]
    batch: Callable[[Examples, torch.Generator, int], Entries]
    save: Callable[[Path, Tree], object]


def of_family(config: Any, params: Tree, **others: Any) -> Encoder:
    """An `Encoder` whose params are all that its family's spec names, and which is saved with them."""
    spec = fnmodels.family_of(config).spec(config)
    usage = 'config, params = P.load_pretrained("path/to/this/folder/model")'
    return Encoder(
        usage=usage,
        config=config,
        params=params,
        spec=spec,
        save=lambda folder, trained: P.save_pretrained(folder, config, trained),
        **others,
    )


def encoder_of_texts(
    settings: DocumentSettings, config: Any, longest: int | None = None, *, lower_case: bool = False
) -> Encode:
    """A function from a text to its token ids, cut to --length and to what the model has positions for."""
    tokenizer = load_tokenizer(Path(str(settings.init)))
    check_vocabulary(tokenizer, config, Path(str(settings.init)))
    tokenizer.enable_truncation(min(settings.length, longest or settings.length, config.max_position_embeddings))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text.lower() if lower_case else text).ids
        return ids

    return encode


def packed(
    documents: Sequence[Sequence[Sequence[int]]], **values: Sequence[int]
) -> tuple[dict[str, Tensor], list[int]]:
    """(one row of the documents of each example, the tokens of each example). values: as of `document_batch`."""
    flat = [document for of_example in documents for document in of_example]
    sizes = [sum(map(len, of_example)) for of_example in documents]
    return document_batch(flat, sum(sizes), **values), sizes


def in_rows(row: dict[str, Tensor], sizes: Sequence[int], rows: int) -> Entries:
    """The batch [1, S] in `rows` rows of whole examples, which ranks or microbatches can share.

    sizes: tokens of each example. A single row stays as it is, and so do all values: a mesh changes no batch.
    """
    if rows == 1:
        return row
    groups = [int(group.sum()) for group in torch.tensor(sizes).tensor_split(rows)]
    length, start, pieces = max(groups), 0, []
    for size in groups:
        piece = {name: x[:, start : start + size] for name, x in row.items()}
        ids = piece["segment_ids"]
        if size:
            piece["segment_ids"] = ids - ids.min() + 1
        pieces.append(dict(padded(piece, length)))
        start += size
    return {name: torch.cat([piece[name] for piece in pieces]) for name in row}


def without_pooler(config: Any, params: Tree) -> tuple[Any, Tree, Tree]:
    """(config, params, {"pooler": its params}) without the pooler of a BERT, which no loss here reads."""
    if "pooler" not in params:
        return config, params, {}
    rest = {name: value for name, value in params.items() if name != "pooler"}
    return replace(config, pooler=0), rest, {"pooler": params["pooler"]}


def is_embedder(init: str) -> bool:
    """Whether the folder says how to make one vector of a text."""
    return os.path.lexists(Path(init) / "modules.json")


def refuse(init: str | None, what: str) -> UserError:
    """The error for a checkpoint that cannot be trained so."""
    return UserError(f"--init {init}: {what}")

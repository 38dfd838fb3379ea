"""A classifier of texts: {"text", "label"}."""

import functools
import json
from dataclasses import replace
from typing import Any

import torch

import params as P
from fnmodels.errors import UserError
from fnmodels.models.common.family import field_of
from fnmodels.tree import Tree
from train.batch import Entries
from train.data.examples import label_numbers
from train.losses.documents import classification_loss

from .encoder import Encoder, Examples, encoder_of_texts, in_rows, of_family, packed, without_pooler
from .settings import DocumentSettings

Numbers = dict[str | int, int]


def labels(settings: DocumentSettings, examples: Examples) -> Encoder:
    wanted = label_numbers(examples)
    config, params, numbers = _classifier(settings, wanted)
    encode = encoder_of_texts(settings, config)

    def batch(chosen: Examples, generator: torch.Generator, rows: int) -> Entries:
        documents = [[encode(one["text"])] for one in chosen]
        return in_rows(*packed(documents, labels=[numbers[one["label"]] for one in chosen]), rows)

    return of_family(
        config,
        params,
        kind="classifier of texts",
        pipeline_tag="text-classification",
        loss=functools.partial(classification_loss, config=config),
        load=functools.partial(_params, settings, wanted),
        batch=batch,
    )


def check_labels(examples: Examples, heldout: Examples) -> None:
    """UserError where held-out examples have a label that the classifier does not learn."""
    known = {one["label"] for one in examples}
    if unknown := [one["label"] for one in heldout if one["label"] not in known]:
        raise UserError(f"--heldout has the label {unknown[0]!r}, which no example of --data has")


def _params(settings: DocumentSettings, numbers: Numbers) -> Tree:
    return _classifier(settings, numbers)[1]


def _classifier(settings: DocumentSettings, numbers: Numbers) -> tuple[Any, Tree, Numbers]:
    """(config, params, {label: number}): --init's classifier and numbers if it has all labels, else with a new head."""
    ignored = settings.ignore_fields or ()
    options: Any = {"part": "text", "dtype": torch.float32, "copy": True, "ignore_fields": ignored}
    init, count = str(settings.init), len(numbers)
    known = P.load_config(init, part="text", ignore_fields=ignored)
    if field_of(known, "head") == "classification":
        names = json.loads(dict(known.extra).get("id2label", "{}"))
        names = names or {str(i): f"LABEL_{i}" for i in range(known.num_labels)}
        of_init = {str(name): int(number) for number, name in names.items()}
        if of_init.keys() >= set(map(str, numbers)):
            return *P.load_pretrained(init, **options), {label: of_init[str(label)] for label in numbers}
    if count < 2:
        raise UserError(f"{settings.data} has one label, {next(iter(numbers))!r}; a classifier needs two")
    config, params = P.load_pretrained(init, head="none", **options)
    config, params, _ = without_pooler(config, params)
    config, params = P.new_head(config, params, head="classification", num_labels=count, seed=settings.seed)
    names = json.dumps({str(number): str(label) for label, number in numbers.items()}, sort_keys=True)
    kept: Any = config
    extra = (*(entry for entry in kept.extra if entry[0] != "id2label"), ("id2label", names))
    return replace(kept, extra=extra), params, numbers

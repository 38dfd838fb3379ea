"""python -m train.commands.documents --run DIR --data FILE --init FOLDER --loss KIND: trains encoders on lines of JSON.

    --loss pairs      an embedder, by in-batch negatives: {"query", "positive"} and {"negatives"} if there are some
    --loss labels     a classifier of texts: {"text", "label"}
    --loss masked     masked language modeling: {"text"}
    --loss captions   CLIP or SigLIP on pictures: {"image", "text"}

    DIR/model         a folder that transformers reads, of pairs sentence-transformers too
    DIR/metrics.jsonl, DIR/steps    as of `python -m train.flow`; --resume continues to the same weights, bit for bit

--init is a folder with a tokenizer.json; an encoder or a decoder, with or without a head. One process, fp32; the losses
in a loop of one's own run over a mesh too.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels.embedding import Embedder
from fnmodels.errors import UserError
from fnmodels.files import check_folder, copy_file
from fnmodels.models.common.family import field_of
from fnmodels.tree import Tree
from params.io.files import inner_file, plain_file
from train import checkpoint
from train.batch import Batch
from train.command_line import Parser, check_installed, program_name, run_command
from train.data.examples import KINDS, chosen, label_numbers, read_examples
from train.data.pictures import Pixels, read_picture
from train.eval.pretrained import check_vocabulary, load_tokenizer
from train.job.cpu_memory import bound_product_caches, keep_freed_memory
from train.job.setting_types import POSITIVE, integer
from train.losses.documents import classification_loss, contrastive_loss, document_batch
from train.losses.image_text import image_text_batch, image_text_loss
from train.losses.masked_tokens import mask_tokens
from train.losses.next_token import next_token_loss
from train.state import init_state
from train.step import make_step

from . import plain_run

_MASKS = ("[MASK]", "<mask>")
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"),
    "preprocessor_config.json",
)
Examples = list[dict[str, Any]]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Job:
    """A model and its loss. spec: that of the params. batch: of examples and a generator. save: writes a folder."""

    config: Any
    params: Tree
    spec: Tree
    loss: Callable[..., Any]
    batch: Callable[[Examples, torch.Generator], Batch]
    save: Callable[[Path, Tree], object]


def _name() -> str:
    return program_name("fnmodels-documents", "train.commands.documents")


def parser() -> Parser:
    flags = plain_run.new_parser(
        _name(),
        "Train an encoder on pairs, labels, masked tokens or captions.",
        data="lines of JSON, one example each",
        init="start from this checkpoint, a folder with a tokenizer.json (needed)",
        learning_rate=5e-5,
    )
    flags.add_argument("--loss", choices=KINDS, required=True, help="what is trained")
    plain_run.number(flags, "length", integer(1), 256, "tokens of a text at most; longer ones are cut")
    plain_run.number(flags, "temperature", POSITIVE, 0.05, "of pairs: what similarities are divided by")
    return flags


def train(arguments: argparse.Namespace) -> int:
    if arguments.init is None:
        raise UserError("--init is needed: a folder with config.json, weights and tokenizer.json")
    examples = read_examples(arguments.data, arguments.loss)
    pictures = pictures_of(arguments.data, examples) if arguments.loss == "captions" else []
    identity = plain_run.identity_of(arguments, pictures)
    saved = plain_run.saved_step(arguments, identity)
    job = _JOBS[arguments.loss](arguments, examples)
    optimizer = plain_run.optimizer_of(arguments, job.config, job.spec)
    state = init_state(job.params, optimizer, copy=False)
    if saved is not None:
        state = checkpoint.load(saved, state)

    def batch(number: int) -> Batch:
        own = chosen(examples, arguments.seed, number, arguments.batch)
        return job.batch(own, plain_run.generator_of(arguments.seed, number))

    step = make_step(job.loss, optimizer, clip=arguments.clip)
    state = plain_run.run_steps(arguments, step, state, batch, identity)
    check_folder(arguments.run / "model")
    job.save(arguments.run / "model", state.params)
    for name in _COPIED:
        if os.path.lexists(arguments.init / name):
            copy_file(plain_file(arguments.init, name), arguments.run / "model" / name)
    print(f"model: {arguments.run / 'model'}")
    return plain_run.finished(arguments.run)


def pictures_of(data: Path, examples: Examples) -> list[Path]:
    """The files of pictures that captions name; UserError for missing ones, UnsafePathError for those outside."""
    names = [one["image"] for one in examples]
    if missing := [name for name in names if not (data.parent / name).is_file()]:
        raise UserError(f"{data} names {data.parent / missing[0]}, which is no file; {len(missing)} are missing")
    return [inner_file(data.parent, name) for name in names]


def _encode(
    arguments: argparse.Namespace, config: Any, longest: int | None = None, *, lower_case: bool = False
) -> Encode:
    """The token ids of a text, cut to --length and to what the model has positions for."""
    tokenizer = load_tokenizer(arguments.init)
    check_vocabulary(tokenizer, config.vocab_size, arguments.init)
    tokenizer.enable_truncation(min(arguments.length, longest or arguments.length, config.max_position_embeddings))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text.lower() if lower_case else text).ids
        return ids

    return encode


def _pairs(arguments: argparse.Namespace, examples: Examples) -> Job:
    options: Any = {"dtype": torch.float32, "copy": True}
    if os.path.lexists(arguments.init / "modules.json"):
        config, params, embedder = P.load_embedder(arguments.init, **options)
    else:
        config, params = P.load_pretrained(arguments.init, head="none", part="text", **options)
        embedder = Embedder(("mean",), max_length=min(arguments.length, config.max_position_embeddings))
    whole, (config, params, rest) = config, _without_pooler(config, params)
    encode = _encode(arguments, config, embedder.max_length, lower_case=embedder.lower_case)

    def batch(own: Examples, generator: torch.Generator) -> Batch:
        texts = [[one["query"], one["positive"], *one["negatives"]] for one in own]
        labels = [i for i, some in enumerate(texts) for _ in some]
        roles = [min(role, 2) for some in texts for role in range(len(some))]
        documents = [encode(text) for some in texts for text in some]
        return document_batch(documents, sum(map(len, documents)), labels=labels, roles=roles)

    return Job(
        config,
        params,
        embedder.spec(config),
        functools.partial(contrastive_loss, config=config, embedder=embedder, temperature=arguments.temperature),
        batch,
        lambda folder, trained: P.save_embedder(folder, whole, {**trained, **rest}, embedder),
    )


def _without_pooler(config: Any, params: Tree) -> tuple[Any, Tree, Tree]:
    """(config, params, {"pooler": its params}) without the pooler of a BERT, which no loss here reads."""
    if "pooler" not in params:
        return config, params, {}
    return replace(config, pooler=0), {k: v for k, v in params.items() if k != "pooler"}, {"pooler": params["pooler"]}


def _labels(arguments: argparse.Namespace, examples: Examples) -> Job:
    numbers = label_numbers(examples)
    config, params, numbers = _classifier(arguments, numbers)
    encode = _encode(arguments, config)

    def batch(own: Examples, generator: torch.Generator) -> Batch:
        documents = [encode(one["text"]) for one in own]
        labels = [numbers[one["label"]] for one in own]
        return document_batch(documents, sum(map(len, documents)), labels=labels)

    return _whole(config, params, functools.partial(classification_loss, config=config), batch)


def _classifier(arguments: argparse.Namespace, numbers: dict[str | int, int]) -> tuple[Any, Tree, dict[str | int, int]]:
    """(config, params, {label: number}): --init's classifier and numbers if it has all labels, else with a new head."""
    options: Any = {"part": "text", "dtype": torch.float32, "copy": True}
    labels, known = len(numbers), P.load_config(arguments.init, part="text")
    if field_of(known, "head") == "classification":
        names = json.loads(dict(known.extra).get("id2label", "{}"))
        names = names or {str(i): f"LABEL_{i}" for i in range(known.num_labels)}
        own = {str(name): int(number) for number, name in names.items()}
        if own.keys() >= set(map(str, numbers)):
            return *P.load_pretrained(arguments.init, **options), {label: own[str(label)] for label in numbers}
    if labels < 2:
        raise UserError(f"{arguments.data} has one label, {next(iter(numbers))!r}; a classifier needs two")
    config, params = P.load_pretrained(arguments.init, head="none", **options)
    config, params, _ = _without_pooler(config, params)
    config, params = P.new_head(config, params, head="classification", num_labels=labels, seed=arguments.seed)
    names = json.dumps({str(number): str(label) for label, number in numbers.items()}, sort_keys=True)
    kept: Any = config
    extra = (*(entry for entry in kept.extra if entry[0] != "id2label"), ("id2label", names))
    return replace(kept, extra=extra), params, numbers


def _masked(arguments: argparse.Namespace, examples: Examples) -> Job:
    config, params = P.load_pretrained(arguments.init, part="text", dtype=torch.float32, copy=True)
    if field_of(config, "head") != "masked_lm":
        raise UserError(f"--init {arguments.init}: its head is {config.head!r}, and masked tokens need 'masked_lm'")
    encode, tokenizer = _encode(arguments, config), load_tokenizer(arguments.init)
    mask = next((found for name in _MASKS if (found := tokenizer.token_to_id(name)) is not None), None)
    if mask is None:
        raise UserError(f"--init {arguments.init}: its tokenizer has none of {', '.join(_MASKS)}")
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]

    def batch(own: Examples, generator: torch.Generator) -> Batch:
        documents = [encode(one["text"]) for one in own]
        made = document_batch(documents, sum(map(len, documents)))
        tokens, labels = mask_tokens(
            *(made["tokens"], made["segment_ids"], generator),
            mask_id=mask,
            vocab_size=tokenizer.get_vocab_size(),
            special_ids=special,
        )
        return made | {"tokens": tokens, "labels": labels}

    return _whole(config, params, functools.partial(next_token_loss, config=config), batch)


def _captions(arguments: argparse.Namespace, examples: Examples) -> Job:
    check_installed(("PIL",))
    config, params = P.load_pretrained(arguments.init, dtype=torch.float32, copy=True)
    if not hasattr(fnmodels.family_of(config), "similarity"):
        raise UserError(f"--init {arguments.init} is a {config.model_type}; captions need a CLIP or a SigLIP")
    pixels = Pixels.of(arguments.init, config.vision.image_size)
    encode = _encode(arguments, config.text)

    def batch(own: Examples, generator: torch.Generator) -> Batch:
        images: list[Tensor] = [read_picture(arguments.data.parent / one["image"], pixels) for one in own]
        return image_text_batch([encode(one["text"]) for one in own], images, config)

    return _whole(config, params, functools.partial(image_text_loss, config=config), batch)


def _whole(config: Any, params: Tree, loss: Callable[..., Any], batch: Callable[..., Batch]) -> Job:
    spec = fnmodels.family_of(config).spec(config)
    return Job(config, params, spec, loss, batch, lambda folder, trained: P.save_pretrained(folder, config, trained))


_JOBS = {"pairs": _pairs, "labels": _labels, "masked": _masked, "captions": _captions}


def main(argv: Sequence[str] | None = None) -> int:
    bound_product_caches()
    keep_freed_memory()
    return run_command(_name(), parser, train, argv, needs=("tokenizers",))


if __name__ == "__main__":
    sys.exit(main())

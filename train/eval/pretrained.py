"""Loading of a Hugging Face checkpoint folder for commands: model (adapters too), tokenizer and end-of-text ids."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import params as P
from fnmodels.errors import UserError
from fnmodels.tree import Tree
from params.io.files import read_json
from train.data.encoder import disable_truncation


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """tokenizer.json of a checkpoint folder, without truncation and padding. UserError where it cannot be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such checkpoint folder")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder}: the checkpoint folder has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{path} is not a tokenizer that the tokenizers library can read ({error})") from error
    disable_truncation(tokenizer)
    return tokenizer


def weights_folder(folder: Path) -> Path:
    """The folder of config.json and the weights: `folder`, or the base model of its adapters. UserError without it."""
    if not (folder / P.lora.CONFIG).is_file() or (folder / "config.json").is_file():
        return folder
    values = read_json(folder / P.lora.CONFIG)
    base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    if not isinstance(base, str) or not Path(base).is_dir():
        raise UserError(f"{folder} holds adapters, and the folder of their base model, {base!r}, is not there")
    return Path(base)


def load_model(folder: Path, *, merge: bool = False, **options: Any) -> tuple[Any, Tree]:
    """(config, params) of a checkpoint folder, or of a folder of adapters with their base model.

    options: keywords of `params.load_pretrained`. merge: adds adapters into the weights.
    """
    base = weights_folder(folder)
    config, params = P.load_pretrained(base, **options)
    if base != folder:
        params = P.lora.load_adapters(folder, config, params)
    return config, P.lora.merge(params) if merge else params


def end_ids(folder: Path) -> tuple[int, ...]:
    """The end-of-text ids, from generation_config.json (which lists those of chat models too), else config.json."""
    folder = weights_folder(folder)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        try:
            value: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path} is not JSON that can be read ({error})") from error
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, folder: Path) -> None:
    """UserError where the tokenizer has ids beyond the embedding; unused rows of the embedding are fine."""
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise UserError(
            f"{folder}: the tokenizer's ids go up to {highest}, but the model's vocabulary has {vocab_size} entries: "
            "tokenizer.json and config.json belong to different models"
        )


def copy_companions(source: Path, folder: Path) -> None:
    """Copies the further files that transformers reads (generation config, chat template, ...) to a new checkpoint."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)

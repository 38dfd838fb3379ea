"""What the commands need of a Hugging Face checkpoint folder beside its weights: the tokenizer, the end of a text."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import params as P
from fnmodels.errors import UserError
from fnmodels.tree import Tree
from params.io.files import read_json
from train.data.encoder import disable_truncation


def load_tokenizer(folder: Path) -> Tokenizer:
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
    """Where config.json and the weights are: the folder itself, or of adapters the one that they say they belong to."""
    if not (folder / P.lora.CONFIG).is_file() or (folder / "config.json").is_file():
        return folder
    values = read_json(folder / P.lora.CONFIG)
    base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    if not isinstance(base, str) or not Path(base).is_dir():
        raise UserError(f"{folder} holds adapters, and the folder of their base model, {base!r}, is not there")
    return Path(base)


def load_model(folder: Path, *, merge: bool = False, **how: Any) -> tuple[Any, Tree]:
    """(config, params) of a checkpoint folder, or of a folder of adapters and what they belong to. `how` as in
    `params.load_pretrained`. merge: adapters are added into the weights.
    """
    base = weights_folder(folder)
    config, params = P.load_pretrained(base, **how)
    if base != folder:
        params = P.lora.load_adapters(folder, config, params)
    return config, P.lora.merge(params) if merge else params


def end_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text: by generation_config.json (chat models add theirs there), else by config.json."""
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
    """A tokenizer may leave rows of the embedding unused, but must not name more than there are."""
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise UserError(
            f"{folder}: the tokenizer's ids go up to {highest}, but the model's vocabulary has {vocab_size} entries: "
            "tokenizer.json and config.json belong to different models"
        )


def copy_companions(source: Path, folder: Path) -> None:
    """What transformers reads beside tokenizer.json and config.json: the new folder is used as the old one was."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)

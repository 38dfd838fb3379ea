"""From the config.json of a checkpoint folder to the Config of its family.

A family reads what its maths depends on. The fields that speak of the checkpoint instead are held against it here:
which class it was saved from, in which dtype, and which tokens end a text.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from fnmodels.errors import CheckpointError, ConfigError, UnsupportedError
from fnmodels.models.common.config_json import shown
from fnmodels.models.common.registry import families, family_for
from params.io.files import plain_file, read_json

CONFIG = "config.json"
CONFIG_LIMIT = 10_000_000  # bytes; labels of 20,000 classes take one
TOKENS_LIMIT = 10_000_000  # forty times the largest vocabulary that was published
DTYPES = ("float32", "bfloat16", "float16", "float64")


def load_config(path: str | os.PathLike[str]) -> Any:
    """The Config of a checkpoint folder; the family is found by the file's model_type."""
    return read_config(path)[0]


def read_config(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """(the Config, all that config.json holds) of a checkpoint folder."""
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(
            errno.ENOENT, "There is no such checkpoint folder (nothing is ever downloaded)", str(path)
        )
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "A checkpoint is a folder, not a file", str(path))
    unfinished = sorted(path.name for path in folder.glob(".saving-*"))
    if unfinished and not (folder / CONFIG).exists():
        text = (
            f"There is no config.json: a save was cut short while it moved its files here from {unfinished[0]} "
            "(params.recover finishes it) in the folder"
        )
        raise FileNotFoundError(errno.ENOENT, text, str(folder))
    file = plain_file(folder, CONFIG)
    values = read_json(file, CONFIG_LIMIT)
    try:
        if not isinstance(values, dict):
            raise ConfigError("it must hold a JSON object.")
        if "model_type" not in values:
            raise ConfigError("'model_type' is not there, which is needed.")
        if not isinstance(values["model_type"], str):
            raise ConfigError(f"'model_type' must be a string, not {shown(values['model_type'])}.")
        config = family_for(values["model_type"]).Config.from_hf(values)
        _check_dtype(values)
        _check_tokens(values)
        _check_architectures(values, config.to_hf().get("architectures"))
    except CheckpointError as error:
        raise type(error)(f"{file}: {error}") from None
    return config, values


def _check_dtype(values: dict[str, Any]) -> None:
    """It is only what most tensors are said to have, for each is read with its own; but it must be possible."""
    given = {name: values[name] for name in ("dtype", "torch_dtype") if values.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise ConfigError(f"{name!r} is {shown(value)}, but must be one of {', '.join(DTYPES)}.")
        if value not in DTYPES:
            raise UnsupportedError(f"{name!r} is {shown(value)}; supported are {', '.join(DTYPES)}.")
    if len(set(given.values())) > 1:
        raise ConfigError(f"'dtype' is {given['dtype']} and 'torch_dtype' is {given['torch_dtype']}: they disagree.")


def _check_tokens(values: dict[str, Any]) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            # -1 stands for none. A token beyond the vocabulary is let pass: GPT-2's 50256, which is the default of its
            # class, is in published files of small vocabularies, and paddings that were added later are not rows.
            if isinstance(one, bool) or not isinstance(one, int) or not -1 <= one <= TOKENS_LIMIT:
                raise ConfigError(f"{name!r} is {shown(value)}, but must be the number of a token, or a list of them.")


def _check_architectures(values: dict[str, Any], wanted: list[str] | None) -> None:
    """The class that was saved, where it is said, must be the one of this model type: a LlamaForCausalLM is a llama.

    So must that without a head, a LlamaModel or a Gemma3TextModel: whether the tensors are all there is seen later.
    """
    given = values.get("architectures")
    if given is None or wanted is None:
        return
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"'architectures' is {shown(given)}, but must be a list of names, as {shown(wanted)}.")
    model_type = values["model_type"]
    for name in given:
        if name not in wanted and name not in [_headless(one, model_type) for one in wanted]:
            other = _model_type_of(name)
            if other not in (model_type, None):
                raise ConfigError(
                    f"'model_type' is {model_type!r}, but 'architectures' has {name!r}, which is {other}."
                )
            raise UnsupportedError(f"'architectures' has {name!r}; of {model_type!r} only {wanted[0]} is supported.")


def _headless(architecture: str, model_type: str) -> str:
    # where Gemma3Model is what has a vision tower too, the type of its text says so, and so does the text's class
    return re.sub("(For[A-Z]|LMHead).*", "TextModel" if model_type.endswith("_text") else "Model", architecture)


def _model_type_of(architecture: str) -> str | None:
    """The known model type that a class's name begins with: GPT2LMHeadModel is gpt2, Gemma3Model is not gemma."""
    begins = [known for known in families() if architecture.lower().startswith(known.replace("_", ""))]
    whole = [known for known in begins if architecture[len(known.replace("_", "")) :][:1].isupper()]
    return max(whole, key=len, default=None)

"""Reading config.json of a checkpoint folder into the Config of its family.

The family's `Config.from_hf` reads the fields that its maths depends on. The fields about the checkpoint are checked
here: the class it was saved from (architectures), the dtype, and the special tokens.
"""

import errno
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fnmodels.errors import CheckpointError, ConfigError, UnsupportedError
from fnmodels.models.common.config_json import IGNORED_FIELDS, ConfigJson, IgnoreFields, shown
from fnmodels.models.common.family import field_of, traits_of
from fnmodels.models.common.heads import CLASSES, DECODER_HEADS
from fnmodels.models.common.registry import (
    config_class,
    families,
    family_of,
    family_reading,
    model_type_of,
    text_config,
    to_hf,
)
from params.io.files import read_json
from params.quantized.methods import read_quantization

from .hub import local_folder
from .wrapped_text import refuse_whole, text_values

CONFIG = "config.json"
CONFIG_LIMIT = 10_000_000  # bytes; the labels of 20,000 classes take 1 MB
TOKENS_LIMIT = 10_000_000  # forty times the largest published vocabulary
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn")


def load_config(
    path: str | os.PathLike[str],
    *,
    family: Any = None,
    part: str | None = None,
    ignore_fields: Collection[str] = (),
    revision: str | None = None,
) -> Any:
    """Reads the Config of a checkpoint alone, without its weights.

    Args:
        path: A folder with config.json, or "org/name", a model of the Hub (the extra `hub`).
        family: The module that reads this checkpoint; None finds that of its model_type.
        part: "text" or "vision": the Config of that part of a model of several parts; None: that of the model.
        ignore_fields: Names of fields of config.json that no family knows and that are read over.
        revision: Of a model of the Hub, its branch, tag or commit.

    Returns:
        The frozen Config of the family.

    Raises:
        ConfigError: A field is missing, wrong, or unknown.
        UnsupportedError: No family reads this model_type.
    """
    folder = local_folder(path, revision)
    return part_of(read_config(folder, family, part, ignore_fields)[0], part, folder)


def part_of(config: Any, part: str | None, folder: Path) -> Any:
    """The Config of one part of a model, None for the model; ValueError for a part that it does not have."""
    if part is None:
        return config
    family = family_of(config)
    single = {"text" if traits_of(family).inputs == "tokens" else "vision": config}
    parts: dict[str, Any] = getattr(family, "towers", lambda config: single)(config)
    if part not in parts:
        raise ValueError(f"{folder}: the model has no part {part!r}; it has {', '.join(parts)}.")
    return parts[part]


def read_config(
    path: str | os.PathLike[str], family: Any = None, part: str | None = None, ignore_fields: Collection[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """(Config, content of config.json as a dict) of a checkpoint folder. family: None finds it by config.json.

    part="text" of a model that is not read as a whole gives the Config of its text model.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint folder", str(path))
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"A checkpoint is a folder, not a file{_advice(folder)}", str(path))
    unfinished = sorted(path.name for path in folder.glob(".saving-*"))
    if unfinished and not (folder / CONFIG).exists():
        text = (
            f"There is no config.json: a save was cut short while it moved its files here from {unfinished[0]} "
            "(params.recover finishes it) in the folder"
        )
        raise FileNotFoundError(errno.ENOENT, text, str(folder))
    file = folder / CONFIG
    values = read_json(file, CONFIG_LIMIT)
    try:
        if not isinstance(values, dict):
            raise ConfigError("it must hold a JSON object.")
        model_type = model_type_of(values)
        if "model_type" not in values and "_class_name" not in values:
            raise ConfigError("'model_type' is not there, which is needed.")
        if not isinstance(model_type, str):
            raise ConfigError(f"'model_type' must be a string, not {shown(model_type)}.")
        ignored = IgnoreFields(frozenset(ignore_fields))
        inner_text = text_values(values) if family is None and part == "text" else None
        if family is None and part != "text":
            refuse_whole(values)
        reading = inner_text or values
        read = config_class(family or family_reading(reading, part)).from_hf
        with ignored.asked():
            config = read(reading)
            if ignored.names - ignored.used.keys():  # they may be of the quantization, which `header_checks` reads
                read_quantization(values)
        if unused := ignored.names - ignored.used.keys() - _ignored_earlier(values):
            raise ConfigError(
                f"ignore_fields has {', '.join(map(shown, sorted(unused)))}, which is no unknown field: it is read, or "
                "known to change nothing, or not there."
            )
        _record(config, ignored)
        _check_dtype(reading)
        _check_tokens(reading)
        named = to_hf(with_lm_head(config)).get("architectures")
        classes = traits_of(family_of(config)).classes
        alone = text_config(config) is config  # a model that sees or hears has the head of its own class alone
        heads = [head for head in traits_of(family_of(config)).heads if head in DECODER_HEADS and alone]
        _check_architectures(reading, named and [*named, *filter(None, [classes.get(str(model_type))])], heads)
    except CheckpointError as error:
        raise type(error)(f"{file}: {error}") from None
    return config, values


def _advice(file: Path) -> str:
    """Advice, as the end of a sentence, on a file that stands where a checkpoint's folder belongs."""
    if file.suffix.lower() == ".gguf":
        return f" (params.load_pretrained reads a GGUF file, and fnmodels-convert {file} FOLDER makes a folder)"
    if file.suffix == ".safetensors":
        return "; name the folder that holds it beside its config.json"
    if file.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        return "; nothing is unpickled: save_pretrained of transformers writes a folder with safetensors"
    return "; of single files, GGUF files named *.gguf are read"


def with_lm_head(config: Any) -> Any:
    """The decoder with a head for tokens of its own, if only its files say whether it has one; else unchanged."""
    if field_of(config, "head_by_file"):
        return replace(config, tie_word_embeddings=False)
    decoder = text_config(config)
    causal = traits_of(family_of(decoder)).causal and hasattr(decoder, "num_labels")  # text towers have no heads
    if causal and field_of(decoder, "head") == "none":
        return with_head(config, "lm")
    return config


def with_head(config: Any, head: str) -> Any:
    """The config with a head, "none" or "lm": of a model that reads images or speech, that of its text."""
    if (decoder := text_config(config)) is config:
        return replace(config, head=head, **({"num_labels": 0} if hasattr(config, "num_labels") else {}))
    return replace(config, text=with_head(decoder, head))


def _ignored_earlier(values: Mapping[str, Any]) -> set[str]:
    """The fields that were ignored when the file was written, in any object of a model."""
    ignored = set(values.get(IGNORED_FIELDS) or {})
    inner = (value for name, value in values.items() if name.endswith("_config") and isinstance(value, dict))
    return ignored.union(*map(_ignored_earlier, inner))


def _record(config: Any, ignored: IgnoreFields) -> None:
    """Add to the config what was ignored in an object that keeps nothing for saving, such as that of a rope."""
    if ignored.used and (lost := ignored.used.keys() - _ignored_earlier(to_hf(config))):
        extra = dict(config.extra)
        record = json.loads(extra.get(IGNORED_FIELDS, "{}")) | {name: ignored.used[name] for name in lost}
        extra[IGNORED_FIELDS] = json.dumps(record, sort_keys=True)
        object.__setattr__(config, "extra", tuple(extra.items()))


def _check_dtype(values: ConfigJson) -> None:
    """Check the declared dtype, which only describes most tensors: each is read in the dtype of its header."""
    declared = {name: values[name] for name in ("dtype", "torch_dtype") if values.get(name) is not None}
    for name, value in declared.items():
        if not isinstance(value, str):
            raise ConfigError(f"{name!r} is {shown(value)}, but must be one of {', '.join(DTYPES)}.")
        declared[name] = value.removeprefix("torch.")
        if declared[name] not in (*DTYPES, "auto"):
            raise UnsupportedError(f"{name!r} is {shown(value)}; supported are {', '.join(DTYPES)}.")
    if len(set(declared.values()) - {"auto"}) > 1:
        raise ConfigError(
            f"'dtype' is {declared['dtype']} and 'torch_dtype' is {declared['torch_dtype']}: they disagree."
        )


def _check_tokens(values: ConfigJson) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            # -1 means none. A token beyond the vocabulary is accepted: GPT-2's 50256, the default of its class, is in
            # published files of small vocabularies, and padding tokens added later have no embedding row.
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not -1 <= token_id <= TOKENS_LIMIT:
                raise ConfigError(f"{name!r} is {shown(value)}, but must be the number of a token, or a list of them.")


def _check_architectures(values: ConfigJson, wanted: list[str] | None, heads: Sequence[str]) -> None:
    """Check that `architectures`, if present, names this model type's class, e.g. LlamaForCausalLM for llama.

    heads: others that the family's classes have, for a message. The class without a head (LlamaModel, Gemma3TextModel)
    passes too: missing tensors are found later.
    """
    declared = values.get("architectures")
    if declared is None or wanted is None:
        return
    if not isinstance(declared, list) or not all(isinstance(name, str) for name in declared):
        raise ConfigError(f"'architectures' is {shown(declared)}, but must be a list of names, as {shown(wanted)}.")
    model_type = values["model_type"]
    # Gemma3Model includes the vision tower; the text model's type is gemma3_text and its class Gemma3TextModel
    end = "TextModel" if model_type.endswith("_text") else "Model"
    headless = [re.sub("(For[A-Z]|LMHead).*", end, architecture) for architecture in wanted]
    stem = re.sub("(Text)?Model$", "", headless[0])
    supported = dict.fromkeys([*wanted, *headless, *(stem + CLASSES[head] for head in ("lm", *heads) if heads)])
    spelled = {architecture.lower() for architecture in (*wanted, *headless)}
    for name in declared:  # files of 2019 say WithLMHead, and early ones of Llama LLaMAForCausalLM
        masked = name.replace("ForPreTraining", "ForMaskedLM")  # where the family has accepted it
        if not {name.lower(), masked.lower()} & spelled and name.replace("WithLMHead", "") not in headless:
            other = _model_type_of(name)
            if other not in (model_type, None):
                raise ConfigError(
                    f"'model_type' is {model_type!r}, but 'architectures' has {name!r}, which is {other}."
                )
            raise UnsupportedError(
                f"'architectures' has {name!r}; of {model_type!r} supported are {', '.join(supported)}."
            )


def _model_type_of(architecture: str) -> str | None:
    """The known model type at the start of a class name, or None: GPT2LMHeadModel is gpt2, Gemma3Model is not gemma."""
    prefixes = [known for known in families() if architecture.lower().startswith(known.replace("_", ""))]
    matches = [known for known in prefixes if architecture[len(known.replace("_", "")) :][:1].isupper()]
    return max(matches, key=len, default=None)

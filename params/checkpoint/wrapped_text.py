"""The text model inside of a model that is not read as a whole: its config.json, and its tensors among the others.

Any model counts whose config.json has an object of a text model that is read. Where the text's tensors stand is looked
up in the files: published names, those of remote code and those of transformers in memory differ.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fnmodels.errors import MismatchError, UnsupportedError
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.registry import families, is_read, model_type_of
from fnmodels.models.common.storage import disk_name, disk_names
from params.quantized.weight import Found

from . import tensor_map
from .tensor_map import StoredLeaf

# The names of the object in config.json: of transformers, and of remote code such as InternVL's and DeepSeek-VL's.
_OBJECTS = ("text_config", "llm_config", "language_config", "vlm_config")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# What the objects leave out where it equals the default of the text's own type.
DEFAULTS: dict[str, ConfigJson] = {
    "cohere2": dict(zip(_SIZES, (256000, 8192, 22528, 40, 64), strict=True)),
    "gemma": {**dict(zip(_SIZES, (256000, 3072, 24576, 28, 16), strict=True)), "num_key_value_heads": 16},
    "gemma2": {**dict(zip(_SIZES, (256000, 2304, 9216, 26, 8), strict=True)), "num_key_value_heads": 4},
    "gemma3_text": {**dict(zip(_SIZES, (262208, 2304, 9216, 26, 8), strict=True)), "num_key_value_heads": 4},
    "granite": dict(zip(_SIZES, (32000, 4096, 11008, 32, 32), strict=True)),
    "lfm2": dict(zip(_SIZES, (65536, 2560, 12288, 32, 32), strict=True)),
    "llama": dict(zip(_SIZES, (32000, 4096, 11008, 32, 32), strict=True)),
    "mistral": dict(zip(_SIZES, (32000, 4096, 14336, 32, 32), strict=True)),
    "qwen2": dict(zip(_SIZES, (151936, 4096, 22016, 32, 32), strict=True)),
    "qwen3": dict(zip(_SIZES, (151936, 4096, 22016, 32, 32), strict=True)),
}


def text_values(values: Mapping[str, Any]) -> ConfigJson | None:
    """The config.json of the text model inside of one that is not read; None if the model is read, or has no text."""
    has_inner = any(isinstance(values.get(name), Mapping) for name in _OBJECTS)
    return _inner_text(values) if has_inner and not is_read(model_type_of(values)) else None


def _inner_text(values: Mapping[str, Any]) -> ConfigJson | None:
    """The same of a model of any type: a wrapper may have one that is read as an object."""
    inner = next((values[name] for name in _OBJECTS if isinstance(values.get(name), Mapping)), None)
    if inner is None:
        return None
    model_type = str(inner.get("model_type"))
    if model_type not in families(model_type):
        return _inner_text({**inner, "tie_word_embeddings": values.get("tie_word_embeddings")})
    text = {**DEFAULTS.get(model_type, {}), **inner, "architectures": None}
    if model_type_of(values) == "paligemma":  # attention within the prefix of image and prompt, which is not the text's
        text.pop("use_bidirectional_attention", None)
    untied = {"tie_word_embeddings": False} if values.get("tie_word_embeddings") is False else {}
    return {**text, **untied}


def refuse_whole(values: Mapping[str, Any]) -> None:
    """UnsupportedError for a model of which only the text is read."""
    if (text := text_values(values)) is not None:
        raise UnsupportedError(
            f"The model type {model_type_of(values)!r} is not supported as a whole; "
            f'part="text" reads its text model, {text["model_type"]!r}.'
        )


def text_tensors(folder: Path, config: Any, found: Found) -> tuple[Found, dict[str, int], str]:
    """(the text model's tensors under the names of its own files, {beginning of the others' names: how many}, where).

    where: the beginning of the text's names in these files. MismatchError where no text of this size stands in them.
    """
    parameters = tensor_map.stored_leaves(config)
    names = [name for parameter in parameters for name in disk_names(parameter.stored)]
    first = names[0].partition(".")[0] + "."
    body = [name.removeprefix(first) for name in names if name.startswith(first)]
    where = _beginning(folder, parameters, first, body, found)
    above = where.removesuffix(first) if where.endswith(f".{first}") else ""
    outside = {*names, *tensor_map.tied_names(config)} - {first + name for name in body}  # the head
    inside, others = dict[str, Any](), list[str]()
    for name, tensor in found.items():
        if name.startswith(where):
            inside[first + name.removeprefix(where)] = tensor
        elif name.removeprefix(above) in outside or name in outside:
            inside[name if name in outside else name.removeprefix(above)] = tensor
        else:
            others.append(name)
    return inside, _counted(others), where


def _beginning(folder: Path, parameters: Iterable[StoredLeaf], first: str, body: list[str], found: Found) -> str:
    """The prefix in the files in place of `first`: where the embedding has its shape and most other names are."""
    embedding = next(parameter for parameter in parameters if parameter.path == "embed_tokens")
    assert not hasattr(embedding.stored, "tensors")
    tail, shape = disk_name(embedding.stored).removeprefix(first), embedding.leaf.shape
    at = [n.removesuffix(tail) for n, (_, e) in found.items() if n.endswith(f".{tail}") and tuple(e.shape) == shape]
    counts = Counter({prefix: sum(prefix + name in found for name in body) for prefix in at}).most_common(2)
    if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        several = " and ".join(f"{prefix}{tail}" for prefix, _ in sorted(counts)) or "no tensor"
        raise MismatchError(
            f"{folder}: config.json has a text model with an embedding of shape {list(shape)}, and the files have "
            f"{several} of this shape and this name, *.{tail}; one is needed."
        )
    return counts[0][0]


def tied_by_files(config: Any, values: Mapping[str, Any], has_head: bool) -> Any:
    """The text's config, tied where the files lack its head and no field of the whole model says that it is not tied.

    The whole model's field counts in transformers, which leaves it out of config.json where it equals a default.
    """
    if has_head or getattr(config, "tie_word_embeddings", True) or values.get("tie_word_embeddings") is False:
        return config
    return replace(config, tie_word_embeddings=True)


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in names))

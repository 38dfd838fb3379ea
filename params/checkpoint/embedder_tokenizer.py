"""The tokenizer of an embedder's folder, made for packing, and the lengths that the folder says."""

import os
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import Fields, shown
from fnmodels.models.common.family import DecoderConfig
from params.io.files import read_json
from params.io.tokenizer_file import read_tokenizer

# The names that releases of sentence-transformers gave the settings of texts; the first that is there counts.
SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_HOW_LOADED: tuple[str, ...] = (
    "trust_remote_code",
    "attn_implementation",
    "torch_dtype",
    "dtype",
    "device_map",
    "low_cpu_mem_usage",
)
_HOW_LOADED += ("use_safetensors", "add_pooling_layer", "unpad_inputs", "use_memory_efficient_attention")
# {options of transformers' loaders in the settings: those of them that change no vector}
_LOADERS = {
    **dict.fromkeys(("model_args", "model_kwargs", "config_args", "config_kwargs"), _HOW_LOADED),
    **dict.fromkeys(("tokenizer_args", "processor_kwargs"), ("trust_remote_code", "use_fast", "padding_side")),
}
_CALLS = ("padding", "return_tensors", "pad_to_multiple_of")  # of the tokenizer, where documents are packed


def finish(fields: Fields, neutral: Collection[str] = ()) -> None:
    """ConfigError for a field of a file of sentence-transformers that says something and that nothing has read.

    neutral: the names of those that change no vector.
    """
    known = {*fields.read, *neutral}
    unknown = [n for n, x in fields.values.items() if n not in known and n[:1] != "_" and x not in (None, {}, [])]
    if unknown:
        listed = ", ".join(f"{name!r}: {shown(fields.values[name])}" for name in unknown)
        raise ConfigError(
            f"{fields.where} has {listed}, which is not known and may change the vectors; read are "
            f"{', '.join(sorted(known))}. If it changes nothing, take it out of the file."
        )


def text_limits(folder: Path, config: DecoderConfig, task: str = "feature-extraction") -> tuple[int | None, bool]:
    """(the longest document in tokens or None, whether texts are lowercased before the tokenizer).

    task: what the folder must use the model for. The length is that of the settings of texts; else the tokenizer's, or
    the model's if that is less.
    """
    longest, lower_case = None, False
    if name := next((name for name in SETTINGS if os.path.lexists(folder / name)), None):
        fields = _fields(folder, name)
        fields.expect("transformer_task", task)
        longest = fields.integer("max_seq_length", 0, low=0) or None
        lower_case = fields.boolean("do_lower_case", False)
        _check_calls(fields, "logits" if task == "fill-mask" else "last_hidden_state")
        finish(fields, ("unpad_inputs", "cache_dir", "backend"))
    if longest is None:
        limits = [
            _tokenizer_config(folder).take("model_max_length", None),
            getattr(config, "max_position_embeddings", None),
        ]
        longest = min((value for value in limits if isinstance(value, int) and 0 < value < 1 << 24), default=None)
    return longest, lower_case  # above 2^24: none was set


def _check_calls(fields: Fields, output: str) -> None:
    """UnsupportedError where the settings load or call the model or its tokenizer in another way.

    output: what the module after it reads of the model's.
    """
    fields.expect("module_output_name", "token_embeddings")
    kinds = _object(fields, "modality_config")
    plain = {"method": "forward", "method_output_name": output}
    if kinds and {key: (kinds.get("text") or {}).get(key) for key in plain} != plain:
        raise UnsupportedError(
            f"{fields.where}: 'modality_config' is {shown(kinds)}; of texts only {shown(plain)} is supported here."
        )
    calls = _object(fields, "processing_kwargs")
    changes = [(kind, name) for kind in ("common", "text") for name in calls.get(kind) or () if name not in _CALLS]
    changes += [(kind, name) for kind, known in _LOADERS.items() for name in _object(fields, kind) if name not in known]
    for kind, name in changes:
        restated = name == "model_max_length" and fields.read[kind][name] == fields.read["max_seq_length"]
        if not restated:
            raise UnsupportedError(f"{fields.where}: {name!r} of {kind!r} may change the vectors and is not read.")


def _object(fields: Fields, name: str) -> Mapping[str, Any]:
    value = fields.take(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{fields.where}: {name!r} is {shown(value)}, but must be an object.")
    return value


def prepared_tokenizer(folder: Path, longest: int | None, *, lower_case: bool) -> tuple[Any, int | None]:
    """(the tokenizer without padding, which cuts at `longest` tokens, or None; the id of its padding token or None).

    It cuts the side that the folder says.

    None where the folder has no tokenizer.json, or the tokenizers library is not installed. FormatError as in
    `read_tokenizer`.
    """
    if not os.path.lexists(folder / "tokenizer.json") or find_spec("tokenizers") is None:
        return None, None
    tokenizer = read_tokenizer(folder)
    pad = _pad_token_id(tokenizer, folder)
    tokenizer.no_padding()
    if longest is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(longest, direction=_truncation_side(tokenizer, folder))
    if lower_case:
        from tokenizers import normalizers

        rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    return tokenizer, pad


def _truncation_side(tokenizer: Any, folder: Path) -> str:
    """The end of a text that is cut: as tokenizer_config.json says, or else tokenizer.json, or else the right one."""
    default = "right" if tokenizer.truncation is None else tokenizer.truncation["direction"].lower()
    return _tokenizer_config(folder).choice("truncation_side", ("right", "left"), default)


def _pad_token_id(tokenizer: Any, folder: Path) -> int | None:
    """The id of the token that tokenizer.json pads with, or else of the one that tokenizer_config.json names."""
    if tokenizer.padding is not None:
        return int(tokenizer.padding["pad_id"])
    token = _tokenizer_config(folder).take("pad_token", None)
    token = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def _tokenizer_config(folder: Path) -> Fields:
    name = "tokenizer_config.json"
    return _fields(folder, name) if os.path.lexists(folder / name) else Fields({}, str(folder / name))


def _fields(folder: Path, name: str) -> Fields:
    return Fields(read_json(folder / name), str(folder / name))

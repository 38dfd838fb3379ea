"""The tokenizer of an embedder's folder, made for packing, and the lengths that the folder says."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.family import DecoderConfig
from params.io.files import read_json
from params.io.tokenizer_file import read_tokenizer


def text_limits(folder: Path, config: DecoderConfig, task: str = "feature-extraction") -> tuple[int | None, bool]:
    """(the longest document in tokens or None, whether texts are lowercased before the tokenizer).

    task: what the folder must use the model for. The length is that of sentence_bert_config.json; else the
    tokenizer's, or the model's if that is less.
    """
    longest, lower_case = None, False
    if os.path.lexists(folder / "sentence_bert_config.json"):
        fields = _fields(folder, "sentence_bert_config.json")
        fields.expect("transformer_task", task)
        longest = fields.integer("max_seq_length", 0, low=0) or None
        lower_case = fields.boolean("do_lower_case", False)
    if longest is None:
        limits = [
            _tokenizer_config(folder).take("model_max_length", None),
            getattr(config, "max_position_embeddings", None),
        ]
        longest = min((value for value in limits if isinstance(value, int) and 0 < value < 1 << 24), default=None)
    return longest, lower_case  # above 2^24: none was set


def prepared_tokenizer(folder: Path, longest: int | None, *, lower_case: bool) -> tuple[Any, int | None]:
    """(the tokenizer without padding, which cuts at `longest` tokens, or None; the id of its padding token or None).

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
        tokenizer.enable_truncation(longest)
    if lower_case:
        from tokenizers import normalizers

        rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    return tokenizer, pad


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

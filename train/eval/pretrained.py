"""Loading of a Hugging Face checkpoint folder for commands: model (adapters too), tokenizer and end-of-text ids."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import params as P
from fnmodels.errors import FormatError, UserError
from fnmodels.files import copy_file
from fnmodels.models.common.config_json import Fields, shown
from fnmodels.models.common.family import traits_of
from fnmodels.models.common.registry import family_of, text_config, token_ids
from fnmodels.tree import Tree
from params.checkpoint.config import TOKENS_LIMIT
from params.io.files import plain_file, read_json
from params.io.tokenizer_file import read_tokenizer
from train.data.chat import special_tokens
from train.data.encoder import disable_truncation
from train.data.image_prompts import ImagePrompts, placeholder_in, settings_file
from train.generation.sampling import Sampling, check_sampling

COMPANION_LIMIT = 50_000_000  # bytes of a generation config, a chat template, a tokenizer's config


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """tokenizer.json of a checkpoint folder, without truncation and padding. UserError where it cannot be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such checkpoint folder")
    if not os.path.lexists(folder / "tokenizer.json"):
        raise UserError(f"{folder}: the checkpoint folder has no tokenizer.json")
    try:
        tokenizer = read_tokenizer(folder)
    except FormatError as error:
        raise UserError(str(error)) from error
    disable_truncation(tokenizer)
    return tokenizer


def weights_folder(folder: Path) -> Path:
    """The folder of config.json and the weights: `folder`, or the base model of its adapters. UserError without it."""
    if not os.path.lexists(folder / P.lora.CONFIG) or os.path.lexists(folder / "config.json"):
        return folder
    values = read_json(folder / P.lora.CONFIG)
    base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    if not isinstance(base, str) or not Path(base).is_dir():
        raise UserError(f"{folder} holds adapters, and the folder of their base model, {base!r}, is not there")
    return Path(base)


def load_model(folder: Path, *, merge: bool = False, **options: Any) -> tuple[Any, Tree]:
    """(config, params) of the text model in a checkpoint folder, or of a folder of adapters with their base model.

    options: keywords of `params.load_pretrained`. merge: adds adapters into the weights.
    """
    base = weights_folder(folder)
    config, params = P.load_pretrained(base, part="text", **options)
    if base != folder:
        params = P.lora.load_adapters(folder, config, params)
    return config, P.lora.merge(params) if merge else params


def load_image_model(folder: Path, **options: Any) -> tuple[Any, Tree]:
    """(config, params) of the whole model in a folder as of `load_model`. UserError for one that reads no images."""
    base = weights_folder(folder)
    config = P.load_config(base)
    family, text = family_of(config), text_config(config)
    if text is config:
        raise UserError(f"{base}: a model of type {config.model_type!r} reads no images")
    config, params = P.load_pretrained(base, drop=tuple(traits_of(family).unread), **options)
    if base != folder:
        params = {**params, "text": P.lora.load_adapters(folder, config.text, params["text"])}
    return config, params


def load_reader(folder: Path, **options: Any) -> tuple[Any, Tree, ImagePrompts | None]:
    """`load_image_model` and how its pictures are read, where it reads them from files here and the folder says how;
    else `load_model` and None. UserError for settings of pictures that are wrong.

    options: keywords of `params.load_pretrained`.
    """
    weights = weights_folder(folder)
    if os.path.lexists(folder / "tokenizer.json"):
        tokenizer = load_tokenizer(folder)
        if placeholder_in(weights, tokenizer) is not None and settings_file(weights) is not None:
            config, params = load_image_model(folder, **options)
            family = family_of(config)  # without those whose layers attend to images, and whose caches differ in width
            if hasattr(family, "read_image") and not hasattr(family, "image_memory"):
                return config, params, ImagePrompts.of(weights, config, tokenizer)
    return *load_model(folder, **options), None


def end_ids(folder: Path) -> tuple[int, ...]:
    """The end-of-text ids, from generation_config.json (which lists those of chat models too), else config.json."""
    folder = weights_folder(folder)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value: Any = _fields(path).take("eos_token_id", None) if os.path.lexists(path) else None
        if value is not None:
            ends = value if isinstance(value, list) else [value]
            if not all(type(one) is int and -1 <= one <= TOKENS_LIMIT for one in ends):
                raise UserError(f"{path}: 'eos_token_id' is {shown(value)}; it must be a token id, or a list of them")
            return tuple(one for one in ends if one >= 0)  # -1 is none
    return ()


def _fields(path: Path) -> Fields:
    """The reader of a JSON object. Errors as in `read_json`, and ConfigError where the file holds something else."""
    return Fields(read_json(path), str(path))


def answer_end_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """`end_ids` and the tokenizer's end-of-text token, which in a chat model may end turns."""
    end = tokenizer.token_to_id(special_tokens(folder).get("eos_token", ""))
    ends = end_ids(folder)
    return ends if end is None or end in ends else (end, *ends)


def begin_id(folder: Path, tokenizer: Tokenizer) -> int | None:
    """The token that begins a text: by tokenizer_config.json or config.json that for its begin, else for its end."""
    named = special_tokens(folder)
    begin, end = (tokenizer.token_to_id(named.get(name, "")) for name in ("bos_token", "eos_token"))
    other = read_json(weights_folder(folder) / "config.json").get("bos_token_id")
    return next((token for token in (begin, end, other, *end_ids(folder)) if token is not None), None)


# fields of generation_config.json that do not change what is generated here, or are read elsewhere
_NEUTRAL = {"eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens"}
_NEUTRAL |= {"transformers_version", "use_cache", "return_dict_in_generate", "cache_implementation", "output_scores"}
_NEUTRAL |= {"output_attentions", "output_hidden_states", "num_return_sequences"}
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"repetition_penalty": "repetition"}


@dataclass(frozen=True)
class GenerationDefaults:
    """Fields of generation_config.json: sampling (None: nothing), max_new_tokens, and fields that are not applied."""

    sampling: Sampling | None
    max_new: int | None
    unused: tuple[str, ...]


def generation_defaults(folder: Path) -> GenerationDefaults:
    """The defaults of generation_config.json, as transformers reads them.

    Raises:
        UserError, ConfigError: a value is of another type, or out of its range.
    """
    path = weights_folder(folder) / "generation_config.json"
    if not os.path.lexists(path):
        return GenerationDefaults(None, None, ())
    read = _fields(path)
    values = {name: value for name, value in read.values.items() if value is not None and not name.startswith("_")}
    known = {*_SAMPLING, "do_sample", *_NEUTRAL}
    unused = tuple(sorted(name for name in values.keys() - known if not _without_effect(name, values[name])))
    max_new = read.integer("max_new_tokens") if "max_new_tokens" in values else None
    if not (_SAMPLING.keys() | {"do_sample"}) & values.keys():
        return GenerationDefaults(None, max_new, unused)
    fields: dict[str, Any] = {own: _number(read, name) for name, own in _SAMPLING.items() if name in values}
    if not read.boolean("do_sample", False):
        fields = {"temperature": 0.0} | {name: fields[name] for name in ("repetition",) if name in fields}
    else:
        fields = {"top_k": 50} | fields
        fields["top_k"] = fields["top_k"] or None  # 0 is all tokens there
    sampling = Sampling(**fields)
    try:
        check_sampling(sampling)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return GenerationDefaults(sampling, max_new, unused)


def _number(fields: Fields, name: str) -> float:
    """A setting of the sampling as a finite number; `check_sampling` knows its range."""
    return fields.integer(name, low=0) if name == "top_k" else fields.number(name, above=-math.inf)


def _without_effect(name: str, value: Any) -> bool:
    """Whether a further field has the value that changes nothing: 1 beam, a penalty of 1, an empty list."""
    return value in (False, 0, [], {}) or (value == 1 and ("penalty" in name or name in ("num_beams", "typical_p")))


def check_vocabulary(tokenizer: Tokenizer, config: Any, folder: Path) -> None:
    """UserError where the tokenizer has ids beyond the embedding; unused rows of the embedding are fine.

    So are added tokens without a row, such as Gemma 3's <image_soft_token> beside a model of text: a text that has one
    is refused.
    """
    added, ids = tokenizer.get_added_tokens_decoder(), token_ids(config)
    highest = max((one for one in tokenizer.get_vocab(with_added_tokens=True).values() if one not in added), default=-1)
    if highest >= ids:
        raise UserError(
            f"{folder}: the tokenizer's ids go up to {highest}, but the model's vocabulary has {ids} entries: "
            "tokenizer.json and config.json belong to different models"
        )


def check_tokens(tokenizer: Tokenizer, ids: Sequence[int], config: Any) -> None:
    """UserError for an added token that the model has no row of, see `check_vocabulary`."""
    highest, rows = max(ids, default=-1), token_ids(config)
    if highest >= rows:
        raise UserError(
            f"a text has the token {tokenizer.id_to_token(highest)!r} ({highest}), and the model's vocabulary has "
            f"{rows} entries"
        )


def copy_companions(source: Path, folder: Path) -> None:
    """Copies the further files that transformers reads (generation config, chat template, ...) to a new checkpoint.

    UnsafePathError: one is a link that leads out of `source`, or no regular file: its content would be published.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"):
        if os.path.lexists(source / name):
            copy_file(plain_file(source, name), folder / name, COMPANION_LIMIT)

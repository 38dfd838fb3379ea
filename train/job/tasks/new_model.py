"""The Config of a new model: of any model type or preset, with fields of config.json set by name."""

from itertools import combinations
from typing import Any

import fnmodels
from fnmodels.errors import CheckpointError, UserError
from fnmodels.models.common.family import DecoderConfig, Family, model_types, traits_of
from fnmodels.models.common.registry import families, to_hf
from train.command_line import suggestion
from train.job.settings import DEFAULT, SIZES, Settings, family_module
from train.job.settings.types import parse_fields


def new_config(settings: Settings, vocab_size: int, special_ids: dict[str, int]) -> DecoderConfig:
    """The Config of a new model for a tokenizer of `vocab_size` tokens.

    Raises:
        UserError: No such model type or preset, one that does not predict next tokens, or fields that do not fit.
    """
    values = _published(settings.preset) if settings.preset else _sized(settings)
    # padded, so that any usual mesh divides it
    values |= {"vocab_size": -(-vocab_size // 64) * 64, **special_ids}
    changes = parse_fields(settings.set) if settings.set else {}
    values = {name: value for name, value in (values | changes).items() if changes.get(name, value) is not None}
    what = f"--preset {settings.preset}" if settings.preset else f"--model {values['model_type']}"
    family = family_module(settings) or fnmodels.family_for(values["model_type"])
    if not traits_of(family).causal or traits_of(family).inputs != "tokens":
        raise UserError(f"{what}: this job trains next-token prediction of text, which this is no model for")
    optional = () if settings.preset else tuple(name for name in _optional(settings) if name not in changes)
    chosen = bool(settings.preset) or settings.num_attention_heads != DEFAULT.num_attention_heads
    try:
        return _read(family, values, optional, () if chosen else tuple(_OF_ATTENTION - changes.keys()))
    except CheckpointError as error:
        text = str(error).removeprefix("config.json").lstrip(": ").partition(" If they do not, ignore_fields=")[0]
        raise UserError(
            f"{what}: {text.rstrip('.')} (--set NAME=VALUE sets a field, NAME=null leaves it out)"
        ) from error


def _optional(settings: Settings) -> tuple[str, ...]:
    """The fields of `_sized` that nobody has chosen and that not every type has."""
    sizes: tuple[str, ...] = ("num_key_value_heads", "intermediate_size")
    if settings.num_attention_heads % settings.num_key_value_heads:  # a mistake in what was chosen, which is said
        sizes = sizes[1:]
    unchosen = tuple(name for name in sizes if getattr(settings, name) == getattr(DEFAULT, name))
    return (*unchosen, "rms_norm_eps", "tie_word_embeddings")


_OF_ATTENTION = {"num_attention_heads", "max_position_embeddings"}  # which recurrent models do not have


def _read(
    family: Family, values: dict[str, Any], optional: tuple[str, ...], of_attention: tuple[str, ...]
) -> DecoderConfig:
    """The Config of config.json's fields, without the fewest of `optional` with which the family refuses them.

    Where it refuses all, those of attention are left out too.

    Raises:
        CheckpointError: It refuses them in any case; the reason is one that leaving a field out did not cause.
    """
    reason: CheckpointError | None = None
    for number in range(len(optional) + 1):
        for left_out in combinations(optional, number):
            try:
                config: DecoderConfig = family.Config.from_hf(
                    {name: value for name, value in values.items() if name not in left_out}
                )
            except CheckpointError as error:
                if reason is None or not any(f"'{name}'" in str(error) for name in left_out):
                    reason = error
            else:
                return config
    assert reason is not None
    if not of_attention:
        raise reason
    try:
        return _read(family, {n: value for n, value in values.items() if n not in of_attention}, optional, ())
    except CheckpointError:
        raise reason from None


def _published(preset: str) -> dict[str, Any]:
    """config.json of a preset, without the ids of its tokenizer."""
    names = fnmodels.presets()
    if preset not in names:
        raise UserError(f"--preset {preset}: there is no such preset{suggestion(preset, names)}")
    values: dict[str, Any] = to_hf(fnmodels.preset(preset))
    return {name: value for name, value in values.items() if not name.endswith("_token_id")}


def _sized(settings: Settings) -> dict[str, Any]:
    """config.json of a model type with the sizes of the settings."""
    sizes = {name: getattr(settings, name) for name in SIZES} | {"max_position_embeddings": settings.row_length}
    sizes |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    if (own := family_module(settings)) is not None:
        return {**sizes, "model_type": own_type(own, settings)}
    if settings.model not in families():
        near = suggestion(settings.model, families())
        raise UserError(
            f"--model {settings.model}: there is no such model type{near} (docs/models.md has all, --family adds yours)"
        )
    return {**sizes, "model_type": settings.model}


def own_type(family: Family, settings: Settings) -> str:
    """The model type of a new model of --family: --model, or without it the first of the module's MODEL_TYPES.

    Raises:
        UserError: --model is none of them, or there are none.
    """
    types = model_types(family)
    if not types:
        raise UserError(f"--family {settings.family}: it has no MODEL_TYPES, the model types that it reads")
    if settings.model == DEFAULT.model and settings.model not in types:
        return str(types[0])
    if settings.model not in types:
        raise UserError(f"--model {settings.model}: --family {settings.family} reads {', '.join(types)}")
    return settings.model

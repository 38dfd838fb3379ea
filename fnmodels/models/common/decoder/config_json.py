"""A decoder's config.json: its usual fields read into a Config, and a Config written as such a file."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fnmodels.errors import ConfigError
from fnmodels.ops.mlp import ACTIVATIONS
from fnmodels.ops.rotary import Rope

from ..config_json import IGNORED_FIELDS, LAYERS_LIMIT, ConfigJson, Fields, shown
from ..dropout import dropout_to_hf
from ..family import traits_of
from ..heads import decoder_head_to_hf, with_head
from ..registry import family_of
from ..rope_config import rope_from_hf, rope_to_hf
from .stated import stated

C = TypeVar("C")


def base_fields(
    fields: Fields,
    model_types: Sequence[str],
    *,
    max_positions: int,
    tied: bool = False,
    kv_heads: int = 0,
    head_dim: int = 0,
    activation: str = "silu",
    rope: Callable[..., Rope] = rope_from_hf,
    **rope_defaults: Any,
) -> dict[str, Any]:
    """The fields of BaseConfig except layer_kinds and extra, from a config.json; keywords are the family's defaults.

    rope: a function of the fields, head_dim and max_positions, as `rope_from_hf`; rope_defaults: its further keywords,
    theta and partial. The rest as for `decoder_sizes`.
    """
    model_type = fields.choice("model_type", model_types)
    sizes = decoder_sizes(fields, max_positions=max_positions, tied=tied, kv_heads=kv_heads, head_dim=head_dim)
    where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
    return {
        **sizes,
        "rope": rope(fields, **where, **rope_defaults),
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), activation),
        "model_type": model_type,
    }


def finished(config: C, fields: Fields, ignored: Sequence[str] = ()) -> C:
    """The config with the fields kept for saving; ConfigError for fields that the family did not read, see `Fields`."""
    return with_head(config, fields, fields.finish((*ignored, *stated(config, fields))))


def decoder_sizes(
    fields: Fields, *, max_positions: int, tied: bool, kv_heads: int = 0, head_dim: int = 0
) -> dict[str, Any]:
    """The sizes that every decoder has, under Hugging Face's names; the arguments are the family's defaults.

    kv_heads 0: as many as query heads, as an explicit null in the file. head_dim 0: hidden_size / heads.
    """
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if "num_key_value_heads" in fields.values:
        kv_heads = 0
    if not head_dim and fields.take("head_dim", None) is None and hidden % heads:
        raise ConfigError(
            f"{fields.where}: 'hidden_size' {hidden} is not a multiple of 'num_attention_heads' {heads}, "
            "so 'head_dim' must be given."
        )
    fields.expect("rope_interleaved", False)
    fields.expect("use_mrope", False)
    fields.expect("is_encoder_decoder", False)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", low=0),
        "num_hidden_layers": fields.integer("num_hidden_layers", high=LAYERS_LIMIT),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("num_key_value_heads", kv_heads or heads),
        "head_dim": fields.integer("head_dim", head_dim or hidden // heads, high=1 << 16),
        "max_position_embeddings": fields.integer("max_position_embeddings", max_positions),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", tied),
        "initializer_range": fields.number("initializer_range", 0.02, above=-1e-9),
    }


def text_part(outer: Fields, text_type: str, ignored: Sequence[str] = ()) -> Fields:
    """`text_config` of a multimodal checkpoint; the fields outside of it are checked or listed in `ignored`.

    text_type: the model type of the text model. ignored: fields of the other towers, without effect on text.
    """
    text = outer.take("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"{outer.where}: 'text_config' is {shown(text)}, but must be an object.")
    tied = outer.boolean("tie_word_embeddings", False)
    values = {"model_type": text_type, "tie_word_embeddings": tied, **text, "architectures": None}
    inner = Fields(values, f"{outer.where}, text_config")
    inner.expect("model_type", text_type)
    inner.expect("tie_word_embeddings", tied)  # duplicated in both objects
    outer.expect("is_encoder_decoder", False)
    repeated = [name for name in outer.values if name in text and outer.values[name] == text[name]]
    record = dict(outer.finish((*ignored, *repeated))).get(IGNORED_FIELDS)
    values |= {} if record is None else {IGNORED_FIELDS: json.loads(record) | dict(text.get(IGNORED_FIELDS) or {})}
    return inner


def softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """A soft-cap: `default` if the field is absent, none for an explicit null."""
    if fields.take(name, None) is None:
        return None if name in fields.values else default
    return fields.number(name)


_DECODER_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "initializer_range"),
)


def decoder_to_hf(config: Any, architecture: str, *names: str, **rest: Any) -> ConfigJson:
    """A config.json in the current dialect: the fields of `decoder_sizes`, those that `finish` kept, and the family's.

    names: fields that are written unchanged. rest: fields with another name or form in the file; by default the rope is
    written by `rope_to_hf`, and its partial factor even if it is 1 where the family has another default. Raises
    ConfigError if the result would not be read back as the same config, because `config.model_type` cannot express it.
    """
    saved = {name: json.loads(value) for name, value in config.extra}
    sizes = {name: getattr(config, name) for name in _DECODER_FIELDS}
    rope = rope_to_hf(config.rope)
    if getattr(type(config), "rope", config.rope).partial != 1:
        rope["partial_rotary_factor"] = config.rope.partial
    family_fields = {"rope_parameters": rope} | {name: getattr(config, name) for name in names} | rest
    head = decoder_head_to_hf(config, architecture, saved)
    return expressible(config, saved | head | {"model_type": config.model_type} | sizes | family_fields)


def expressible(config: Any, out: dict[str, Any]) -> dict[str, Any]:
    """`out`, a config.json, with the config's rates of dropout; ConfigError if it is not read back as `config`.

    Parts that are found by their tensors may differ, those of the trait `optional`.
    """
    out = out | dropout_to_hf(config, out)
    again = type(config).from_hf(out)
    parts = [name for name in traits_of(family_of(config)).optional.values() if not getattr(config, name)]
    again = dataclasses.replace(again, **dict.fromkeys(parts, 0))
    if again != config:
        fields = [f.name for f in dataclasses.fields(config) if f.compare]
        lost = [name for name in fields if getattr(again, name) != getattr(config, name)]
        raise ConfigError(f"The model type {config.model_type!r} cannot express this model's {', '.join(lost)}.")
    return out

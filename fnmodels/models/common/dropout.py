"""The dropout rates of a config.json: read into `Config.dropout`, and written from it under the published names."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from fnmodels.errors import ConfigError
from fnmodels.ops.dropout import Dropout
from fnmodels.ops.torch_internals import traced_as_constant

from .bookkeeping import DROPOUTS
from .config_json import NOISE, Fields
from .family import Traits, traits_of

C = TypeVar("C")
# Rates of heads, which are trained without dropout here.
_OF_HEADS = ("classifier_dropout", "qa_dropout", "seq_classif_dropout")


def with_dropout(config: C, fields: Fields) -> C:
    """The config with the rates of its file, by default those that transformers has for the model type."""
    if "dropout" not in getattr(type(config), "__dataclass_fields__", ()):
        return config
    rates: dict[str, float] = {}
    defaults = _traits(config).dropout_defaults
    for name, places in dropout_table(config).items():
        rate = fields.number(name, defaults.get(name, 0.0), above=-1e-9, high=1.0)
        if rate == 1:
            raise ConfigError(f"{fields.where}: {name!r} is 1, and dropout of everything trains nothing.")
        rates |= dict.fromkeys(places, rate)
    object.__setattr__(config, "dropout", Dropout(**rates))
    return config


def dropout_to_hf(config: Any, saved: Mapping[str, Any]) -> dict[str, float]:
    """The fields of config.json that `with_dropout` reads: those saved before, and others than the defaults."""
    if not hasattr(config, "dropout"):
        return {}
    table, defaults = dropout_table(config), _traits(config).dropout_defaults
    rates = {name: getattr(config.dropout, places[0]) for name, places in table.items() if places}
    return {name: rate for name, rate in rates.items() if rate != defaults.get(name, 0.0) or name in saved}


def dropout_table(config: Any) -> dict[str, tuple[str, ...]]:
    """{dropout rate in the config.json of this model type: the fields of `Dropout` that it sets}."""
    traits = _traits(config)
    return dict(traits.dropout_of.get(config.model_type, traits.dropout))


def _traits(config: Any) -> Traits:
    return traits_of(sys.modules[type(config).__module__])


def check_dropout(config: Any) -> None:
    """ValueError for a config whose file states a rate above 0 that its family does not act on."""
    stated = (*getattr(config, "extra", ()), *getattr(config, "file", ()))
    if name := _without_effect(type(config).__module__, config.model_type, hasattr(config, "dropout"), stated):
        raise ValueError(
            f"rng is for dropout, and the config states {name!r} = {dict(stated)[name]}, which a {config.model_type} "
            "here does not act on: leave rng out to train without dropout, or set that rate to 0 in config.json."
        )


@traced_as_constant  # dynamo cannot read traits
def _without_effect(module: str, model_type: str, acts: bool, stated: tuple[tuple[str, str], ...]) -> str:
    """The first name of a stated rate that does nothing; "" for none."""
    traits = traits_of(sys.modules[module])
    known = {*(traits.dropout_of.get(model_type, traits.dropout) if acts else ()), *_OF_HEADS}
    rates = (name for name, value in stated if name in (*DROPOUTS, *NOISE) and json.loads(value))
    return next((name for name in rates if name not in known), "")

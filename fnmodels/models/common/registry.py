"""What a family is, and finding that of a configuration or of a Hugging Face model type.

Nothing is registered: families are the modules of the models folder that say which MODEL_TYPES they read, and any
user's module that defines a Config with the functions beside it.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import Field
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.ops.rotary import Rope
from fnmodels.options import Block
from fnmodels.tree import Tree

_PACKAGE = "fnmodels.models"


class DecoderConfig(Protocol):
    """A frozen, hashable dataclass, which a family extends; what it may leave out is in CONFIG_DEFAULTS.

    `from_hf(values)` makes it of a config.json, `to_hf()` is the way back.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def model_type(self) -> str: ...

    def to_hf(self) -> dict[str, Any]: ...


class UsualConfig(DecoderConfig, Protocol):
    """What the functions of `decoder` and `spec` read besides: a decoder with grouped queries and a rotary table."""

    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def layer_kinds(self) -> tuple[str, ...]: ...


class RMSNormConfig(UsualConfig, Protocol):
    @property
    def rms_norm_eps(self) -> float: ...


class LayerNormConfig(UsualConfig, Protocol):
    @property
    def layer_norm_eps(self) -> float: ...


class TwoRopesConfig(UsualConfig, Protocol):
    @property
    def local_rope(self) -> Rope: ...  # of layers with a window


# Fields that a Config may have; for one without, these values hold.
CONFIG_DEFAULTS: dict[str, Any] = {
    "sliding_window": None,
    "attention_softcap": None,
    "num_experts_per_tok": 0,
    "num_nextn_predict_layers": 0,
}


class Family(Protocol):
    """A module with these names; those that it may leave out are in FAMILY_DEFAULTS.

    hf_names and Config.from_hf are needed for checkpoints only.
    """

    @property
    def __name__(self) -> str: ...
    @property
    def Config(self) -> Any: ...
    @property
    def block(self) -> Block: ...  # by `context.with_context`

    def spec(self, config: Any, /) -> Tree: ...
    def kinds(self, config: Any, /) -> tuple[str, ...]: ...
    def attention_masks(
        self, config: Any, positions: Tensor, segment_ids: Tensor, /, *, create: Any = None
    ) -> dict[str, Any]: ...  # of `MaskLike`
    def freqs_cis(self, config: Any, positions: Tensor, /, *, length: int | Tensor | None = None) -> dict[str, Any]: ...
    def embed(self, params: Tree, inputs: Any, /, *, config: Any) -> Tensor: ...
    def unembed(self, params: Tree, x: Tensor, /, *, config: Any) -> Tensor: ...
    def hf_names(self, config: Any, /) -> dict[str, Any]: ...


_NEEDED = ("block", "spec", "kinds", "attention_masks", "freqs_cis", "embed", "unembed")

# Names that a family may have; for one without, these values hold.
FAMILY_DEFAULTS: dict[str, Any] = {
    "MODEL_TYPES": (),  # of config.json, that it reads
    "KINDS": ("full",),  # the kinds that its layers may have, the usual one first
    "TAPS": (),  # the names that its block hands to `ctx.tap`
    "PRESETS": {},  # {name: config.json} of published models, for `fnmodels.preset`
    "ROUTED": False,  # whether kinds that end in "_moe" have experts
    "ROUTER": None,  # the dtypes of its router
    "SINKS": False,  # whether its attention has sinks
    "OPTIONAL": {},  # {key of params that files may lack: the field of Config that counts it}
    "LEFTOVERS": (),  # patterns of the names of buffers that older files hold and that are left unread
    "hf_copies": lambda config: {},  # -> {name on disk: path of the parameter that it repeats}
}


def family_of(config: Any) -> Family:
    """The module that defines `type(config)`. TypeError names what is missing there."""
    module = sys.modules[type(config).__module__]
    for name in _NEEDED:
        if not hasattr(module, name):
            raise TypeError(_missing(config, name))
    return cast(Family, module)


def _missing(config: Any, name: str) -> str:
    where = f"{type(config).__module__}, which defines {type(config).__name__}"
    if isinstance(config, dict):
        return "The config is a dict; make a Config of it: fnmodels.family_for(model_type).Config.from_hf(values)."
    return f"{where}, has no {name!r}; a family's functions stand in the module of its Config."


def may_have(family: Family, name: str) -> Any:
    """An optional name of the family, or its default."""
    return getattr(family, name, FAMILY_DEFAULTS[name])


def field_of(config: Any, name: str) -> Any:
    """A field of the config, or what holds where it has none."""
    return getattr(config, name, CONFIG_DEFAULTS[name])


def hf_names(config: Any) -> dict[str, Any]:
    """`family.hf_names(config)`; TypeError where a user's own family does not say its names on disk."""
    family = family_of(config)
    if not hasattr(family, "hf_names"):
        raise TypeError(
            f"{family.__name__} has no function 'hf_names', {{path of a parameter: its name on disk}}, "
            "which checkpoints need; the usual one is fnmodels.models.common.decoder.hf_names."
        )
    return family.hf_names(config)


def config_class(family: Family) -> Any:
    """`family.Config`; TypeError where a user's own family cannot read a config.json."""
    if not hasattr(getattr(family, "Config", None), "from_hf"):
        raise TypeError(
            f"{getattr(family, '__name__', family)!s} has no class 'Config' with a static method 'from_hf', which "
            "reads a checkpoint's config.json."
        )
    return family.Config


def to_hf(config: Any) -> dict[str, Any]:
    """`config.to_hf()`; TypeError where a user's own Config has none."""
    if not hasattr(config, "to_hf"):
        raise TypeError(
            f"{type(config).__module__}.{type(config).__name__} has no method 'to_hf', which makes the config.json "
            "that a checkpoint needs."
        )
    values: dict[str, Any] = config.to_hf()
    return values


def families() -> dict[str, str]:
    """{Hugging Face model type: family module} of everything in the folder."""
    found = {}
    for info in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__, f"{_PACKAGE}."):
        if not info.ispkg:
            for model_type in getattr(importlib.import_module(info.name), "MODEL_TYPES", ()):
                found[model_type] = info.name
    return dict(sorted(found.items()))


def family_for(model_type: str) -> Family:
    """The family that reads checkpoints of `model_type`; UnsupportedError names those that can be read."""
    known = families()
    if model_type not in known:
        raise UnsupportedError(f"The model type {model_type!r} is not supported; supported are {', '.join(known)}.")
    return cast(Family, importlib.import_module(known[model_type]))

"""The `Family` and `DecoderConfig` protocols, and look-up of the family of a config or a Hugging Face model type.

There is no registration: families are the modules of the models folder that define MODEL_TYPES, and any user's module
that defines a Config and the functions of `Family`.
"""

import importlib.util
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field
from importlib.abc import InspectLoader
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError, UserError
from fnmodels.inputs.order import Segments
from fnmodels.ops.rotary import Rope
from fnmodels.options import Block
from fnmodels.tree import Tree, contains

_TEXT = ("fnmodels.models.decoder", "fnmodels.models.encoder")
_TOWERS = ("fnmodels.models.vision", "fnmodels.models.vision_language")
_ENCODER_DECODERS = ("fnmodels.models.encoder_decoder",)
_DIFFUSION = ("fnmodels.models.diffusion",)


class DecoderConfig(Protocol):
    """A frozen, hashable dataclass with these fields and those of the family; CONFIG_DEFAULTS lists optional ones.

    `from_hf(values)` creates it from a config.json; `to_hf()` is the inverse.
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


_FIELDS = tuple(name for name, value in vars(DecoderConfig).items() if isinstance(value, property))
_TEXT_FIELDS = {"vocab_size", "max_position_embeddings", "tie_word_embeddings"}


class UsualConfig(DecoderConfig, Protocol):
    """The further fields that `decoder` and `spec` read: grouped-query attention and one rotary table."""

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


class LatentConfig(DecoderConfig, Protocol):
    """The widths of multi-head latent attention, see `ops.mla`."""

    @property
    def q_lora_rank(self) -> int | None: ...  # None: queries without a latent
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def attention_bias(self) -> bool: ...


class TwoRopesConfig(UsualConfig, Protocol):
    @property
    def local_rope(self) -> Rope: ...  # of sliding-window layers


# Optional fields of a Config and their defaults.
CONFIG_DEFAULTS: dict[str, Any] = {
    "sliding_window": None,
    "attention_softcap": None,
    "num_experts_per_tok": 0,
    "num_nextn_predict_layers": 0,
    "mrope_section": (),  # how many rotary frequencies read time, height and width
    "mrope_interleaved": True,  # and not one section after the other
    "head": "lm",  # see `common.heads`
    "num_labels": 0,
    "problem_type": "",  # what its labels are, see `common.heads.problem_of`
    "first_position": 0,  # the row of the position table that a document's first token reads
    "index_topk": 0,  # keys of a query in layers that choose them, see `is_indexed`
    "hidden_size_per_layer_input": 0,  # of what each layer reads beside the residual stream, see `layer_inputs`
}


class Family(Protocol):
    """A module with these names; FAMILY_DEFAULTS lists optional ones.

    hf_names and Config.from_hf are needed only for checkpoints.
    """

    @property
    def __name__(self) -> str: ...
    @property
    def Config(self) -> Any: ...
    @property
    def block(self) -> Block: ...  # made by `context.with_context`

    def spec(self, config: Any, /) -> Tree: ...
    def kinds(self, config: Any, /) -> tuple[str, ...]: ...
    def attention_masks(
        self, config: Any, positions: Tensor, segment_ids: Tensor, /, *, create: Any = None
    ) -> dict[str, Any]: ...  # values: `MaskLike`
    def freqs_cis(self, config: Any, positions: Tensor, /, *, length: int | Tensor | None = None) -> dict[str, Any]: ...
    def embed(self, params: Tree, inputs: Any, /, *, config: Any) -> Tensor: ...
    def unembed(self, params: Tree, x: Tensor, /, *, config: Any) -> Tensor: ...
    def hf_names(self, config: Any, /) -> dict[str, Any]: ...


_NEEDED = ("block", "spec", "kinds", "attention_masks", "freqs_cis", "embed", "unembed")

# Optional names of a family module and their defaults.
FAMILY_DEFAULTS: dict[str, Any] = {
    "MODEL_TYPES": (),  # the model types of config.json that it reads
    "KINDS": ("full",),  # the kinds of its layers, the default first
    "HEADS": (
        "lm",
        "none",
        "classification",
        "tokens",
    ),  # of its Config, the default first, see `heads`
    "PRESETS": {},  # {name: config.json} of published models, for `fnmodels.preset`
    "ROUTED": False,  # whether kinds that end in "_moe" are MoE layers
    "ROUTER": None,  # the dtypes of its router
    "CAUSAL": True,  # whether no token sees a later one, so that a model can generate
    "SINKS": False,  # whether its attention has sink logits
    "OPTIONAL": {},  # {key of params that files may lack: the Config field with its length}
    "LEFTOVERS": (),  # patterns of names in files that are not read, such as buffers; or a function of the config
    "UNREAD": {},  # {part that is not read: pattern of its names in files}, which loading refuses without drop=(part,)
    "RESAVED": {},  # {pattern of a name that transformers writes: the published name, with the pattern's groups}
    "EQUAL_PARTS": (),  # names in a module, together, of tensors that transformers saves in equal parts of their sum
    # (params, inputs, x, config=) -> [B, S, layers, P] for a config with hidden_size_per_layer_input P: what each layer
    # reads beside the residual stream. x [B, S, D]: what `embed` returns.
    "layer_inputs": None,
    "BIASED": False,  # whether its attention has a `RelativeBias`
    # (params, inputs, config=) -> a tree of tensors that every layer reads beside the residual stream: `Context.shared`
    "shared": None,
    # (config, positions [B, S]) -> inputs with "positions" as its masks read them and what `embed` and `shared` read,
    # of a family that reads other inputs than token ids and patches
    "example_inputs": None,
    # (config) -> {"encoder": Config, "decoder": Config} of a model that has both, else {}; see `fnmodels.pairs`
    "stacks": lambda config: {},
    # or "patches": a vision tower, see `common.vision`; "latents": a diffusion model, see `fnmodels.diffusion`
    "INPUTS": "tokens",
    # (params, x, inputs, config=) -> what `forward` returns of hidden states x [B, S, D], of a model whose head reads
    # inputs too; such a family has no `unembed`
    "outputs": None,
    "WEIGHTS": "model",  # how the names of its files of tensors begin
    # (config, positions) -> {name: tensor [B, S, ...]} that `prepare` adds to the inputs
    "batch_inputs": lambda config, positions: {},
    # (params, x, documents, config=) -> [N, labels]: the head "classification" on hidden states x [B, S, D]; None: that
    # of `decoder.classify`
    "classify": None,
    "hf_copies": lambda config: {},  # -> {name on disk: path of the parameter that it duplicates}
}


def family_of(config: Any) -> Family:
    """The module that defines `type(config)`; TypeError if it is not a family, with the missing names."""
    module = sys.modules[type(config).__module__]
    needed = ("spec",) if hasattr(module, "towers") else _NEEDED
    for name in needed:
        if not hasattr(module, name) and not (name == "unembed" and hasattr(module, "outputs")):
            raise TypeError(_missing(config, name))
    return cast(Family, module)


def text_config(config: Any) -> Any:
    """The Config of the text of a model that reads images among its tokens; of other models the config itself."""
    return config.text if hasattr(family_of(config), "with_images") else config


def check_fields(config: Any) -> None:
    """TypeError if a field of `DecoderConfig` is missing; a tower has none of text."""
    family = family_of(config)
    refuse_towers(config)
    text = may_have(family, "INPUTS") == "tokens"
    for name in _FIELDS if text else sorted(set(_FIELDS) - _TEXT_FIELDS):
        if not hasattr(config, name):
            raise TypeError(
                f"{type(config).__module__}.{type(config).__name__} has no field {name!r}; a Config has "
                f"{', '.join(_FIELDS)} and what its family reads."
            )


def refuse_towers(config: Any) -> None:
    """TypeError for the Config of a model of several towers, each of which is run by itself."""
    family = family_of(config)
    if hasattr(family, "towers"):
        inner = ", ".join(f"config.{name}" for name in family.towers(config))
        raise TypeError(
            f"{family.__name__} is a model of several towers; run each with its own config, one of {inner}."
        )


def _missing(config: Any, name: str) -> str:
    where = f"{type(config).__module__}, which defines {type(config).__name__}"
    if isinstance(config, dict):
        return "The config is a dict; make a Config of it: fnmodels.family_for(model_type).Config.from_hf(values)."
    return f"{where}, has no {name!r}; a family's functions stand in the module of its Config."


def may_have(family: Family, name: str) -> Any:
    """An optional name of the family, or its default in FAMILY_DEFAULTS."""
    return getattr(family, name, FAMILY_DEFAULTS[name])


def field_of(config: Any, name: str) -> Any:
    """A field of the config, or its default in CONFIG_DEFAULTS."""
    return getattr(config, name, CONFIG_DEFAULTS[name])


_REUSE = "_reuse"


def is_routed(family: Family, kind: str) -> bool:
    """Whether layers of this kind are MoE layers: in a ROUTED family, kinds that end in "_moe"."""
    return may_have(family, "ROUTED") and kind.endswith("_moe")


def source_kind(kind: str) -> str | None:
    """The kind whose keys and values layers of this kind read: "full" for "full_reuse"; None: they have their own."""
    return kind.replace(_REUSE, "") if _REUSE in kind else None


def ordered_kinds(config: Any) -> tuple[str, ...]:
    """The kinds of layers that read tokens in their order (recurrent, convolution): their masks have `Segments`."""
    none = torch.zeros(1, 0, dtype=torch.int64)
    masks = family_of(config).attention_masks(config, none, none)
    return tuple(kind for kind, mask in masks.items() if contains(mask, Segments))


def is_indexed(kind: str) -> bool:
    """Whether layers of this kind attend to a few keys that an indexer chooses (`Context.choose`)."""
    return kind.startswith("indexed")


def own_choices(kinds: Sequence[str]) -> list[int]:
    """The layers with an indexer; those of kinds "indexed_shared*" take the choice of the last one before them."""
    return [i for i, kind in enumerate(kinds) if is_indexed(kind) and not kind.startswith("indexed_shared")]


def hf_names(config: Any) -> dict[str, Any]:
    """`family.hf_names(config)`; TypeError if a user's family has none."""
    family = family_of(config)
    if not hasattr(family, "hf_names"):
        raise TypeError(
            f"{family.__name__} has no function 'hf_names', {{path of a parameter: its name on disk}}, "
            "which checkpoints need; the usual one is fnmodels.models.common.decoder.hf_names."
        )
    return family.hf_names(config)


def config_class(family: Family) -> Any:
    """`family.Config`; TypeError if a user's family cannot read a config.json."""
    if not hasattr(getattr(family, "Config", None), "from_hf"):
        raise TypeError(
            f"{getattr(family, '__name__', family)!s} has no class 'Config' with a static method 'from_hf', which "
            "reads a checkpoint's config.json."
        )
    return family.Config


def to_hf(config: Any) -> dict[str, Any]:
    """`config.to_hf()`; TypeError if a user's Config has none."""
    if not hasattr(config, "to_hf"):
        raise TypeError(
            f"{type(config).__module__}.{type(config).__name__} has no method 'to_hf', which makes the config.json "
            "that a checkpoint needs."
        )
    values: dict[str, Any] = config.to_hf()
    return values


def families(naming: str = "") -> dict[str, str]:
    """{Hugging Face model type: name of the family module} for all families of the models folder that read text.

    naming: a model type; only of modules whose source has it, for importing all of them takes 0.1 s. UserError where
    two families claim one model type.
    """
    return _claimed_in(_TEXT, naming)


def towers(naming: str = "") -> dict[str, str]:
    """{Hugging Face model type: name of the module} for vision towers and models with a tower; see `families`."""
    return {kind: name for package in _TOWERS for kind, name in _claimed_in((package,), naming).items()}


def encoder_decoders(naming: str = "") -> dict[str, str]:
    """{Hugging Face model type: name of the module} for models of an encoder and a decoder; see `families`."""
    return _claimed_in(_ENCODER_DECODERS, naming)


def diffusion_models(naming: str = "") -> dict[str, str]:
    """{class name in a config.json of diffusers: name of the module} for diffusion models; see `families`."""
    return _claimed_in(_DIFFUSION, naming)


def every_model(naming: str = "") -> dict[str, str]:
    """{model type: name of the module} of `families`, `towers`, `encoder_decoders` and `diffusion_models`.

    A type of both of the first two, such as llama4, is that of the family of text.
    """
    return towers(naming) | families(naming) | encoder_decoders(naming) | diffusion_models(naming)


def model_type_of(values: Mapping[str, Any]) -> Any:
    """The model type of a config.json, which diffusers calls `_class_name`; None: it has none."""
    return values.get("model_type", values.get("_class_name"))


def _claimed_in(packages: Sequence[str], naming: str) -> dict[str, str]:
    owners: dict[str, str] = {}
    for package in packages:
        for name in _modules(package, tuple(importlib.import_module(package).__path__)):
            if naming and name not in sys.modules and not _names(name, naming):
                continue
            for model_type in getattr(importlib.import_module(name), "MODEL_TYPES", ()):
                claim(owners, model_type, name, "model type")
    return dict(sorted(owners.items()))


def _modules(package: str, folders: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the modules in the package's folders."""
    return tuple(info.name for info in pkgutil.iter_modules(folders, f"{package}.") if not info.ispkg)


def _names(module: str, model_type: str) -> bool:
    """Whether the module's source has the model type as a string; True if there is no source."""
    spec = importlib.util.find_spec(module)
    loader = None if spec is None else spec.loader
    source = loader.get_source(module) if isinstance(loader, InspectLoader) else None
    return source is None or f'"{model_type}"' in source or f"'{model_type}'" in source


def claim(owners: dict[str, str], key: str, module: str, what: str) -> None:
    """Records the module as the owner of the key; UserError if another module owns it already."""
    if (owner := owners.setdefault(key, module)) != module:
        raise UserError(f"The {what} {key!r} is claimed by {owner} and by {module}; remove it from one of them.")


def family_reading(values: Mapping[str, Any], part: str | None = None) -> Family:
    """The family that reads a config.json: with `vision_config` that with the tower, unless `part` is "text"."""
    model_type = model_type_of(values)
    has_tower = part != "text" and values.get("vision_config") is not None
    if has_tower and (with_tower := towers(str(model_type)).get(model_type)):
        return cast(Family, importlib.import_module(with_tower))
    return family_for(model_type)


def family_for(model_type: str) -> Family:
    """The family that reads checkpoints of `model_type`; UnsupportedError lists the supported types.

    Of a type that is read with and without its tower, that of the text.
    """
    naming = str(model_type)
    if model_type not in (known := families(naming)):  # models with a tower name the family of their text as well
        known = every_model(naming)
    if model_type not in known and model_type not in (known := every_model()):
        raise UnsupportedError(f"The model type {model_type!r} is not supported; supported are {', '.join(known)}.")
    return cast(Family, importlib.import_module(known[model_type]))

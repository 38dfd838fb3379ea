"""Look-up of the family of a config or a Hugging Face model type.

There is no registration: families are the modules of the models folder that define MODEL_TYPES, and any user's module
that defines a Config and the functions of `Family`.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import Any, cast

import torch

from fnmodels.errors import UnsupportedError, UserError
from fnmodels.inputs.order import Segments
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.spec import Leaf
from fnmodels.models.common.storage import StoredNames
from fnmodels.tree import contains

from .family import DecoderConfig, Family, function_of, model_types, traits_of

_TEXT = ("fnmodels.models.decoder", "fnmodels.models.encoder")
_TOWERS = (
    "fnmodels.models.vision",
    "fnmodels.models.vision_language",
    "fnmodels.models.audio",
    "fnmodels.models.audio_language",
)
_ENCODER_DECODERS = ("fnmodels.models.encoder_decoder",)
_DIFFUSION = ("fnmodels.models.diffusion",)


_FIELDS = tuple(name for name, value in vars(DecoderConfig).items() if isinstance(value, property))
_TEXT_FIELDS = {"vocab_size", "max_position_embeddings", "tie_word_embeddings"}


_NEEDED = ("block", "spec", "kinds", "attention_masks", "freqs_cis", "embed", "unembed")


def family_of(config: Any) -> Family:
    """The family of a config: the module that defines its class, in or outside of fnmodels.

    Args:
        config: A family's Config.

    Returns:
        The module.

    Raises:
        TypeError: The module is not a family; it lists the missing names.
    """
    module: Any = sys.modules[type(config).__module__]
    family: Family = module
    try:  # a quick look, for every call of a model asks several times
        _ = module.block, module.spec, module.kinds, module.attention_masks
        _ = module.freqs_cis, module.embed, module.unembed
        return family
    except AttributeError:
        pass
    needed = ("spec",) if hasattr(module, "towers") else _NEEDED
    for name in needed:
        if not hasattr(module, name) and not (name == "unembed" and hasattr(module, "outputs")):
            raise TypeError(_missing(config, name))
    return family


def stack_configs(config: Any) -> dict[str, Any]:
    """{"encoder": Config, "decoder": Config} of a model that has both, else {}; see `fnmodels.pairs`."""
    stacks: dict[str, Any] = function_of(family_of(config), "stacks")(config)
    return stacks


# The functions of families that give a text images or sounds in another way than in place of tokens.
BESIDE_TOKENS = ("image_memory", "with_sound")


def text_config(config: Any) -> Any:
    """The Config of the text of a model that reads images or sounds too; of other models the config itself."""
    family = family_of(config)
    for name in ("with_images", *BESIDE_TOKENS):
        if hasattr(family, name):
            return config.text
    return config


def token_ids(config: Any) -> int:
    """The number of ids that a token of a text may have: rows of the embedding, which can be more than the logits."""
    size: int = config.vocab_size
    table = family_of(config).spec(config).get("embed_tokens")
    return max(size, table.shape[0]) if isinstance(table, Leaf) else size


def check_fields(config: Any) -> None:
    """TypeError if a field of `DecoderConfig` is missing; a tower has none of text."""
    family = family_of(config)
    refuse_towers(config)
    text = traits_of(family).inputs == "tokens"
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


def ordered_kinds(config: Any) -> tuple[str, ...]:
    """The kinds of layers that read tokens in their order (recurrent, convolution): their masks have `Segments`."""
    none = torch.zeros(1, 0, dtype=torch.int64)
    masks = family_of(config).attention_masks(config, none, none)
    return tuple(kind for kind, mask in masks.items() if contains(mask, Segments))


def hf_names(config: Any) -> StoredNames:
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


def to_hf(config: Any) -> ConfigJson:
    """`config.to_hf()`; TypeError if a user's Config has none."""
    if not hasattr(config, "to_hf"):
        raise TypeError(
            f"{type(config).__module__}.{type(config).__name__} has no method 'to_hf', which makes the config.json "
            "that a checkpoint needs."
        )
    values: ConfigJson = config.to_hf()
    return values


def families(naming: str = "") -> dict[str, str]:
    """The Hugging Face model types that read text, and the module of each.

    Args:
        naming: A model type: only modules whose source has it are imported, for importing all of them takes 0.1 s. "":
            all.

    Returns:
        {model type: name of the family module}.

    Raises:
        UserError: Two families claim one model type.
    """
    return _claimed_in(_TEXT, naming)


def towers(naming: str = "") -> dict[str, str]:
    """The Hugging Face model types of vision towers and of models with a tower, and the module of each.

    Args:
        naming: A model type: only modules whose source has it are imported. "": all.

    Returns:
        {model type: name of the module}.
    """
    return {kind: name for package in _TOWERS for kind, name in _claimed_in((package,), naming).items()}


def encoder_decoders(naming: str = "") -> dict[str, str]:
    """The Hugging Face model types of models of an encoder and a decoder, and the module of each.

    Args:
        naming: A model type: only modules whose source has it are imported. "": all.

    Returns:
        {model type: name of the module}.
    """
    return _claimed_in(_ENCODER_DECODERS, naming)


def diffusion_models(naming: str = "") -> dict[str, str]:
    """The diffusion models, by their class name in a config.json of diffusers, and the module of each.

    Args:
        naming: A class name: only modules whose source has it are imported. "": all.

    Returns:
        {class name: name of the module}.
    """
    return _claimed_in(_DIFFUSION, naming)


def every_model(naming: str = "") -> dict[str, str]:
    """{model type: name of the module} of `families`, `towers`, `encoder_decoders` and `diffusion_models`.

    A type of both of the first two, such as llama4, is that of the family of text.
    """
    return towers(naming) | families(naming) | encoder_decoders(naming) | diffusion_models(naming)


def is_read(model_type: Any) -> bool:
    """Whether a model of this type is read, whatever it reads."""
    packages = (*_TEXT, *_TOWERS, *_ENCODER_DECODERS, *_DIFFUSION)
    return bool(_named_after(model_type, packages)) or model_type in every_model(str(model_type))


def model_type_of(values: Mapping[str, Any]) -> Any:
    """The model type of a config.json, which diffusers calls `_class_name`; None: it has none."""
    return values.get("model_type", values.get("_class_name"))


def _named_after(model_type: Any, packages: Sequence[str]) -> dict[str, str]:
    """{model type: module} of the module that is called as the type and claims it, else {}.

    It spares the search of all sources, which took a tenth of a first loading. That no other module claims the type is
    what `families` and its kin check.
    """
    last = str(model_type).replace("-", "_")
    if not last.isidentifier():
        return {}
    for package in packages:
        name = f"{package}.{last}"
        if name not in sys.modules and not _is_file(package, f"{last}.py"):
            continue
        if model_type in model_types(importlib.import_module(name)):
            return {model_type: name}
    return {}


def _is_file(package: str, file: str) -> bool:
    return any(os.path.isfile(f"{folder}/{file}") for folder in importlib.import_module(package).__path__)


def _claimed_in(packages: Sequence[str], naming: str) -> dict[str, str]:
    owners: dict[str, str] = {}
    for package in packages:
        for name in _modules(package, tuple(importlib.import_module(package).__path__)):
            if naming and name not in sys.modules and not _names(name, naming):
                continue
            for model_type in model_types(importlib.import_module(name)):
                claim(owners, model_type, name, "model type")
    return dict(sorted(owners.items()))


def _modules(package: str, folders: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the modules in the package's folders. Listing a folder takes a fifth of the time of pkgutil, which
    looks at each entry, and lists zip files too."""
    if not all(map(os.path.isdir, folders)):
        return tuple(info.name for info in pkgutil.iter_modules(folders, f"{package}.") if not info.ispkg)
    entries = (entry for folder in folders for entry in os.listdir(folder) if entry.endswith((".py", ".pyc")))
    names = {entry.partition(".")[0] for entry in entries} - {"__init__"}
    return tuple(f"{package}.{name}" for name in sorted(names))


def _names(module: str, model_type: str) -> bool:
    """Whether the module's source has the model type as a string; True if there is no source.

    The bytes are searched: decoding the sources of all families took a quarter of the time of a first loading.
    """
    package, _, last = module.rpartition(".")
    for folder in sys.modules[package].__path__:
        try:
            with FileIO(f"{folder}/{last}.py") as file:
                source = file.read()
        except OSError:
            continue
        return any(quoted.encode() in source for quoted in (f'"{model_type}"', f"'{model_type}'"))
    return True


def claim(owners: dict[str, str], key: str, module: str, what: str) -> None:
    """Records the module as the owner of the key; UserError if another module owns it already."""
    if (owner := owners.setdefault(key, module)) != module:
        raise UserError(f"The {what} {key!r} is claimed by {owner} and by {module}; remove it from one of them.")


def family_reading(values: Mapping[str, Any], part: str | None = None) -> Family:
    """The family that reads a config.json: with `vision_config` that with the tower, unless `part` is "text"."""
    model_type = model_type_of(values)
    has_tower = part != "text" and values.get("vision_config") is not None
    if has_tower:
        known = _named_after(model_type, _TOWERS) or towers(str(model_type))
        if model_type in known:
            return cast(Family, importlib.import_module(known[model_type]))
    return family_for(model_type)


def family_for(model_type: str) -> Family:
    """The family that reads checkpoints of a model type; of a type that is read with and without its tower, that of the
    text.

    Args:
        model_type: The model_type of a config.json.

    Returns:
        The module.

    Raises:
        UnsupportedError: No family reads it; the error lists the supported types.
    """
    naming = str(model_type)
    known = _named_after(model_type, _TEXT) or families(naming)
    if model_type not in known:  # models with a tower name the family of their text as well
        known = every_model(naming)
    if model_type not in known and model_type not in (known := every_model()):
        raise UnsupportedError(
            f"The model type {model_type!r} is not supported; supported are {', '.join(known)}. To read it by "
            "a module of yours, name the module with family= (--family in commands)."
        )
    return cast(Family, importlib.import_module(known[model_type]))

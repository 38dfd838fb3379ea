"""Models with a text and a vision tower: CLIP and SigLIP. The parameters are {"text": ..., "vision": ...}.

inputs, masks, freqs_cis = fnmodels.prepare(config.vision, patches, positions=positions, segment_ids=segment_ids)
hidden = fnmodels.forward(params["vision"], inputs, masks, freqs_cis, config=config.vision)
"""

import json
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.storage import StoredNames, renamed
from fnmodels.tree import Tree

_IGNORED = ("text_config_dict", "vision_config_dict", "initializer_factor", "projection_dim", "logit_scale_init_value")


def tower_fields(outer: Fields, name: str, model_type: str, **more: Any) -> dict[str, Any]:
    """The config.json of a tower: the object `name` of a model's."""
    inner = outer.take(name, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{outer.where}: {name!r} must be an object.")
    # Files of old versions have the object or its repetition under this name, where it wins.
    twin = outer.take(f"{name}_dict", {})
    if not isinstance(twin, Mapping) or any(inner.get(key, value) != value for key, value in twin.items()):
        raise ConfigError(f"{outer.where}: {name!r} and '{name}_dict' disagree.")
    # The class of the model counts, and not one that the object names of itself.
    return {"model_type": model_type, **inner, **twin, "architectures": None, **more}


def finished(config: Any, outer: Fields) -> Any:
    """The config with the fields kept for saving."""
    outer.expect("is_encoder_decoder", False)
    outer.take("tie_word_embeddings", None)  # there is no head
    object.__setattr__(config, "extra", outer.finish(_IGNORED))
    return config


def towers_to_hf(config: Any, architecture: str, **rest: Any) -> ConfigJson:
    """A config.json of both towers."""
    kept = {name: json.loads(value) for name, value in config.extra}
    own = {"architectures": [architecture], "model_type": config.model_type}
    parts = {f"{name}_config": getattr(config, name).to_hf() for name in ("text", "vision")}
    for part in parts.values():
        del part["architectures"]
    return expressible(config, kept | own | parts | rest)


def towers(config: Any) -> dict[str, Any]:
    """{key of the parameters: Config of the tower}, of a text, images or sound."""
    return {name: getattr(config, name) for name in ("text", "vision", "audio") if hasattr(config, name)}


def towers_spec(config: Any) -> Tree:
    """The parameters of all towers."""
    return {name: family_of(inner).spec(inner) for name, inner in towers(config).items()}


def towers_names(config: Any) -> StoredNames:
    """{path of a parameter: its name on disk} of both towers."""
    named = {key: family_of(inner).hf_names(inner) for key, inner in towers(config).items()}
    return {f"{key}.{path}": name for key, names in named.items() for path, name in names.items()}


def with_prefix(names: dict[str, Any], path: str, prefix: str) -> dict[str, Any]:
    """{path of a parameter: its name on disk} of a part whose parameters are at `path` and begin with `prefix`."""
    return {f"{path}.{key}": renamed(stored, "^", prefix) for key, stored in names.items()}


def kinds(config: Any) -> tuple[str, ...]:
    """The kinds of the text tower's layers, then of the others'."""
    return tuple(kind for inner in towers(config).values() for kind in family_of(inner).kinds(inner))


def cosines(text: Tensor, image: Tensor) -> Tensor:
    """[texts, images]: cosine of every text's and image's features."""
    return F.normalize(text, dim=-1) @ F.normalize(image, dim=-1).T

"""Common parts of vision-language models: a text model of any family reads a tower's features at its image tokens.

The parameters are {"text", "vision"} of the parts (`two_towers.towers`), and what the family puts between them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.image_places import gather_cells, place
from fnmodels.models.common.bookkeeping import is_bookkeeping
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.family import function_of, traits_of
from fnmodels.models.common.registry import families, family_for, family_of
from fnmodels.models.common.spec import Leaf, bias, weight
from fnmodels.models.common.storage import Stored, StoredNames, renamed
from fnmodels.models.vision.common.two_towers import towers, with_prefix
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.run_params import with_run
from fnmodels.tree import Tree

# Names that transformers has in memory, and files that were saved from there: {pattern: the published name}.
IN_MEMORY = {
    r"model\.language_model\.(.*)": r"language_model.model.\1",
    r"lm_head\.weight": "language_model.lm_head.weight",
    r"model\.((?:vision_tower|multi_modal_projector)\..*)": r"\1",
}
# The same, where the tower's names have lost a component too.
IN_MEMORY_WITHOUT_VISION_MODEL = {
    r"(?:model\.)?vision_tower\.((?!vision_model\.).*)": r"vision_tower.vision_model.\1",
    **IN_MEMORY,
}
# The other way: {pattern in a published name: what the modules are called}.
MODULES = {
    r"^language_model\.model\.": "model.language_model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^vision_tower\.(vision_model\.)?": "model.vision_tower.",
    r"^multi_modal_projector\.": "model.multi_modal_projector.",
}


# Fields that `text_config` may leave out where they equal the defaults.
_REPEATED = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
_REPEATED |= {"head_dim", "hidden_act", "max_position_embeddings", "max_window_layers", "rms_norm_eps", "rope_scaling"}
_REPEATED |= {"rope_theta", "sliding_window", "use_sliding_window", "vocab_size"}


# Sizes that files of transformers 4 leave out of text_config, as they are the defaults of the text's class.
_MIDDLE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_SIZES: dict[str, dict[str, Any]] = {
    "llama": _MIDDLE | {"intermediate_size": 11008},
    "mistral": _MIDDLE | {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _MIDDLE | {"intermediate_size": 22016},
    "qwen3": _MIDDLE | {"intermediate_size": 22016},
}


def text_config(outer: Fields, default: str, defaults: Mapping[str, Any]) -> Any:
    """The Config of `text_config`, of any family that reads text.

    default: the model type where the object has none; defaults: the fields that files of that type leave out.
    """
    values = outer.take("text_config", {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"{outer.where}: 'text_config' must be an object.")
    model_type = values.get("model_type", default)
    if model_type not in families():
        raise UnsupportedError(f"{outer.where}, text_config: the model type {model_type!r} is not supported.")
    known = defaults if model_type == default else _SIZES.get(model_type, {})
    family, own = family_for(model_type), {"model_type": model_type, "architectures": None}  # the model's class counts
    read = read_once(outer, values, lambda text_fields: family.Config.from_hf({**known, **text_fields, **own}))
    return with_outer_head(outer, read)


def with_outer_head(outer: Fields, text: Any) -> Any:
    """The text's Config, without a head where the model's class has none (Gemma3Model): hidden states are returned."""
    declared = outer.values.get("architectures")
    names = [str(name) for name in declared] if isinstance(declared, list) else []
    if names and all(name.endswith("Model") for name in names):
        object.__setattr__(text, "head", "none")
    return text


def read_once(outer: Fields, values: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Any]) -> Any:
    """`read(values)`, the Config of the object `text_config`, of which transformers 4.52 to 4.56 repeat the fields.

    ConfigError where another model would result from the repeated fields.
    """
    config = read(values)
    unread = {n: value for n, value in outer.values.items() if n in (*_REPEATED, *values) and n not in outer.read}
    names = [n for n, value in unread.items() if not is_bookkeeping(n, value)]
    repeated = {n: outer.take(n) for n in names if outer.values[n] is not None and n != "tie_word_embeddings"}
    if repeated and read({**values, **repeated}) != config:
        raise ConfigError(f"{outer.where} has {', '.join(sorted(repeated))} beside 'text_config', and they disagree.")
    return config


def with_tie(text: Any, tied: bool) -> Any:
    """The text's Config, whose head is tied or not, as the model's own field says."""
    tied_text = replace(text, tie_word_embeddings=tied)
    object.__setattr__(tied_text, "extra", text.extra)
    return tied_text


def kept(outer: Fields, *names: str, ignored: tuple[str, ...] = ()) -> tuple[tuple[str, str], ...]:
    """The entries of `extra`: those of `Fields.finish`, and the fields `names`, which mean nothing here."""
    unused = tuple((name, json.dumps(value)) for name in names if (value := outer.take(name, None)) is not None)
    outer.expect("is_encoder_decoder", False)
    return outer.finish(ignored) + unused


def to_hf(config: Any, architecture: str, **own: Any) -> ConfigJson:
    """A config.json: the objects of the parts, the fields kept for saving, and `own`, which wins."""
    parts = {f"{name}_config": part.to_hf() for name, part in towers(config).items()}
    for part in parts.values():
        part.pop("architectures", None)
    declared = re.sub("For[A-Z].*", "Model", architecture) if config.text.head == "none" else architecture
    named = {"architectures": [declared], "model_type": config.model_type}
    return expressible(config, {name: json.loads(value) for name, value in config.extra} | named | parts | own)


def part_names(config: Any, **prefixes: str) -> StoredNames:
    """{path of a parameter: its name on disk} of the parts, whose names begin with prefixes {part: prefix}."""
    names: StoredNames = {}
    for path, prefix in prefixes.items():
        part = towers(config)[path]
        names |= with_prefix(family_of(part).hf_names(part), path, prefix)
    return names


def nested_names(config: Any, *, text: str, vision: str) -> dict[str, Stored]:
    """{path of a parameter: its name on disk} of both parts. text replaces the text's "model.", vision is a prefix."""
    inner: dict[str, Stored] = family_of(config.text).hf_names(config.text)
    inner = {path: renamed(name, r"^model\.", text) for path, name in inner.items()}
    return with_prefix(inner, "text", "") | with_prefix(
        family_of(config.vision).hf_names(config.vision), "vision", vision
    )


def leftovers(config: Any) -> tuple[str, ...]:
    """Patterns of the text's tensors that are not read, such as those of MTP layers."""
    patterns: tuple[str, ...] = function_of(family_of(config.text), "leftovers")(config.text)
    return patterns


def in_memory(config: Any) -> dict[str, str]:
    """The names in memory of the modules of the text that differ from those of files; see the trait `in_memory`."""
    return dict(traits_of(family_of(config.text)).in_memory)


def joined(x: Tensor, places: Tensor) -> Tensor:
    """[1, cells, D of all patches of the cell] of hidden states x [rows, slots, D]; places: of `cells`.

    Row by row within a cell: what published models call pixel shuffle or unshuffle.
    """
    return gather_cells(x, places).flatten(1)[None]


def tied_head(outer: Fields, text: Any, default: bool) -> bool:
    """Whether the head is tied: transformers 5 reads the outer field, whose default is given, and 4 the text's."""
    old = str(outer.values.get("transformers_version", "5")).startswith("4.")
    said = outer.boolean("tie_word_embeddings", default)
    return bool(text.tie_word_embeddings) if old else said


def feature_layers(value: Any, layers: int) -> tuple[int, ...]:
    """The number of layers of the tower that run for each of the hidden states that `vision_feature_layer` names.

    0 is that of the embeddings, which is not supported, and -1 the last layer's.
    """
    counts = []
    for index in value if isinstance(value, list | tuple) and value else [value]:
        if type(index) is not int:
            raise UnsupportedError(f"'vision_feature_layer' is {value!r}; it must be a layer, or a list of layers.")
        count = index if index >= 0 else layers + 1 + index
        if not 0 < count <= layers:
            raise ConfigError(f"'vision_feature_layer' is {index}, but the tower has {layers} layers.")
        counts.append(count)
    return tuple(counts)


def cut_tower(params: Tree, config: Any) -> tuple[Tree, Any]:
    """(params, Config) of the tower up to the last of `config.feature_layers`, for `fnmodels.hidden`."""
    count = max(config.feature_layers)
    seen = {**params["vision"], "layers": params["vision"]["layers"][:count]}
    return with_run(params, seen), replace(config.vision, num_hidden_layers=count)


def layer_taps(config: Any) -> tuple[str, ...]:
    """The taps of the tower whose values features are made of, where these are of several layers."""
    layers = config.feature_layers
    return tuple(f"layers.{count - 1}.output" for count in sorted(set(layers))) if len(layers) > 1 else ()


def of_layers(x: Tensor, tapped: Mapping[str, Tensor], config: Any) -> Tensor:
    """The hidden states of all `config.feature_layers`, concatenated: x, or those of `layer_taps`."""
    layers = config.feature_layers
    return torch.cat([tapped[f"layers.{count - 1}.output"] for count in layers], -1) if len(layers) > 1 else x


def mlp_names(biases: bool) -> dict[str, str]:
    """{path: name on disk} of the MLP between a tower and the text, "projector.up" and "projector.out"."""
    names: dict[str, str] = {}
    for path, name in (("up", "linear_1"), ("out", "linear_2")):
        names[f"projector.{path}"] = f"multi_modal_projector.{name}.weight"
        if biases:
            names[f"projector.{path}_bias"] = f"multi_modal_projector.{name}.bias"
    return names


def mlp(weights: Tree, x: Tensor) -> Tensor:
    """The MLP of `mlp_names` on x [..., D of the tower]: [..., D of the text]."""
    return linear(F.gelu(linear(x, weights["up"], weights.get("up_bias"))), weights["out"], weights.get("out_bias"))


def mlp_leaves(narrow: int, wide: int, std: float, *, biases: bool) -> dict[str, Leaf]:
    """The leaves of `mlp`, from the tower's width to the text's."""
    leaves = {
        "up": weight((wide, narrow), ("projection", "embed"), std),
        "out": weight((wide, wide), ("embed", "projection"), std),
    }
    return leaves | ({"up_bias": bias(wide, "projection"), "out_bias": bias(wide, "embed")} if biases else {})


def cell_side(config: Any) -> int:
    """The patches of a side of a cell, which is one feature, of a tower that merges them."""
    merge: int = config.vision.merge
    return merge


def features_of(
    params: Tree, x: Tensor, tapped: Mapping[str, Tensor], places: Tensor, /, *, config: Any
) -> tuple[Tensor, ...]:
    """The family's `project(params, x, places)`, as a tuple whose first features replace embeddings."""
    family: Any = family_of(config)
    return (family.project(params, x, places),)


def features_by_config(
    params: Tree, x: Tensor, tapped: Mapping[str, Tensor], places: Tensor, /, *, config: Any
) -> tuple[Tensor, ...]:
    """As `features_of`, of a family whose `project` reads the config."""
    family: Any = family_of(config)
    return (family.project(params, x, places, config=config),)


def with_raw_images(
    params: Tree, inputs: Mapping[str, Any], features: Tensor, places: Tensor, *, config: Any
) -> dict[str, Any]:
    """As `with_images`, for a text that adds to or multiplies all vectors that it is given, features included.

    The id of image tokens may be none of the vocabulary.
    """
    tokens = inputs["tokens"].where(places[..., 0] < 0, 0)
    return {**inputs, "tokens": place(embed_tokens(params["text"]["embed_tokens"], tokens), features, places)}


def with_images(
    params: Tree, inputs: Mapping[str, Any], features: Tensor, places: Tensor, *, config: Any
) -> dict[str, Any]:
    """The inputs that `prepare` made of config.text and token ids, with features [rows, slots, D] at their places.

    places: int64 [B, S, 2], the (row, slot) of each token's feature, (-1, -1) for text; see `image_places`.
    """
    x = family_of(config.text).embed(params["text"], inputs, config=config.text)
    return {**inputs, "tokens": place(x, features, places)}

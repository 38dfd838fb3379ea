"""Common parts of Qwen's vision-language models: a text model with positions of three axes, merged cells of patches.

The text model is that of the plain family, Qwen 2 or 3, with `mrope_section`; its own config.json is one of that
family, and of the wrapper's text where it is an object of the wrapper's file.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.image_sizes import fit_area
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.registry import family_for
from fnmodels.models.common.spec import Leaf, bias, layer_norm_leaves, weight
from fnmodels.models.common.storage import Stored
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision.common import two_towers
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

from . import image_prompts, vision_language
from .vision_language import joined

EPS = 1e-6  # of Qwen3-VL's LayerNorms before mergers, fixed in the reference
TOKENS = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")  # kept for saving
_OUTER = {"model_type", "architectures", "vision_config", "text_config", "image_token_id", *TOKENS}


def tower_values(outer: Fields, model_type: str) -> dict[str, Any]:
    """`vision_config`, which published files name by the model's type or not at all."""
    values = two_towers.tower_fields(outer, "vision_config", model_type)
    named = values["model_type"] == outer.values["model_type"]
    return values | ({"model_type": model_type} if named else {})


def check_widths(config: Any) -> None:
    """ConfigError unless features are as wide as the text."""
    if config.vision.out_hidden_size != config.text.hidden_size:
        raise ConfigError(
            f"out_hidden_size {config.vision.out_hidden_size} of vision_config is not the hidden_size "
            f"{config.text.hidden_size} of text_config."
        )


def text_values(outer: Fields) -> dict[str, Any]:
    """`text_config`, or in files of one level the fields of the text, and whether its head is tied."""
    values = outer.take("text_config", None)
    if values is None:
        values = {name: outer.take(name, None) for name in outer.values if name not in _OUTER}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{outer.where}: 'text_config' must be an object.")
    # transformers reads the outer field, and in older files the inner one
    tied = outer.boolean("tie_word_embeddings", False) or Fields(values, "text_config").boolean(
        "tie_word_embeddings", False
    )
    return {name: value for name, value in values.items() if value is not None} | {"tie_word_embeddings": tied}


def text_config(
    outer: Fields, values: Mapping[str, Any], text_type: str, plain: str, *, defaults: Mapping[str, Any]
) -> Any:
    """The Config of the text model, of the family that reads the model type `plain`; its type in files is `text_type`.

    defaults: the fields that files leave out; `mrope_section` among them is that of a rope without one.
    """
    fields = Fields(values, f"{outer.where}, text_config")
    fields.choice("model_type", (text_type, outer.values["model_type"]), text_type)

    def read(text: Mapping[str, Any]) -> Any:
        completed = {**defaults, **text, "model_type": plain, "architectures": None}
        rope = {name: completed.pop(name) for name in ("mrope_section", "rope_theta")}
        ropes = [completed.pop(name, None) for name in ("rope_parameters", "rope_scaling")]
        return family_for(plain).Config.from_hf(
            completed | {"rope_parameters": rope | dict(ropes[0] or ropes[1] or {})}
        )

    flat = outer.take("text_config", None) is None
    text = read(values) if flat else vision_language.read_once(outer, values, read)
    return vision_language.with_outer_head(outer, text)


def text_to_hf(config: Any, text_type: str, *unwritten: str) -> ConfigJson:
    """The object `text_config`. unwritten: fields of the plain family that the wrapper's text model does not have."""
    values = config.to_hf() | {"model_type": text_type}
    return {name: value for name, value in values.items() if name not in (*unwritten, "architectures")}


def merger_leaves(config: Any, width: int) -> dict[str, Leaf]:
    """The MLP that turns the patches of a cell, which are concatenated, into a feature [width]."""
    cell, std = config.hidden_size * config.merge**2, config.initializer_range
    up, out = weight((cell, cell), ("projection", "embed"), std), weight((width, cell), ("embed", "projection"), std)
    return {"up": up, "up_bias": bias(cell, "projection"), "out": out, "out_bias": bias(width, "embed")}


def merged(weights: Tree, x: Tensor) -> Tensor:
    """Features [..., width] of cells x [..., D of all patches of the cell]."""
    return linear(F.gelu(linear(x, weights["up"], weights["up_bias"])), weights["out"], weights["out_bias"])


def normed_merger_leaves(config: Any, width: int, *, joined_first: bool = False) -> dict[str, Leaf]:
    """`merger_leaves` and the leaves of Qwen3-VL's LayerNorm before it, of patches or, joined_first, of whole cells."""
    size = config.hidden_size * (config.merge**2 if joined_first else 1)
    return layer_norm_leaves("norm", size, "embed") | merger_leaves(config, width)


def normed_merger_names(path: str, name: str) -> dict[str, Stored]:
    """{path of a parameter: its name on disk} of a merger of Qwen3-VL."""
    parts = {"norm": "norm", "up": "linear_fc1", "out": "linear_fc2"}
    names: dict[str, Stored] = {}
    for ours, theirs in parts.items():
        names |= weight_and_bias(f"{path}.{ours}", f"{name}.{theirs}")
    return names


def project(weights: Tree, x: Tensor, places: Tensor, *, joined_first: bool = False) -> Tensor:
    """Features [1, cells, width] of hidden states x [rows, slots, D]: norm, cells, MLP; see `normed_merger_leaves`."""
    x = joined(x, places) if joined_first else x
    x = layer_norm(x, weights["norm"], weights["norm_bias"], eps=EPS)
    return merged(weights, x if joined_first else joined(x, places))


def placeholder(config: Any, name: image_prompts.Name) -> tuple[str, str]:
    """The token of features; chat templates put it between those that begin and end an image."""
    pad = name(config.image_token)
    return pad, f"<|vision_start|>{pad}<|vision_end|>"


def areas(settings: image_prompts.ImageSettings, least: int, most: int) -> tuple[int, int]:
    """The least and the largest number of pixels of an image, with those of settings that leave them out."""
    read = functools.partial(image_prompts.number, settings, most=50_000_000)
    least, most = read("size", "shortest_edge", least), read("size", "longest_edge", most)
    return read("min_pixels", "", least), read("max_pixels", "", most)  # of older files


def read_image(
    image: Tensor, settings: image_prompts.ImageSettings, name: image_prompts.Name, *, config: Any
) -> tuple[list[Tensor], str]:
    """(the image for the tower, text in place of the placeholder), see `image_prompts`."""
    cell = config.vision.patch_size * config.vision.merge
    picture = image_prompts.resized(image, fit_area(image, cell, *areas(settings, 56 * 56, 28 * 28 * 1280)), settings)
    return [picture], name(config.image_token) * (picture.shape[1] * picture.shape[2] // cell**2)

"""Common parts of GLM's vision-language models: a convolution over a cell of patches and a gated MLP make its feature.

The functions are those of a family whose Config has `text`, and `glm4v_vision`'s Config as `vision`.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.models.common.spec import Leaf, Normal, bias, gated_mlp_leaves, layer_norm_leaves, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision.common import two_towers
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import acting_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

from . import image_prompts, vision_language

EPS = 1e-5  # of the merger's LayerNorm, fixed in the reference
# The fields of config.json that are kept for saving only.
TOKENS = ("video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
_OUTSIDE = {"embed": "embed", "mlp": "projection"}  # tensor parallelism shards MLPs of layers alone


def spec(config: Any) -> Tree:
    """The parameters: those of both parts, and "merger": a convolution over a cell, and a gated MLP."""
    narrow, wide, m = config.vision.hidden_size, config.text.hidden_size, config.vision.merge
    std, axes = config.text.initializer_range, ("projection", "embed", "patch_row", "patch_column")
    merger: Tree = {"conv": Leaf((wide, narrow, m, m), torch.float32, axes, Normal(std))}
    merger |= {
        "conv_bias": bias(wide, "embed"),
        "proj": weight((wide, wide), ("projection", "embed"), std),
    } | layer_norm_leaves("norm", wide, "embed")
    mlp = gated_mlp_leaves(wide, config.vision.merger_size, std=std)
    merger["mlp"] = {
        name: replace(leaf, axes=tuple(_OUTSIDE[axis] for axis in leaf.axes)) for name, leaf in mlp.items()
    }
    return two_towers.towers_spec(config) | {"merger": merger}


def hf_names(config: Any) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    at = "model.visual."
    names = vision_language.nested_names(config, text="model.language_model.", vision=at)
    names |= weight_and_bias("merger.conv", f"{at}downsample") | {"merger.proj": f"{at}merger.proj.weight"}
    names |= weight_and_bias("merger.norm", f"{at}merger.post_projection_norm")
    return names | {f"merger.mlp.{n}_proj": f"{at}merger.{n}_proj.weight" for n in ("gate", "up", "down")}


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Any) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    weights = params["merger"]
    kernel = weights["conv"].permute(0, 2, 3, 1).flatten(1)  # of a cell's patches, row by row
    x = linear(linear(vision_language.joined(x, places), kernel, weights["conv_bias"]), weights["proj"])
    x = F.gelu(layer_norm(x, weights["norm"], weights["norm_bias"], eps=EPS))
    return acting_mlp(weights["mlp"], x, act=config.vision.act)


def placeholder(config: Any, name: image_prompts.Name) -> tuple[str, str]:
    """The token of features; chat templates put it between those that begin and end an image."""
    pad = name(config.image_token)
    return pad, f"<|begin_of_image|>{pad}<|end_of_image|>"

"""Hy4 with images (Tencent, 2026): cells of patches among the tokens of its text, and a newline after each row of them.

`load_pretrained(path, part="text")` reads the text alone, by `fnmodels.models.decoder.hy_v4`. Positions have three
axes; features are made by two convolutions, over a cell and 1 x 1.

patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = hy_v4_vl.project(params, x, hy_v4_vl.cells(at, image_ids, config.vision.merge), config=config)
places = hy_v4_vl.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
grids = torch.tensor([(1, rows, columns + 1)])  # of cells, and a column of newlines: `feature_grid`
positions = hy_v4_vl.image_positions(tokens == config.image_token, segment_ids, grids)
batch = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
inputs = hy_v4_vl.with_images(params, batch[0], features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, *batch[1:], config=config.text)

The frames of a video are images of the tower and of the text.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.inputs import image_places as places_of
from fnmodels.inputs.image_places import image_places  # noqa: F401
from fnmodels.inputs.image_positions import image_positions  # noqa: F401
from fnmodels.inputs.image_sizes import fit_area
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Leaf, Normal, bias, norm
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import vector, weight_and_bias
from fnmodels.models.vision import hy_v4_vl_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, qwen_vl, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name, placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import (  # noqa: F401
    cell_side,
    in_memory,
    leftovers,
    with_images,
)
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS
from fnmodels.ops.norm import rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("hy_v4_vl",)
_TEXT = "hy_v4_vl_text"
_MODEL = r"model\.(?:language_model\.)?"
TRAITS = Traits(
    # What transformers 5.24 renames wrongly, and the names of its class without a head.
    resaved={
        _MODEL + r"hc_head\.hc_pre\.(.*)": r"model.hc_head.\1",
        _MODEL + r"(layers\.\d+)\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\.(.*)": r"model.\1.\2.hc_pre.\3",
        _MODEL + r"(.*\.mlp|.*\.mlp\.shared_experts)\.linear_gate\.(.*)": r"model.\1.gate_proj.\2",
        r"model\.language_model\.(.*)": r"model.\1",
        r"model\.vision_tower\.(layers\.\d+)\.layer_norm1\.(.*)": r"vit.\1.input_layernorm.\2",
        r"model\.vision_tower\.(layers\.\d+)\.layer_norm2\.(.*)": r"vit.\1.post_attention_layernorm.\2",
        r"model\.vision_tower\.(.*)": r"vit.\1",
    },
    in_memory={
        **hy_v4_vl_vision.IN_MEMORY,
        r"\.perceive\.norm\.": ".perceive.before_rms.",
        r"\.perceive\.proj\.0\.": ".perceive.proj_conv.",
        r"\.perceive\.proj\.2\.": ".perceive.proj_out.",
        r"\.perceive\.": ".patch_merger.",
        r"^vit\.": "model.vision_tower.",
        r"^model\.(?!vision_tower\.)": "model.language_model.",
    },
)
features_of = vision_language.features_by_config


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace, newlines included."""

    text: Any
    vision: hy_v4_vl_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="hy_v4_vl", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        qwen_vl.check_widths(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        text = vision_language.text_config(outer, _TEXT, {})
        if text.model_type != _TEXT:
            raise UnsupportedError(
                f"{outer.where}, text_config: the model type {text.model_type!r} is not supported beside this tower; "
                f"{_TEXT} is."
            )
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, False)),
            vision=hy_v4_vl_vision.Config.from_hf(qwen_vl.tower_values(outer, "hy_v4_vl_vision")),
            image_token=outer.integer("image_token_id", 120120, low=0),
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, "video_token_id"))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = {"image_token_id": self.image_token, "tie_word_embeddings": self.text.tie_word_embeddings}
        return vision_language.to_hf(self, "HYV4VLForConditionalGeneration", **own)


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and "merger": a norm, two convolutions and the newline [text's D]."""
    narrow, wide, m = config.vision.hidden_size, config.vision.out_hidden_size, config.vision.merge
    std, inner, sides = config.vision.initializer_range, narrow * m**2, ("patch_row", "patch_column")
    merger: Tree = {"norm": norm(narrow, "embed"), "newline": vector(wide, wide**-0.5)}
    conv, out = ("projection", "embed", *sides), ("embed", "projection", *sides)
    merger |= {"conv": Leaf((inner, narrow, m, m), torch.float32, conv, Normal(std))}
    merger |= {"conv_bias": bias(inner, "projection")}
    merger |= {"out": Leaf((wide, inner, 1, 1), torch.float32, out, Normal(std)), "out_bias": bias(wide, "embed")}
    return two_towers.towers_spec(config) | {"merger": merger}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="", vision="vit.")
    names |= {"merger.norm": "vit.perceive.norm.weight", "merger.newline": "vit.perceive.image_newline"}
    names |= weight_and_bias("merger.conv", "vit.perceive.proj.0")
    return names | weight_and_bias("merger.out", "vit.perceive.proj.2")


def cells(positions: Tensor, segment_ids: Tensor, side: int) -> Tensor:
    """As `fnmodels.inputs.image_places.cells`, with (-1, -1) for the newline after each row of an image's cells."""
    found = places_of.cells(positions, segment_ids, side)
    first = positions[found[:, 0, 0], found[:, 0, 1]]  # of each cell's patches
    ends = (first[:, 1] + side == first[:, 3]).long()
    whole = found.new_full((len(found) + int(ends.sum()), *found.shape[1:]), -1)
    whole[torch.arange(len(found), device=found.device) + ends.cumsum(0) - ends] = found
    return whole


def feature_grid(rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns of features of an image of rows x columns cells: newlines are the last column."""
    return rows, columns + 1


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells and newlines, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    weights = params["merger"]
    x = vision_language.joined(rms_norm(x, weights["norm"], eps=config.vision.layer_norm_eps), places.clamp(min=0))
    kernel = weights["conv"].permute(0, 2, 3, 1).flatten(1)  # of a cell's patches, row by row
    x = ACTIVATIONS[config.vision.hidden_act](linear(x, kernel, weights["conv_bias"]))
    x = linear(x, weights["out"].flatten(1), weights["out_bias"])
    return torch.where(places[None, :, 0, :1] < 0, weights["newline"].to(x.dtype), x)


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(the image for the tower, text in place of the placeholder), see `image_prompts`.

    Pictures are resized bicubically whatever the settings say, as by transformers.
    """
    cell = config.vision.patch_size * config.vision.merge
    size = fit_area(image, cell, *qwen_vl.areas(settings, 512 * 512, 2048 * 2048))
    rows, columns = feature_grid(size[0] // cell, size[1] // cell)
    return [image_prompts.resized(image, size, {})], name(config.image_token) * (rows * columns)

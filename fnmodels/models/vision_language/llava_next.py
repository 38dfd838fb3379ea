"""LLaVA-NeXT (LLaVA 1.6, 2024), its video model and LLaVA-OneVision (arXiv 2408.03326): tiles with newlines.

A picture is read whole and in tiles, whose features are put together again; padding is left out and a learned newline
ends each row. LLaVA-OneVision shrinks what is more than `most_tiles` tiles. Videos are not read.

seen, tower = llava_next.tower(params, config)
batch = fnmodels.prepare(tower, *fnmodels.inputs.patch_rows(picture.tiles, tower))  # patches, positions, segment_ids
x = fnmodels.hidden(seen, *batch, config=tower)
features = llava_next.arranged(params, llava_next.project(params, x), picture.size, config=config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = llava_next.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = llava_next.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.image_places import cells, gather_cells, image_places  # noqa: F401
from fnmodels.inputs.image_sizes import TiledImage, best_canvas, tiled, without_padding
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.family import Traits
from fnmodels.models.common.registry import family_for
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import vector
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name, placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_images  # noqa: F401
from fnmodels.tree import Tree

_LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_SIZES = (*_LLAMA, "num_key_value_heads")
_CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
_CLIP |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14}
_SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 384}
_SIGLIP |= {"num_hidden_layers": 26, "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False}


def _next(sizes: tuple[int, ...], token: int = 32000, **rest: Any) -> ConfigJson:
    text = {"model_type": "llama", "vocab_size": token + 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    text |= dict(zip(_SIZES, sizes, strict=True)) | rest
    return {"model_type": "llava_next", "image_token_index": token, "text_config": text, "vision_config": _CLIP}


def _onevision(sizes: tuple[int, ...], vocab: int = 152128, **rest: Any) -> ConfigJson:
    text = {"model_type": "qwen2", "vocab_size": vocab, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
    text |= {"rope_theta": 1e6} | dict(zip(_SIZES, sizes, strict=True)) | rest
    return {"model_type": "llava_onevision", "text_config": text, "vision_config": _SIGLIP}


# config.json of llava-hf/llava-v1.6-*-hf and llava-hf/llava-onevision-qwen2-*-ov-hf, whose conversion pads the
# vocabulary of the text to the next multiple of 64 that has room for the tokens of pictures.
PRESETS: dict[str, ConfigJson] = {
    "llava-1.6-mistral-7b": _next(
        (4096, 14336, 32, 32, 8),
        model_type="mistral",
        rope_theta=1e6,
        max_position_embeddings=32768,
        sliding_window=None,
    ),
    "llava-1.6-vicuna-7b": _next((4096, 11008, 32, 32, 32)),
    "llava-1.6-vicuna-13b": _next((5120, 13824, 40, 40, 40)),
    "llava-1.6-34b": _next((7168, 20480, 60, 56, 8), 64000, rope_theta=5e6),
    "llava-onevision-0.5b": _onevision((896, 4864, 24, 14, 2), 152000, tie_word_embeddings=True),
    "llava-onevision-7b": _onevision((3584, 18944, 28, 28, 4)),
    "llava-onevision-72b": _onevision((8192, 29568, 80, 64, 8)),
}


@dataclass(frozen=True)
class _Type:
    """Constants of a model type: its class, and defaults of the fields of config.json."""

    architecture: str
    text: tuple[str, dict[str, Any]] = ("llama", _LLAMA)
    tower: str = "clip_vision_model"
    token: int = 32000
    layer: int = -2
    canvases: tuple[tuple[int, int], ...] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    most_tiles: int = 0  # 0: pictures are not shrunk


_SIDES = range(384, 2305, 384)
_TYPES = {
    "llava_next": _Type("LlavaNextForConditionalGeneration"),
    "llava_next_video": _Type("LlavaNextVideoForConditionalGeneration", token=32001),
    "llava_onevision": _Type(
        "LlavaOnevisionForConditionalGeneration",
        ("qwen2", {}),
        "siglip_vision_model",
        151646,
        -1,
        tuple((height, width) for height in _SIDES for width in _SIDES),
        9,
    ),
}
MODEL_TYPES = tuple(_TYPES)
tower, taps = vision_language.cut_tower, vision_language.layer_taps
TRAITS = Traits(
    leftovers=(r"vision_tower\.(vision_model\.)?embeddings\.position_ids",),
    resaved={r"model\.image_newline": "image_newline", **vision_language.IN_MEMORY_WITHOUT_VISION_MODEL},
    in_memory={r"^image_newline": "model.image_newline", **vision_language.MODULES},
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace. canvases: (height, width) of tiled pictures.

    feature_layers: after how many layers of the tower the hidden states are read. most_tiles: beyond which features of
    tiles are shrunk, 0: never.
    """

    text: Any
    vision: Any
    image_token: int
    feature_layers: tuple[int, ...]
    canvases: tuple[tuple[int, int], ...]
    most_tiles: int = 0
    projector_bias: bool = True
    # kept for saving only
    model_type: str = field(default="llava_next", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        side = self.vision.image_size
        if not self.canvases or any(height % side or width % side for height, width in self.canvases):
            raise ConfigError(f"image_grid_pinpoints must be multiples of a tile's {side} pixels.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        variant = _TYPES[model_type]
        outer.expect("projector_hidden_act", "gelu")
        outer.expect("use_image_newline_parameter", True)
        outer.take("vocab_size", None)  # compared below
        text = vision_language.text_config(outer, *variant.text)
        outer.expect("vocab_size", text.vocab_size, 32000)  # the latter is the default in older releases, for any text
        tied = vision_language.tied_head(outer, text, False)
        tied = tied or (model_type == "llava_onevision" and text.tie_word_embeddings)
        seen = two_towers.tower_fields(outer, "vision_config", variant.tower)
        vision = family_for(seen["model_type"]).Config.from_hf(seen)
        outer.expect("vision_feature_select_strategy", _strategy(vision))
        config = Config(
            text=vision_language.with_tie(text, tied),
            vision=vision,
            image_token=outer.integer("image_token_index", variant.token, low=0),
            feature_layers=vision_language.feature_layers(
                outer.take("vision_feature_layer", variant.layer), vision.num_hidden_layers
            ),
            canvases=_canvases(outer, variant),
            most_tiles=_most_tiles(outer.take("vision_aspect_ratio", "anyres_max_9")) if variant.most_tiles else 0,
            projector_bias=outer.boolean("multimodal_projector_bias", True),
            model_type=model_type,
        )
        videos = ("spatial_pool_mode", "spatial_pool_stride", "spatial_pool_out_channels", "video_seq_length")
        object.__setattr__(config, "extra", vision_language.kept(outer, ignored=("image_seq_length", *videos)))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        layers = [count - self.vision.num_hidden_layers - 1 for count in self.feature_layers]
        return vision_language.to_hf(
            self,
            _TYPES[self.model_type].architecture,
            image_token_index=self.image_token,
            vision_feature_layer=layers if len(layers) > 1 else layers[0],
            vision_feature_select_strategy=_strategy(self.vision),
            image_grid_pinpoints=[list(canvas) for canvas in self.canvases],
            multimodal_projector_bias=self.projector_bias,
            projector_hidden_act="gelu",
            tie_word_embeddings=self.text.tie_word_embeddings,
            **({"vision_aspect_ratio": f"anyres_max_{self.most_tiles}"} if self.most_tiles else {}),
        )


def _strategy(vision: Any) -> str:
    """Features are of all patches: "default" leaves out a class token."""
    return "default" if vision.special_tokens else "full"


def _canvases(outer: Fields, variant: _Type) -> tuple[tuple[int, int], ...]:
    canvases = outer.take("image_grid_pinpoints", [list(canvas) for canvas in variant.canvases])
    if not isinstance(canvases, list) or not all(
        isinstance(canvas, list | tuple)
        and len(canvas) == 2
        and all(type(n) is int and 0 < n < 100_000 for n in canvas)
        for canvas in canvases
    ):
        raise ConfigError(f"{outer.where}: 'image_grid_pinpoints' is {shown(canvases)}; it must be a list of sizes.")
    return tuple((height, width) for height, width in canvases)


def _most_tiles(value: Any) -> int:
    count = value.removeprefix("anyres_max_") if isinstance(value, str) else ""
    if not count.isdigit() or not 0 < int(count) < 1000:
        raise UnsupportedError(f"'vision_aspect_ratio' is {shown(value)}; anyres_max_N is supported.")
    return int(count)


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, the projector's weights [out, in], and the newline [text's D]."""
    narrow, wide = config.vision.hidden_size * len(config.feature_layers), config.text.hidden_size
    std = config.text.initializer_range
    projector = vision_language.mlp_leaves(narrow, wide, std, biases=config.projector_bias)
    return two_towers.towers_spec(config) | {"projector": projector, "newline": vector(wide, std)}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", vision="vision_tower.")
    return names | vision_language.mlp_names(config.projector_bias) | {"newline": "image_newline"}


def project(params: Tree, x: Tensor, /) -> Tensor:
    """The tower's hidden states [rows, slots, D] in the text's width: [rows, slots, text's D]."""
    return vision_language.mlp(params["projector"], x)


def arranged(params: Tree, features: Tensor, size: tuple[int, int], /, *, config: Config) -> Tensor:
    """Features [1, count, D] of a picture of `size` (height, width), newlines among them.

    features: [1, (1 + tiles) * side * side, D], of the whole picture and then of its tiles.
    """
    side, newline = config.vision.side, params["newline"].to(features.dtype)
    whole, tiles = features[0, : side**2], features[0, side**2 :]
    if not len(tiles):
        return torch.cat((whole, newline[None]))[None]
    rows, columns = _tiles_of(size, config)
    grid = tiles.reshape(rows, columns, side, side, -1).transpose(1, 2).flatten(0, 1).flatten(1, 2)
    down, right, (height, width) = _kept(size, config)
    grid = grid[down, right]
    if grid.shape[:2] != (height, width):
        grid = F.interpolate(grid.permute(2, 0, 1)[None], (height, width), mode="bilinear")[0].permute(1, 2, 0)
    grid = torch.cat((grid, newline.expand(height, 1, -1)), 1)
    return torch.cat((whole, grid.flatten(0, 1)))[None]


def feature_count(tiles: int, size: tuple[int, int], *, config: Config) -> int:
    """The number of features that `arranged` makes of a picture of this size in 1 + n tiles. ValueError for others."""
    whole = config.vision.side**2
    if tiles == 1:
        return whole + 1
    rows, columns = _tiles_of(size, config)
    if tiles != 1 + rows * columns:
        raise ValueError(
            f"A picture of {size[0]} x {size[1]} pixels has {rows} x {columns} tiles and one of the whole, not {tiles}."
        )
    height, width = _kept(size, config)[2]
    return whole + height * (width + 1)


def _tiles_of(size: tuple[int, int], config: Config) -> tuple[int, int]:
    height, width = best_canvas(size, config.canvases)
    return height // config.vision.image_size, width // config.vision.image_size


def _kept(size: tuple[int, int], config: Config) -> tuple[slice, slice, tuple[int, int]]:
    """The rows and columns of patches of all tiles that are no padding, and how many are left of them."""
    side = config.vision.side
    rows, columns = _tiles_of(size, config)
    down, right = without_padding(rows * side, columns * side, size)
    height, width = down.stop - down.start, right.stop - right.start
    ratio = math.sqrt(height * width / (config.most_tiles * side**2)) if config.most_tiles else 1.0
    shrunk = ratio > 1.1
    return down, right, ((int(height // ratio), int(width // ratio)) if shrunk else (height, width))


def cell_side(config: Config) -> int:
    """The patches of a side of a cell, which is one feature."""
    return 1


def features_of(
    params: Tree, x: Tensor, tapped: Mapping[str, Tensor], places: Tensor, /, *, config: Config
) -> tuple[Tensor, ...]:
    """`project` as `fnmodels.image_text` calls it for a tile."""
    x = vision_language.of_layers(x, tapped, config)
    return (project(params, gather_cells(x, places)[None, :, 0]),)


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[TiledImage], str]:
    """(images for the tower, text in place of the placeholder), see `common.image_prompts`."""
    side, size = config.vision.image_size, (image.shape[1], image.shape[2])
    image_prompts.expect_side(settings, "crop_size", "height", side)
    image_tiles = TiledImage(tiled(image, side, config.canvases, how=image_prompts.how(settings)), size)
    return [image_tiles], name(config.image_token) * feature_count(len(image_tiles.tiles), size, config=config)

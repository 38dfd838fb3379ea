"""Llama 4 with images (Meta, 2025): cells of 2 x 2 patches of tiles among the tokens of the text model.

`load_pretrained(path, part="text")` reads the text alone, by `fnmodels.models.decoder.llama4`.

patches, at, image_ids = fnmodels.inputs.patch_rows(tiles, config.vision, length=...)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = llama4.project(params, x, llama4.cells(at, image_ids, config.vision.merge))
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = llama4.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = llama4.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.inputs.image_sizes import canvas, tiles
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.spec import weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision import llama4_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name
from fnmodels.models.vision_language.common.vision_language import cell_side, features_of, with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("llama4",)
# Fields that text_config leaves out where they equal the defaults.
_TEXT = {"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48}
_TEXT |= {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: llama4_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="llama4", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        text = vision_language.text_config(outer, "llama4_text", _TEXT)
        config = Config(
            text=vision_language.with_tie(text, outer.boolean("tie_word_embeddings", text.tie_word_embeddings)),
            vision=llama4_vision.Config.from_hf(two_towers.tower_fields(outer, "vision_config", "llama4_vision_model")),
            image_token=outer.integer("image_token_index", 200092, low=0),
        )
        extra = vision_language.kept(outer, "boi_token_index", "eoi_token_index")
        object.__setattr__(config, "extra", extra)
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return vision_language.to_hf(
            self,
            "Llama4ForConditionalGeneration",
            image_token_index=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weights [out, in]."""
    wide, std = config.vision.output_dim, config.text.initializer_range
    projector = llama4_vision.adapter_leaves(config.vision, std)
    projector["proj"] = weight((config.text.hidden_size, wide), ("projection", "embed"), std)
    return two_towers.towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", vision="vision_model.")
    own = {"up": "vision_model.vision_adapter.mlp.fc1", "out": "vision_model.vision_adapter.mlp.fc2"}
    own["proj"] = "multi_modal_projector.linear_1"
    return names | {f"projector.{path}": f"{name}.weight" for path, name in own.items()}


def project(params: Tree, x: Tensor, places: Tensor, /) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    weights = params["projector"]
    return linear(llama4_vision.adapted(weights, x, places), weights["proj"])


def placeholder(config: Config, name: Name) -> tuple[str, str]:
    """The token before the tile that is the whole image; `config.image_token` is that of features."""
    return "<|image|>", "<|image|>"


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(images for the tower, text in place of the placeholder), see `common.image_prompts`."""
    image_prompts.refuse(settings, "resize_to_max_canvas")
    side = config.vision.image_size
    image_prompts.expect_side(settings, "size", "height", side)
    most = image_prompts.number(settings, "max_patches", "", 16, most=64)
    found = list(tiles(image, side, most))
    rows, columns = canvas(image, side, most)
    tile = name(config.image_token) * (side // (config.vision.patch_size * config.vision.merge)) ** 2
    row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
    before = row * rows if len(found) > 1 else ""
    return found, f"<|image_start|>{before}<|image|>{tile}<|image_end|>"

"""PaddleOCR-VL (arXiv 2510.14528): cells of SigLIP's patches among the tokens of ERNIE 4.5, positions of three axes.

patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = paddleocr_vl.project(params, x, paddleocr_vl.cells(at, image_ids, config.vision.merge))
places = paddleocr_vl.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
positions = paddleocr_vl.image_positions(tokens == config.image_token, segment_ids, grids)  # grids of cells
batch = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
inputs = paddleocr_vl.with_images(params, batch[0], features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, *batch[1:], config=config.text)

The text is Llama's block with ERNIE's fields; its rotary embedding turns halves, other than ERNIE's own.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.inputs.image_positions import image_positions  # noqa: F401
from fnmodels.inputs.image_sizes import fit_area
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import siglip_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, qwen_vl, vision_language
from fnmodels.models.vision_language.common.vision_language import cell_side, features_of, with_images  # noqa: F401
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("paddleocr_vl",)
TRAITS = Traits(
    leftovers=(r"visual\.vision_model\.(head|embeddings\.packing_position_embedding|embeddings\.position_ids)\b.*",),
    resaved={
        r"model\.language_model\.(.*)": r"model.\1",
        r"model\.(visual\..*)": r"\1",
        r"model\.projector\.(.*)": r"mlp_AR.\1",
    },
    in_memory={r"^model\.": "model.language_model.", r"^visual\.": "model.visual.", r"^mlp_AR\.": "model.projector."},
)
EPS = 1e-5  # of the LayerNorm before the merger, fixed in the reference
_TEXT: dict[str, Any] = {"vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18}
_TEXT |= {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}
_TEXT |= {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "mrope_section": [16, 24, 24]}
# What published files, which are of one level, say without an effect.
_FIXED: dict[str, Any] = {"compression_ratio": 1.0, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_FIXED |= {"sliding_window": None}
_IGNORED = ("ignored_index", "max_sequence_length", "use_flash_attention", "weight_share_add_bias", "auto_map")
PRESETS: dict[str, ConfigJson] = {
    "paddleocr-vl-0.9b": {"model_type": "paddleocr_vl", "tie_word_embeddings": False}
    | {"text_config": {"tie_word_embeddings": False}, "vision_config": {}},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: siglip_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="paddleocr_vl", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        text = values.get("text_config")
        own = {"text_config": {"tie_word_embeddings": True, **text}} if isinstance(text, dict) else {}
        outer = Fields({"tie_word_embeddings": True, **values, **own})  # untied are files whose both objects say so
        outer.choice("model_type", MODEL_TYPES)
        for name, value in _FIXED.items():
            outer.expect(name, value)
        for name in _IGNORED:
            outer.take(name, None)
        rest = Fields({name: value for name, value in outer.values.items() if name not in (*_FIXED, *_IGNORED)})
        inner = qwen_vl.text_values(rest)
        bias = Fields(inner, "text_config").boolean("use_bias", False)
        inner = {name: value for name, value in inner.items() if name != "use_bias"}
        inner |= {"attention_bias": True, "mlp_bias": True} if bias else {}
        config = Config(
            text=qwen_vl.text_config(rest, inner, "paddleocr_vl_text", "llama", defaults=_TEXT),
            vision=siglip_vision.Config.from_hf(qwen_vl.tower_values(rest, "paddleocr_vl_vision")),
            image_token=rest.integer("image_token_id", 100295, low=0),
        )
        object.__setattr__(config, "extra", vision_language.kept(rest, *qwen_vl.TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        text = qwen_vl.text_to_hf(self.text, "paddleocr_vl_text", "attention_bias", "mlp_bias")
        return vision_language.to_hf(
            self,
            "PaddleOCRVLForConditionalGeneration",
            text_config=text | {"use_bias": self.text.qkv_bias},
            image_token_id=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and "merger"."""
    merger = qwen_vl.normed_merger_leaves(config.vision, config.text.hidden_size)
    return two_towers.towers_spec(config) | {"merger": merger}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="", vision="visual.")
    for path, name in (("norm", "pre_norm"), ("up", "linear_1"), ("out", "linear_2")):
        names |= weight_and_bias(f"merger.{path}", f"mlp_AR.{name}")
    return names


def project(params: Tree, x: Tensor, places: Tensor, /) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    weights = params["merger"]
    normed = layer_norm(x, weights["norm"], weights["norm_bias"], eps=EPS)
    return qwen_vl.merged(weights, vision_language.joined(normed, places))


def placeholder(config: Config, name: image_prompts.Name) -> tuple[str, str]:
    """The token of features; chat templates put it between those that begin and end an image."""
    begin = name(image_prompts.kept_id(config, ("vision_start_token_id",), 101305))
    end = name(image_prompts.kept_id(config, ("vision_end_token_id",), 101306))
    return name(config.image_token), begin + name(config.image_token) + end


def read_image(
    image: Tensor, settings: image_prompts.ImageSettings, name: image_prompts.Name, *, config: Config
) -> tuple[list[Tensor], str]:
    """(the image for the tower, text in place of the placeholder), see `image_prompts`.

    The sides of a picture that is less than a cell high, or then wide, count as those of one that is enlarged to it.
    """
    cell, (height, width) = config.vision.patch_size * config.vision.merge, image.shape[1:]
    if height < cell:
        height, width = cell, round(width * cell / height)
    if width < cell:
        height, width = round(height * cell / width), cell
    shape = torch.empty(3, height, width, device="meta")
    size = fit_area(shape, cell, *qwen_vl.areas(settings, 384 * 384, 1536 * 1536))
    return [image_prompts.resized(image, size, settings)], name(config.image_token) * (size[0] * size[1] // cell**2)

"""Mistral Small 3.1 and 3.2, Ministral 3, LightOnOCR: Pixtral's patches, merged in cells, among a text's tokens.

Row breaks between an image's tokens are ordinary tokens of the text; LightOnOCR (LightOn, 2025), with Qwen 3, has none.

patches, at, image_ids = fnmodels.inputs.patch_rows(images, config.vision, length=...)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = mistral3.project(params, x, mistral3.cells(at, image_ids, config.merge), config=config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = mistral3.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = mistral3.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.image_places import cells, gather_cells, image_places  # noqa: F401
from fnmodels.inputs.image_sizes import fit_edge
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import norm, weight
from fnmodels.models.common.storage import StoredNames, renamed
from fnmodels.models.vision import pixtral
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name, placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm
from fnmodels.tree import Tree

TRAITS = Traits(resaved=vision_language.IN_MEMORY, in_memory=vision_language.MODULES)
features_of = vision_language.features_by_config
# Fields that text_config leaves out where they equal the defaults.
_MISTRAL: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
_MISTRAL |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
_SMALL: dict[str, Any] = {"vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "head_dim": 128}
_SMALL |= {"num_hidden_layers": 40, "rope_theta": 1e9, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_PIXTRAL = {"image_size": 1540, "patch_size": 14, "hidden_act": "silu"}

# The family of the text, the fields that it leaves out, and the model's class.
_TYPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mistral3": ("mistral", _MISTRAL, "Mistral3ForConditionalGeneration"),
    "lighton_ocr": ("qwen3", {}, "LightOnOcrForConditionalGeneration"),
}
MODEL_TYPES = tuple(_TYPES)
# The text of LightOnOCR-1B-1025 and of LightOnOCR-2-1B (arXiv 2601.14251).
_QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072}
_QWEN3 |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_QWEN3 |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True}
PRESETS: dict[str, ConfigJson] = {
    "mistral-small-3.1-24b": {"model_type": "mistral3", "tie_word_embeddings": False, "vision_config": _PIXTRAL}
    | {"text_config": {"model_type": "mistral", "sliding_window": None} | _SMALL},
    "lightonocr-1b": {"model_type": "lighton_ocr", "vision_config": _PIXTRAL, "text_config": _QWEN3},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace; merge: the patches of a side of a cell."""

    text: Any
    vision: pixtral.Config
    image_token: int
    merge: int = 2
    projector_bias: bool = False
    # kept for saving only
    model_type: str = field(default="mistral3", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        outer.expect("projector_hidden_act", "gelu")
        outer.expect("vision_feature_layer", -1, [-1])
        text = vision_language.text_config(outer, *_TYPES[model_type][:2])
        tower = two_towers.tower_fields(outer, "vision_config", "pixtral")
        image = ("image_token_id", 151655) if model_type == "lighton_ocr" else ("image_token_index", 10)
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, True)),
            vision=pixtral.Config.from_hf(tower),
            image_token=outer.integer(image[0], outer.take("image_token_id", image[1]), low=0),
            merge=outer.integer("spatial_merge_size", 2),
            projector_bias=outer.boolean("multimodal_projector_bias", False),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", vision_language.kept(outer))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        old = {"image_token_index": self.image_token, "vision_feature_layer": -1, "projector_hidden_act": "gelu"}
        old |= {"multimodal_projector_bias": self.projector_bias}
        fields = {"image_token_id": self.image_token} if self.model_type == "lighton_ocr" else old
        tied = self.text.tie_word_embeddings
        more = {"spatial_merge_size": self.merge, "tie_word_embeddings": tied}
        return vision_language.to_hf(self, _TYPES[self.model_type][2], **fields, **more)


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's norm and weights [out, in]."""
    narrow, wide, std = config.vision.hidden_size, config.text.hidden_size, config.text.initializer_range
    projector: Tree = {
        "norm": norm(narrow, "embed"),
        "merge": weight((narrow, config.merge**2 * narrow), ("projection", "embed"), std),
    }
    projector |= vision_language.mlp_leaves(narrow, wide, std, biases=config.projector_bias)
    return two_towers.towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    if config.model_type == "lighton_ocr":
        names = vision_language.nested_names(config, text="model.language_model.", vision="model.vision_encoder.")
    else:
        names = vision_language.part_names(config, text="language_model.", vision="vision_tower.")
    for path, name in (("norm", "norm"), ("merge", "patch_merger.merging_layer")):
        names[f"projector.{path}"] = f"multi_modal_projector.{name}.weight"
    names |= vision_language.mlp_names(config.projector_bias)
    if config.model_type == "lighton_ocr":
        there = r"model.vision_projection."
        names = {path: renamed(name, r"^multi_modal_projector\.", there) for path, name in names.items()}
    return names


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.merge` patches a side, see `cells`.
    """
    weights = params["projector"]
    normed = rms_norm(x, weights["norm"], eps=config.text.rms_norm_eps)
    merged = linear(gather_cells(normed, places).mT.flatten(1)[None], weights["merge"])
    return vision_language.mlp(weights, merged)


def cell_side(config: Config) -> int:
    """The patches of a side of a cell, which is one feature."""
    return config.merge


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(images for the tower, text in place of the placeholder), see `common.image_prompts`."""
    cell = config.vision.patch_size * config.merge
    edge = image_prompts.number(settings, "size", "longest_edge", 1540, most=5000)
    picture = image_prompts.resized(image, fit_edge(image, cell, edge), settings)
    row = name(config.image_token) * (picture.shape[2] // cell)
    if config.model_type == "lighton_ocr":
        return [picture], row * (picture.shape[1] // cell)
    return [picture], "[IMG_BREAK]".join([row] * (picture.shape[1] // cell)) + "[IMG_END]"

"""EXAONE 4.5 (LG AI Research, 2026): cells of 2 x 2 patches of a tower like Qwen2.5-VL's among the tokens of EXAONE 4.

Positions have one axis. `load_pretrained(path, part="text")` reads the text alone.

image = image.repeat_interleave(config.vision.frames, 0)  # [C T, H, W]: a picture is a video that stands still
patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.hidden(params["vision"], *batch, config=config.vision)
features = exaone4_5.project(params, x, exaone4_5.cells(at, image_ids, config.vision.merge))
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = exaone4_5.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = exaone4_5.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import field_of
from fnmodels.models.common.spec import norm
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import qwen2_5_vl_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import qwen_vl, vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.qwen_vl import read_image  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import (  # noqa: F401
    cell_side,
    features_of,
    leftovers,
    with_images,
)
from fnmodels.ops.norm import rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("exaone4_5",)
_HEADS = "num_nextn_predict_layers"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: qwen2_5_vl_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="exaone4_5", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        qwen_vl.check_widths(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        inner = values.get("text_config")
        if isinstance(inner, dict) and inner.get("model_type") == "exaone4_5_text":  # in the first release
            values = values | {"text_config": inner | {"model_type": "exaone4"}}
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        text = vision_language.text_config(outer, "exaone4", {})
        heads = outer.integer(_HEADS, 1, low=0, high=1)  # files have the head and may have no field that says so
        if text.model_type == "exaone4" and not (isinstance(inner, dict) and _HEADS in inner):
            text = replace(text, num_nextn_predict_layers=heads)
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, False)),
            vision=qwen2_5_vl_vision.Config.from_hf(qwen_vl.tower_values(outer, "exaone4_5_vision")),
            image_token=outer.integer("image_token_id", 67, low=0),
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, *qwen_vl.TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return vision_language.to_hf(
            self,
            "Exaone4_5_ForConditionalGeneration",
            image_token_id=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
            num_nextn_predict_layers=field_of(self.text, _HEADS),
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and "merger"."""
    merger = {"norm": norm(config.vision.hidden_size, "embed")}
    merger |= qwen_vl.merger_leaves(config.vision, config.text.hidden_size)
    return two_towers.towers_spec(config) | {"merger": merger}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.nested_names(config, text="model.language_model.", vision="model.visual.")
    names["merger.norm"] = "model.visual.merger.ln_q.weight"
    for ours, theirs in (("up", 0), ("out", 2)):
        names |= weight_and_bias(f"merger.{ours}", f"model.visual.merger.mlp.{theirs}")
    return names


def project(params: Tree, x: Tensor, places: Tensor, /) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    weights = params["merger"]
    normed = rms_norm(x, weights["norm"], eps=qwen2_5_vl_vision.EPS)
    return qwen_vl.merged(weights, vision_language.joined(normed, places))

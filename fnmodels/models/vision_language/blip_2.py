"""BLIP-2 (arXiv 2301.12597): a few queries of a Q-Former read an image, and stand among the tokens of a text.

patches, at, image_ids = fnmodels.inputs.patch_rows(images, config.vision, length=...)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = blip_2.project(params, x, blip_2.cells(at, image_ids, 1), config=config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = blip_2.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = blip_2.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)

Images have the size of the tower's position table. Models around T5 are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.models.common import q_former
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import blip_2_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_raw_images as with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("blip-2",)
TRAITS = Traits(leftovers=(r"qformer\.embeddings\..*", r"language_model\.lm_head\.bias"))
features_of = vision_language.features_by_config
# config.json of Salesforce/blip2-opt-2.7b and -6.7b (arXiv 2301.12597), whose vocabulary has a token for pictures.
PRESETS: dict[str, ConfigJson] = {
    name: {
        "model_type": "blip-2",
        "image_token_index": 50265,
        "text_config": {"model_type": "opt", "vocab_size": 50304, "hidden_size": width, "word_embed_proj_dim": width}
        | {"ffn_dim": 4 * width, "num_hidden_layers": 32, "num_attention_heads": 32},
        "vision_config": {"model_type": "blip_2_vision_model"},
        "qformer_config": {"model_type": "blip_2_qformer"},
    }
    for name, width in (("blip2-opt-2.7b", 2560), ("blip2-opt-6.7b", 4096))
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace; query_count: those of an image."""

    text: Any
    vision: blip_2_vision.Config
    q_former: q_former.QFormer
    image_token: int
    query_count: int = 32
    # kept for saving only
    model_type: str = field(default="blip-2", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        outer.expect("use_decoder_only_language_model", True)
        text = vision_language.text_config(outer, "opt", {})
        vision = blip_2_vision.Config.from_hf(two_towers.tower_fields(outer, "vision_config", "blip_2_vision_model"))
        inner = outer.take("qformer_config", {})
        inner = {**inner, "encoder_hidden_size": vision.hidden_size} if isinstance(inner, Mapping) else inner
        config = Config(
            text=vision_language.with_tie(text, outer.boolean("tie_word_embeddings", text.tie_word_embeddings)),
            vision=vision,
            q_former=q_former.q_former_of(inner, f"{outer.where}, qformer_config"),
            image_token=outer.integer("image_token_index", low=0),
            query_count=outer.integer("num_query_tokens", 32),
        )
        ignored = ("image_text_hidden_size", "initializer_factor", "initializer_range")
        object.__setattr__(config, "extra", vision_language.kept(outer, ignored=ignored))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {"qformer_config": q_former.q_former_to_hf(self.q_former)}
        own |= {"image_token_index": self.image_token, "num_query_tokens": self.query_count}
        return vision_language.to_hf(self, "Blip2ForConditionalGeneration", **own)


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the Q-Former with an output projection [out, in]."""
    wide, std = config.text.hidden_size, config.q_former.initializer_range
    projector = q_former.q_former_leaves(config.q_former, config.query_count) | {"out_bias": bias(wide, "embed")}
    projector["out"] = weight((wide, config.q_former.hidden_size), ("embed", "projection"), std)
    return two_towers.towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", vision="vision_model.")
    inner = q_former.q_former_names(config.q_former, "qformer.")
    names |= {f"projector.{path}": name for path, name in inner.items()}
    return names | {"projector.queries": "query_tokens"} | weight_and_bias("projector.out", "language_projection")


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, images * queries, text's D] of the tower's hidden states x [rows, slots, D] after its last norm.

    places: of the patches, see `cells`; the class token stands before those of its image. ValueError for images of
    another size than the tower's.
    """
    count = config.vision.side**2
    if len(places) % count:
        raise ValueError(f"Images must have {config.vision.image_size} x {config.vision.image_size} pixels.")
    patches = places[:, 0].unflatten(0, (-1, count))
    row, slot = torch.cat((patches[:, :1] - patches.new_tensor((0, 1)), patches), 1).unbind(-1)
    read = q_former.q_former(params["projector"], x[row, slot], config.q_former)
    return linear(read, params["projector"]["out"], params["projector"]["out_bias"]).flatten(0, 1)[None]


def queries(config: Config) -> int:
    """The features of an image."""
    return config.query_count


def cell_side(config: Config) -> int:
    """1: a patch is no cell of several."""
    return 1

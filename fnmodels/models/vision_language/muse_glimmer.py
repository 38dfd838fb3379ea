"""Muse Glimmer (Meta, 2026, 30B): cells of patches among the tokens of its text, through an MLP and a scaleless norm.

patches, at, image_ids = fnmodels.inputs.patch_rows([image.repeat_interleave(2, 0)], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = muse_glimmer.project(params, x, muse_glimmer.cells(at, image_ids, config.vision.merge), config=config)

The rest is as in `kimi_k25.py`. Videos are not read.
"""

from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.image_places import cells, gather_cells, image_places  # noqa: F401
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision import muse_glimmer_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import cell_side, with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("muse_glimmer",)
TRAITS = Traits()
features_of = vision_language.features_by_config
_TEXT: dict[str, Any] = {"vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52}
_TEXT |= {"num_attention_heads": 32, "num_key_value_heads": 2}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace; inner: the width of the MLP between them."""

    text: Any
    vision: muse_glimmer_vision.Config
    image_token: int
    inner: int = 4096
    # kept for saving only
    model_type: str = field(default="muse_glimmer", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def cell_width(self) -> int:
        """The width of a cell of patches."""
        return self.vision.hidden_size * self.vision.merge**2

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        outer.expect("projector_hidden_act", "gelu")
        text = vision_language.text_config(outer, "muse_glimmer_text", _TEXT)
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, text.tie_word_embeddings)),
            vision=muse_glimmer_vision.Config.from_hf(
                two_towers.tower_fields(outer, "vision_config", "muse_glimmer_vision")
            ),
            image_token=outer.integer("image_token_id", 200092, low=0),
            inner=outer.integer("projector_hidden_size", 4096),
        )
        width = outer.integer("out_hidden_size", 6144)
        if width != config.cell_width:
            raise ConfigError(f"{outer.where}: out_hidden_size is {width}; a cell is {config.cell_width} wide.")
        object.__setattr__(config, "extra", vision_language.kept(outer, "video_token_id"))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return vision_language.to_hf(
            self,
            "MuseGlimmerForConditionalGeneration",
            image_token_id=self.image_token,
            out_hidden_size=self.cell_width,
            projector_hidden_size=self.inner,
            projector_hidden_act="gelu",
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weights [out, in]."""
    narrow, wide, std = config.cell_width, config.text.hidden_size, config.text.initializer_range
    projector = {
        "up": weight((config.inner, narrow), ("projection", "embed"), std),
        "middle": weight((config.inner, config.inner), ("embed", "projection"), std),
        "out": weight((wide, config.inner), ("projection", "embed"), std),
    }
    return two_towers.towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.nested_names(config, text="model.language_model.", vision="model.vision_tower.")
    own = {"up": "vision_adapter.fc1", "middle": "vision_adapter.fc2", "out": "vision_projection"}
    return names | {f"projector.{path}": f"model.{name}.weight" for path, name in own.items()}


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`. A cell is read element by
    element, not patch by patch.
    """
    weights, x = params["projector"], gather_cells(x, places).mT.flatten(1)[None]
    x = F.gelu(linear(F.gelu(linear(x, weights["up"])), weights["middle"]))
    return rms_norm(linear(x, weights["out"]), None, eps=config.text.rms_norm_eps)

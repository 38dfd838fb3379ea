"""CLIP (arXiv 2103.00020): both towers, their projections to one space, and the scale of similarities."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Constant, Leaf
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.tree import Tree

from . import clip_text, clip_vision

MODEL_TYPES = ("clip",)
TRAITS = Traits(causal=False, leftovers=(r"(text|vision)_model\.embeddings\.position_ids",))
PRESETS = {"clip-vit-base-patch32": {"model_type": "clip"}}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The towers. Each has a projection to the same width."""

    text: clip_text.Config
    vision: clip_vision.Config
    logit_scale: float = 2.6592  # initial
    # kept for saving only
    model_type: str = field(default="clip", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        shared: dict[str, Any] = {"projection_dim": outer.integer("projection_dim", 512)}
        both = ((clip_text, "text", "Text"), (clip_vision, "vision", "Vision"))
        configs = {}
        for family, name, cls in both:
            own = {"architectures": [f"CLIP{cls}ModelWithProjection"], **shared}
            inner = two_towers.tower_fields(outer, f"{name}_config", f"clip_{name}_model", **own)
            configs[name] = family.Config.from_hf(inner)
        scale = outer.number("logit_scale_init_value", 2.6592, above=-100.0)
        return two_towers.finished(Config(**configs, logit_scale=scale), outer)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = {"projection_dim": self.text.projection, "logit_scale_init_value": self.logit_scale}
        return two_towers.towers_to_hf(self, "CLIPModel", **own)


def spec(config: Config) -> Tree:
    """The parameters: {"text", "vision"} of the towers and the logarithm of the scale."""
    scale = Leaf((), torch.float32, (), Constant(config.logit_scale), decay=False)
    return two_towers.towers_spec(config) | {"logit_scale": scale}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return two_towers.towers_names(config) | {"logit_scale": "logit_scale"}


def similarity(params: Tree, text: Tensor, image: Tensor, /) -> Tensor:
    """Logits [texts, images] from both towers' `features`: cosines times the exponential of the scale."""
    return two_towers.cosines(text, image) * params["logit_scale"].exp()

"""SigLIP (arXiv 2303.15343) and SigLIP 2 (arXiv 2502.14786): both towers, the scale and the bias of similarities."""

from dataclasses import dataclass, field

from torch import Tensor

from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import norm
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.tree import Tree

from . import siglip_text, siglip_vision

MODEL_TYPES = ("siglip", "siglip2")
TRAITS = Traits(causal=False, leftovers=(r"(text|vision)_model\.embeddings\.position_ids",))
_WORDS = {"text_config": {"vocab_size": 256000}}
PRESETS: dict[str, ConfigJson] = {
    "siglip-base-patch16-224": {"model_type": "siglip"},
    "siglip2-base-patch16-224": {"model_type": "siglip", **_WORDS},
    "siglip2-base-patch16-naflex": {"model_type": "siglip2", **_WORDS},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The towers."""

    text: siglip_text.Config
    vision: siglip_vision.Config
    # kept for saving only
    model_type: str = field(default="siglip", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        kind = outer.choice("model_type", MODEL_TYPES)
        configs = {
            name: family.Config.from_hf(two_towers.tower_fields(outer, f"{name}_config", f"{kind}_{name}_model"))
            for name, family in (("text", siglip_text), ("vision", siglip_vision))
        }
        return two_towers.finished(Config(**configs, model_type=kind), outer)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return two_towers.towers_to_hf(self, "Siglip2Model" if self.model_type == "siglip2" else "SiglipModel")


def spec(config: Config) -> Tree:
    """The parameters: {"text", "vision"} of the towers, the logarithm of the scale, and the bias, both [1]."""
    own = {"logit_scale": norm(1, "one", 2.302585), "logit_bias": norm(1, "one", -10.0)}
    return two_towers.towers_spec(config) | own


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    return two_towers.towers_names(config) | {name: name for name in ("logit_scale", "logit_bias")}


def similarity(params: Tree, text: Tensor, image: Tensor, /) -> Tensor:
    """Logits [texts, images] of both towers' `features`: cosines times the exponential of the scale, plus the bias."""
    return two_towers.cosines(text, image) * params["logit_scale"].exp() + params["logit_bias"]

"""SigLIP's text tower (arXiv 2303.15343), also SigLIP 2's: bidirectional, with learned positions.

`forward` returns the hidden states [B, S, D] after the last norm, `features` one row per text: the projected hidden
state of its last token. The models were trained on texts padded to `max_position_embeddings` tokens that all see each
other: pad so, and give padding the segment id of its text.
"""

from dataclasses import dataclass

from torch import Tensor

from fnmodels.inputs.documents import Documents, pool
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Everything
from fnmodels.models.common import text_tower
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.text_tower import embed  # noqa: F401
from fnmodels.models.common.vision import (  # noqa: F401
    block,
    freqs_cis,
    kinds,
    unembed,
    weight_and_bias,
)
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("siglip_text_model", "siglip2_text_model")
TRAITS = Traits(causal=False, leftovers=(r"(text_model\.)?embeddings\.position_ids",), in_memory={r"^text_model\.": ""})


@dataclass(frozen=True, kw_only=True)
class Config(text_tower.TextConfig):
    """Sizes and switches."""

    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        sizes = (32000, 768, 3072, 12, 12, 64)
        usual = text_tower.text_fields(fields, MODEL_TYPES, sizes, "gelu_pytorch_tanh", 1e-6)
        config = Config(**usual, projection=fields.integer("projection_size", usual["hidden_size"]))
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        name = "Siglip2TextModel" if self.model_type == "siglip2_text_model" else "SiglipTextModel"
        return text_tower.text_to_hf(self, name, projection_size=self.projection)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std = config.hidden_size, config.initializer_range
    weights = weight((config.projection, D), ("projection", "embed"), std)
    return text_tower.text_spec(config) | {
        "projection": weights,
        "projection_bias": bias(config.projection, "projection"),
    }


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return text_tower.text_names(config) | weight_and_bias("projection", "text_model.head")


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{"full": mask}: every token sees all tokens of its text; positions and segment_ids [B, S]."""
    return {"full": build_mask(Everything(), positions, segment_ids, create=create)}


def features(params: Tree, hidden: Tensor, tokens: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """One row per text, [N, projection], from its last token. hidden: what `forward` returns. tokens are not read."""
    return linear(pool(hidden, documents, how="last"), params["projection"], params["projection_bias"])

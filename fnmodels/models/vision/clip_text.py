"""CLIP's text tower (arXiv 2103.00020): causal, with learned positions; a text is the hidden state of its end token.

`forward` returns the hidden states [B, S, D] after the last norm, `features` one row per text.
"""

from dataclasses import dataclass

from torch import Tensor

from fnmodels.inputs.documents import Documents
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common import text_tower
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import weight
from fnmodels.models.common.text_tower import embed  # noqa: F401
from fnmodels.models.common.vision import block, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("clip_text_model",)
TRAITS = Traits(leftovers=(r"(text_model\.)?embeddings\.position_ids",))
_IGNORED = ("dropout", "initializer_factor", "projection_dim")


@dataclass(frozen=True, kw_only=True)
class Config(text_tower.TextConfig):
    """Sizes and switches."""

    hidden_act: str = "quick_gelu"

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = text_tower.text_fields(fields, MODEL_TYPES, (49408, 512, 2048, 12, 8, 77), "quick_gelu", 1e-5)
        projected = fields.take("architectures", None) == ["CLIPTextModelWithProjection"]
        config = Config(**usual, projection=fields.integer("projection_dim", 512) if projected else 0)
        object.__setattr__(config, "extra", fields.finish(_IGNORED))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        if not self.projection:
            return text_tower.text_to_hf(self, "CLIPTextModel")
        return text_tower.text_to_hf(self, "CLIPTextModelWithProjection", projection_dim=self.projection)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    projection = weight((config.projection, config.hidden_size), ("projection", "embed"), config.initializer_range)
    return text_tower.text_spec(config) | ({"projection": projection} if config.projection else {})


def in_memory(config: Config) -> dict[str, str]:
    """A model without a projection has no prefix in memory."""
    return {} if config.projection else {r"^text_model\.": ""}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return text_tower.text_names(config) | ({"projection": "text_projection.weight"} if config.projection else {})


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{"full": mask}; positions and segment_ids [B, S]."""
    return causal_masks({"full": None}, positions, segment_ids, create=create)


def features(params: Tree, hidden: Tensor, tokens: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """One row per text, [N, D], or [N, projection]: the hidden state of its first end token, or of its first token.

    hidden: what `forward` returns. tokens: int64 [B, S]. An eos_token_id of 2, which old files have, stands for the
    highest id of the text.
    """
    values = tokens if config.eos_token_id == 2 else (tokens == config.eos_token_id).long()
    found = hidden[documents.row, text_tower.first_highest(values, documents)]
    return linear(found, params["projection"]) if "projection" in params else found

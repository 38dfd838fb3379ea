"""CLIP's vision tower (arXiv 2103.00020): ViT with a norm before the layers.

`forward` returns the hidden states [B, S, D] of the last layer without a norm, as vision-language models read them;
`features` the normalized class token of each image.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.inputs.documents import Documents
from fnmodels.models.common import text_tower, vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import embedding, layer_norm_leaves, weight
from fnmodels.models.common.vision import attention_masks, block, freqs_cis, kinds  # noqa: F401
from fnmodels.models.vision.common import position_table
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("clip_vision_model",)
TRAITS = Traits(inputs="patches", causal=False, leftovers=(r"(vision_model\.)?embeddings\.position_ids",))
_IGNORED = ("dropout", "initializer_factor", "projection_dim")

batch_inputs = functools.partial(position_table.table_inputs, resample=position_table.bicubic)


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. projection: width of the features' projection, 0: none."""

    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection: int = 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=1e-5, activation="quick_gelu", patch=32)
        projected = fields.take("architectures", None) == ["CLIPVisionModelWithProjection"]
        config = Config(**usual, projection=fields.integer("projection_dim", 512) if projected else 0)
        object.__setattr__(config, "extra", fields.finish(_IGNORED))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        if not self.projection:
            return vision.vision_to_hf(self, "CLIPVision")
        names = {"architectures": ["CLIPVisionModelWithProjection"], "projection_dim": self.projection}
        return vision.vision_to_hf(self, "CLIPVision", **names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"class_token": vision.vector(D, std), **vision.patch_leaves(config, biases=False)}
    tree["embed_positions"] = embedding(1 + config.side**2, D, std, axis="position")
    tree |= layer_norm_leaves("first_norm", D, "embed")
    tree["layers"] = [vision.vision_layer(config) for _ in range(config.num_hidden_layers)]
    projection = {"projection": weight((config.projection, D), ("projection", "embed"), std)}
    return tree | vision.last_norm(config) | (projection if config.projection else {})


def in_memory(config: Config) -> dict[str, str]:
    """A model without a projection has no prefix in memory."""
    return {} if config.projection else {r"^vision_model\.": ""}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    at = "vision_model.embeddings"
    names = {"class_token": f"{at}.class_embedding", "patch_proj": f"{at}.patch_embedding.weight"}
    names |= {"embed_positions": f"{at}.position_embedding.weight"}
    names |= vision.weight_and_bias("first_norm", "vision_model.pre_layrnorm")
    names |= vision.layer_names(config, "vision_model.encoder.layers.", text_tower.CLIP_LAYER)
    names |= vision.weight_and_bias("norm", "vision_model.post_layernorm")
    return names | ({"projection": "visual_projection.weight"} if config.projection else {})


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, class tokens and their positions, normalized."""
    placed = position_table.table_positions(params["embed_positions"], inputs)
    x = vision.embed_patches(params, inputs, config=config) + placed
    return layer_norm(x, params["first_norm"], params["first_norm_bias"], eps=config.layer_norm_eps)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states, unchanged."""
    return x


def features(params: Tree, hidden: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """One row per image, [N, D] or [N, projection]: its class token after the last norm. hidden: `forward`'s result."""
    normed = vision.unembed(params, vision.class_tokens(hidden, documents), config=config)
    return linear(normed, params["projection"]) if "projection" in params else normed

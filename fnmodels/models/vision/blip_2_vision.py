"""The vision towers of BLIP (arXiv 2201.12086), a ViT, and of BLIP-2 (arXiv 2301.12597), EVA's ViT.

Their normed tokens are what a text, or a Q-Former, reads.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.storage import StoredNames, fuse
from fnmodels.models.common.vision import attention_masks, block, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.vision.common import position_table
from fnmodels.tree import Tree

TRAITS = Traits(heads=("none",), inputs="patches", causal=False)
_LAYER = {"input_layernorm": "layer_norm1", "attention.o_proj": "self_attn.projection"}
_LAYER |= {"post_attention_layernorm": "layer_norm2", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
# {model type: (its class, what its files may leave out)}
_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "blip_2_vision_model": ("Blip2Vision", {"eps": 1e-6, "sizes": (1408, 6144, 39, 16), "patch": 14}),
    "blip_vision_model": ("BlipVision", {"eps": 1e-5, "image": 384}),
}
batch_inputs = functools.partial(position_table.table_inputs, resample=position_table.bicubic)


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches."""

    qkv_bias: bool = True

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a `vision_config`; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields({"initializer_range": 1e-10, **values}, "config.json, vision_config")
        _, defaults = _TYPES[fields.choice("model_type", tuple(_TYPES))]
        usual = vision.vision_fields(fields, tuple(_TYPES), **defaults)
        if usual["model_type"] == "blip_vision_model":
            fields.expect("qkv_bias", True)
        config = Config(**usual, qkv_bias=fields.boolean("qkv_bias", True))
        object.__setattr__(config, "extra", fields.finish(("dropout", "initializer_factor", "projection_dim")))
        return config

    def to_hf(self) -> ConfigJson:
        """A `vision_config`."""
        own = {"num_channels": None, "qkv_bias": None if self.model_type == "blip_vision_model" else self.qkv_bias}
        return vision.vision_to_hf(self, _TYPES[self.model_type][0], **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"class_token": vision.vector(D, std, 1, 1), **vision.patch_leaves(config)}
    tree["embed_positions"] = vision.vector(D, std, 1, 1 + config.side**2, axis="position")
    layer = vision.vision_layer(config, qkv_bias=config.qkv_bias)
    return tree | {"layers": [layer] * config.num_hidden_layers} | vision.last_norm(config)


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}, without the prefix of the model that it is part of."""
    names: StoredNames = {"class_token": "embeddings.class_embedding"}
    names |= {"embed_positions": "embeddings.position_embedding"}
    names |= vision.weight_and_bias("patch_proj", "embeddings.patch_embedding")
    names |= vision.layer_names(config, "encoder.layers.", _LAYER) | vision.weight_and_bias("norm", "post_layernorm")
    for i in range(config.num_hidden_layers):
        for ours, theirs in (("proj", "weight"), ("bias", "bias")) if config.qkv_bias else (("proj", "weight"),):
            rows = {f"layers.{i}.attention.{name}_{ours}": config.hidden_size for name in "qkv"}
            names |= fuse(f"encoder.layers.{i}.self_attn.qkv.{theirs}", rows)
    return names


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, class tokens and their positions."""
    placed = position_table.table_positions(params["embed_positions"].flatten(0, 1), inputs)
    return vision.embed_patches(params, inputs, config=config) + placed

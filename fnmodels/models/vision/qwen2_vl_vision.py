"""The vision tower of Qwen2-VL (arXiv 2409.12191): LayerNorms, an MLP without a gate, rotary positions on two axes.

`forward` returns the hidden states [B, S, D] of the last layer, which have no norm. Images may have any size whose rows
and columns of patches are multiples of `merge`; see `common.qwen_tower` for the frames of a patch.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import attention_masks, block, kinds  # noqa: F401
from fnmodels.models.vision.common import qwen_tower
from fnmodels.models.vision.common.qwen_tower import freqs_cis, unembed  # noqa: F401
from fnmodels.tree import Tree

MODEL_TYPES = ("qwen2_vl_vision",)
TRAITS = Traits(inputs="patches", causal=False)
_LAYER = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
_LAYER |= {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}


@dataclass(frozen=True, kw_only=True)
class Config(qwen_tower.QwenTowerConfig):
    """Sizes and switches. out_hidden_size: the text's width. Files call it hidden_size, and hidden_size embed_dim."""

    hidden_act: str = "quick_gelu"
    out_hidden_size: int = 3584

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        wide, narrow = outer.integer("hidden_size", 3584), outer.integer("embed_dim", 1280)
        ratio = outer.integer("mlp_ratio", 4)
        inner = {name: value for name, value in values.items() if name not in ("embed_dim", "mlp_ratio")}
        inner |= {"hidden_size": narrow, "intermediate_size": narrow * ratio}
        sizes = (1280, 5120, 32, 16)
        fields, usual = qwen_tower.tower_fields(
            Fields(inner), MODEL_TYPES, sizes=sizes, patch=14, activation="quick_gelu"
        )
        config = Config(**usual, out_hidden_size=wide)
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        if self.intermediate_size % self.hidden_size:
            raise ConfigError(
                f"intermediate_size {self.intermediate_size} is no multiple of hidden_size {self.hidden_size}, which "
                "a qwen2_vl_vision has."
            )
        own = {"hidden_size": self.out_hidden_size, "embed_dim": self.hidden_size, "intermediate_size": None}
        own["mlp_ratio"] = self.intermediate_size // self.hidden_size
        return qwen_tower.tower_to_hf(self, "Qwen2VLVision", **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, T, p, p]."""
    layer = vision.vision_layer(config)
    return {"patch_proj": qwen_tower.patch_leaf(config), "layers": [layer for _ in range(config.num_hidden_layers)]}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    return {"patch_proj": "patch_embed.proj.weight"} | qwen_tower.layer_names(config, _LAYER)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches."""
    return vision.embed_patches(params, inputs, config=config)

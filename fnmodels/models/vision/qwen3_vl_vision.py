"""The vision tower of Qwen3-VL (arXiv 2511.21631) and Qwen3.5: LayerNorms, positions learned and rotary.

`forward` returns the hidden states [B, S, D] of the last layer, which have no norm. Images may have any size whose rows
and columns of patches are multiples of `merge`; see `common.qwen_tower` for the frames of a patch.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, embedding
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import attention_masks, block, kinds  # noqa: F401
from fnmodels.models.vision.common import position_table, qwen_tower
from fnmodels.models.vision.common.qwen_tower import freqs_cis, unembed  # noqa: F401
from fnmodels.tree import Tree

# Model types, and what the names of their classes begin with.
_CLASSES = {"qwen3_vl_vision": "Qwen3VLVision", "qwen3_5_vision": "Qwen3_5Vision"}
_CLASSES |= {"qwen3_vl_moe_vision": "Qwen3VLMoeVision", "qwen3_5_moe_vision": "Qwen3_5MoeVision"}
MODEL_TYPES = tuple(_CLASSES)
TRAITS = Traits(inputs="patches", causal=False)

_LAYER = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
_LAYER |= {"mlp.up_proj": "mlp.linear_fc1", "mlp.down_proj": "mlp.linear_fc2"}


@dataclass(frozen=True, kw_only=True)
class Config(qwen_tower.QwenTowerConfig):
    """Sizes and switches. out_hidden_size: the text's width. deepstack: the layers whose outputs the text reads too."""

    out_hidden_size: int = 3584
    deepstack: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not 0 <= i < self.num_hidden_layers for i in self.deepstack) or len(set(self.deepstack)) < len(
            self.deepstack
        ):
            raise ConfigError(
                f"deepstack_visual_indexes {list(self.deepstack)} must be different layers of the tower's "
                f"{self.num_hidden_layers}."
            )

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, usual = qwen_tower.tower_fields(
            Fields(values),
            MODEL_TYPES,
            sizes=(1152, 4304, 27, 16),
            patch=16,
            activation="gelu_pytorch_tanh",
        )
        count = fields.integer("num_position_embeddings", 2304)
        if math.isqrt(count) ** 2 != count:
            raise ConfigError(f"{fields.where}: 'num_position_embeddings' is {count}, but must be a square.")
        usual["image_size"] = math.isqrt(count) * usual["patch_size"]
        deep = [8, 16, 24] if usual["model_type"].startswith("qwen3_vl") else []
        layers = qwen_tower.layer_list(fields, "deepstack_visual_indexes", deep)
        width = fields.integer("out_hidden_size", 3584)
        config = Config(**usual, out_hidden_size=width, deepstack=tuple(layers))
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {"out_hidden_size": self.out_hidden_size, "num_position_embeddings": self.side**2}
        own["deepstack_visual_indexes"] = list(self.deepstack)
        return qwen_tower.tower_to_hf(self, _CLASSES.get(self.model_type, "Qwen3VLVision"), **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, T, p, p]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"patch_proj": qwen_tower.patch_leaf(config), "patch_bias": bias(D, "embed")}
    tree["embed_positions"] = embedding(config.side**2, D, std, axis="position")
    return tree | {"layers": [vision.vision_layer(config) for _ in range(config.num_hidden_layers)]}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = {"embed_positions": "pos_embed.weight", **vision.weight_and_bias("patch_proj", "patch_embed.proj")}
    return names | qwen_tower.layer_names(config, _LAYER)


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each patch reads; see `position_table.table_inputs`."""
    return position_table.table_inputs(config, positions, resample=position_table.bilinear_corners, placed=0)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches and their positions."""
    placed = position_table.table_positions(params["embed_positions"], inputs)
    return vision.embed_patches(params, inputs, config=config) + placed

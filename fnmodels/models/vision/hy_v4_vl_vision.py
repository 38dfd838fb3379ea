"""The vision tower of Hy4 (Tencent, 2026): LayerNorms, an MLP without a gate, learned positions, no norm at the end.

`forward` returns the hidden states [B, S, D] of the last layer. Images may have any size whose rows and columns of
patches are multiples of `merge`. The first entry of the position table is no patch's, and nothing reads it.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import text_tower, vision
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import embedding
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import attention_masks, block, freqs_cis, kinds  # noqa: F401
from fnmodels.models.vision.common import position_table
from fnmodels.models.vision.common.qwen_tower import unembed  # noqa: F401
from fnmodels.tree import Tree

MODEL_TYPES = ("hy_v4_vl_vision",)
# Of the trait `in_memory`, of the whole model too, where names begin with "vit.".
IN_MEMORY = {
    r"^((?:vit\.)?layers\.\d+)\.input_layernorm\.": r"\1.layer_norm1.",
    r"^((?:vit\.)?layers\.\d+)\.post_attention_layernorm\.": r"\1.layer_norm2.",
    r"\.mlp\.dense_h_to_4h\.": ".mlp.fc1.",
    r"\.mlp\.dense_4h_to_h\.": ".mlp.fc2.",
}
TRAITS = Traits(inputs="patches", causal=False, in_memory=IN_MEMORY)
_LAYER = text_tower.CLIP_LAYER | {"attention.o_proj": "self_attn.o_proj"}
_LAYER |= {name: name for name in ("input_layernorm", "post_attention_layernorm")}
_LAYER |= {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
_NAMES = {"rms_norm_eps": "layer_norm_eps", "max_image_size": "image_size"}  # {in files: here}
# Of the processor, and of the projector of the earlier HunyuanOCR.
_UNREAD = ("img_max_token_num", "min_image_size", "max_vit_seq_len", "text_hidden_size")


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. merge: the side of the cells of patches that become one feature. out_hidden_size: the text's.

    layer_norm_eps is also that of the RMSNorm before cells are joined.
    """

    layer_norm_eps: float = 1e-5
    merge: int = 2
    out_hidden_size: int = 6144

    @property
    def special_tokens(self) -> int:
        """0: every token of an image is a patch."""
        return 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, sizes = renamed(Fields(values), _NAMES), (1536, 6144, 40, 16)
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=1e-5, sizes=sizes, image=2048)
        expected = {"interpolate_mode": "bilinear", "temporal_patch_size": 1}
        for name, value in (expected | {"num_key_value_heads": usual["num_attention_heads"]}).items():
            fields.expect(name, value)
        width, merge = fields.integer("out_hidden_size", 6144), fields.integer("spatial_merge_size", 2)
        config = Config(**usual, out_hidden_size=width, merge=merge)
        object.__setattr__(config, "extra", fields.finish(_UNREAD))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = {theirs: getattr(self, name) for theirs, name in _NAMES.items()} | dict.fromkeys(_NAMES.values())
        own |= {"out_hidden_size": self.out_hidden_size, "spatial_merge_size": self.merge}
        return vision.vision_to_hf(self, "HYV4VLVision", **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    table = embedding(1 + config.side**2, config.hidden_size, config.initializer_range, axis="position")
    layers = [vision.vision_layer(config) for _ in range(config.num_hidden_layers)]
    return {**vision.patch_leaves(config), "embed_positions": table, "layers": layers}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names: StoredNames = {"embed_positions": "embeddings.position_embedding.weight"}
    names |= vision.weight_and_bias("patch_proj", "embeddings.patch_embedding")
    return names | vision.layer_names(config, "layers.", _LAYER)


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each patch reads; see `position_table.table_inputs`."""
    resample = functools.partial(position_table.bilinear, excess=0.1)  # as the published model scales the table
    return position_table.table_inputs(config, positions, resample=resample)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches and their positions."""
    placed = position_table.table_positions(params["embed_positions"], inputs)
    return vision.embed_patches(params, inputs, config=config) + placed

"""MoonViT, the vision tower of Kimi-VL (arXiv 2504.07491) and Kimi K2.5: positions learned and rotary, LayerNorms.

`forward` returns the hidden states [B, S, D] after the last norm. Images may have any size whose rows and columns of
patches are multiples of `merge`. Videos, whose frames would have further positions, are not read.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.family import Traits
from fnmodels.models.common.storage import StoredNames, fuse, separate_heads
from fnmodels.models.common.vision import attention_masks, block, kinds, unembed  # noqa: F401
from fnmodels.models.vision.common import position_table
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.rotary import Rope, frequencies
from fnmodels.tree import Tree

MODEL_TYPES = ("kimi_k25_vision",)
# Of the trait `in_memory`, of models with this tower too.
IN_MEMORY = {
    r"encoder\.blocks\.": "layers.",
    r"encoder\.final_layernorm\.": "final_layernorm.",
    r"\.wo\.": ".attn.proj.",
    r"\.norm1\.": ".norm2.",
    r"\.norm0\.": ".norm1.",
    r"\.mlp\.fc1\.": ".mlp.fc2.",
    r"\.mlp\.fc0\.": ".mlp.fc1.",
    r"\.pos_emb\.weight": ".pos_emb.position_embeddings",
}
TRAITS = Traits(inputs="patches", causal=False, in_memory=IN_MEMORY)
_LAYER = {"input_layernorm": "norm0", "post_attention_layernorm": "norm1", "attention.o_proj": "wo"}
_LAYER |= {"mlp.up_proj": "mlp.fc0", "mlp.down_proj": "mlp.fc1"}
# Of published files: their names, and what they say that is so of every MoonViT.
_PUBLISHED = {f"vt_{name}": name for name in ("hidden_size", "intermediate_size")}
_PUBLISHED |= {f"vt_num_{name}": f"num_{name}" for name in ("hidden_layers", "attention_heads")}
_PUBLISHED |= {f"init_pos_emb_{name}": f"pos_emb_{name}" for name in ("height", "width", "time")}
_FIXED = {"merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "pos_emb_type": "divided_fixed"}
_FIXED |= {"projector_hidden_act": "gelu", "video_attn_type": "spatial_temporal"}


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. merge: the side of the cells of patches that become one feature. frames: of videos' table."""

    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-5
    merge: int = 2
    rope_theta: float = 10000.0
    time: int = 4

    @property
    def special_tokens(self) -> int:
        """0: every token of an image is a patch."""
        return 0

    @property
    def interleaved(self) -> bool:
        """Neighbors in a head rotate together."""
        return True

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = renamed(Fields(values), {name: new for name, new in _PUBLISHED.items() if name in values})
        for name, value in _FIXED.items():
            fields.expect(name, value)
        sizes = (1152, 4304, 27, 16)
        usual = vision.vision_fields(
            fields, MODEL_TYPES, eps=1e-5, activation="gelu_pytorch_tanh", sizes=sizes, patch=14, image=14
        )
        side = fields.integer("pos_emb_height", 64)
        fields.expect("pos_emb_width", side)
        merge = fields.take("merge_kernel_size", [2, 2])
        fields.expect("merge_kernel_size", [merge[0]] * 2 if isinstance(merge, list) and merge else [2, 2])
        rope = Fields(fields.take("rope_parameters", {}), "rope_parameters")
        rope.expect("rope_type", "axial", "default")
        config = Config(
            **usual | {"image_size": side * usual["patch_size"]},
            merge=int(merge[0]),
            rope_theta=rope.number("rope_theta", 10000.0),
            time=fields.integer("pos_emb_time", 4),
        )
        # what files repeat of the text and of the projector
        object.__setattr__(config, "extra", fields.finish(("text_hidden_size", "mm_hidden_size", "projector_ln_eps")))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {"pos_emb_height": self.side, "pos_emb_width": self.side, "pos_emb_time": self.time}
        own |= {"merge_kernel_size": [self.merge] * 2, "image_size": None, "num_channels": None, "layer_norm_eps": None}
        own["rope_parameters"] = {"rope_type": "axial", "rope_theta": self.rope_theta}
        return expressible(self, vision.vision_to_hf(self, "Kimi_K25Vision", **own))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    D, std, side = config.hidden_size, config.initializer_range, config.side
    tree: Tree = {**vision.patch_leaves(config), "embed_positions": vision.vector(D, std, side, side, axis="position")}
    return tree | {"layers": [vision.vision_layer(config)] * config.num_hidden_layers} | vision.last_norm(config)


def in_memory_forms(config: Config, at: str = "") -> StoredNames:
    """{path: its place in transformers' module} of q, k and v. at: what names begin with there."""
    return separate_heads(config, f"{at}layers.", ".attn.")


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    at = "encoder.blocks."
    names: StoredNames = {"embed_positions": "patch_embed.pos_emb.weight"}
    names |= vision.weight_and_bias("patch_proj", "patch_embed.proj")
    names |= vision.layer_names(config, at, _LAYER) | vision.weight_and_bias("norm", "encoder.final_layernorm")
    for i in range(config.num_hidden_layers):
        for ours, theirs in (("proj", "weight"), ("bias", "bias")):
            rows = {f"layers.{i}.attention.{name}_{ours}": config.hidden_size for name in "qkv"}
            names |= fuse(f"{at}{i}.wqkv.{theirs}", rows)
    return names


@in_fp64
def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 [B, S, H/2, 2]}: angles that turn with the column and with the row take turns."""
    freqs = frequencies(Rope(theta=config.rope_theta), config.head_dim // 2, device=positions.device)
    by_axis = [positions[..., axis, None].double() * freqs for axis in (1, 0)]
    angles = torch.stack(by_axis, -1).flatten(-2)
    return {"full": torch.stack((angles.cos(), angles.sin()), -1).float()}


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each patch reads; see `position_table.table_inputs`."""
    return position_table.table_inputs(config, positions, resample=position_table.bicubic, placed=0)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches and their positions."""
    placed = position_table.table_positions(params["embed_positions"].flatten(0, 1), inputs)
    return vision.embed_patches(params, inputs, config=config) + placed

"""Muse Glimmer's vision tower (Meta, 2026): learned and rotary positions, three layers in windows to one of the image.

`forward` returns the hidden states [B, S, D] after the last norm. Images may have any size whose rows and columns of
patches are multiples of `merge`; a patch has `frames` frames, see `common.qwen_tower`. The table of learned positions
is resampled with zeros outside of it, to a grid with as many rows as the image has columns: the published model's way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import embedding, layer_norm_leaves, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import block, unembed  # noqa: F401
from fnmodels.models.vision.common import position_table, qwen_tower
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.norm import layer_norm
from fnmodels.ops.rotary import Rope, frequencies
from fnmodels.tree import Tree

MODEL_TYPES = ("muse_glimmer_vision",)
TRAITS = Traits(kinds=("window", "full"), inputs="patches", causal=False)
_LAYER = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "attention.o_proj": "attn.proj"}
_LAYER |= {f"attention.{name}_proj": f"attn.{name}_proj" for name in "qkv"}
_LAYER |= {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
_TYPES = {"window_attention": "window", "full_attention": "full"}


@dataclass(frozen=True, kw_only=True)
class Config(qwen_tower.QwenTowerConfig):
    """Sizes and switches. side, which is also that of a window, in patches: of the table of positions."""

    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    layer_kinds: tuple[str, ...] = ()

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=1e-5, sizes=(1536, 8960, 50, 16), patch=14, image=14)
        if usual["layer_norm_eps"] != 1e-5:  # transformers has it before and after the layers alone
            raise ConfigError(
                f"{fields.where}: 'layer_norm_eps' is {usual['layer_norm_eps']}; only 1e-05 is supported."
            )
        side, layers = fields.integer("pos_emb_height", 32), usual["num_hidden_layers"]
        fields.expect("pos_emb_width", side)
        rope = Fields(fields.take("rope_parameters", None) or {}, f"{fields.where}, rope_parameters")
        rope.expect("rope_type", "axial", "default")
        frames = fields.integer("patch_temporal", 2)
        types = fields.take("layer_types", None)
        if types is None:
            types = ["full_attention" if i % 4 == 3 or i == layers - 1 else "window_attention" for i in range(layers)]
        if not isinstance(types, list) or len(types) != layers or any(kind not in list(_TYPES) for kind in types):
            raise ConfigError(f"{fields.where}: 'layer_types' is {shown(types)}, but must name {layers} layers.")
        config = Config(
            **usual | {"image_size": side * usual["patch_size"], "num_channels": usual["num_channels"] * frames},
            frames=frames,
            merge=fields.integer("merge_size", 2),
            rope_theta=rope.number("rope_theta", 10000.0),
            layer_kinds=tuple(_TYPES[kind] for kind in types),
        )
        object.__setattr__(config, "extra", fields.finish(("max_position_embeddings",)))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {"pos_emb_height": self.side, "pos_emb_width": self.side, "patch_temporal": self.frames}
        own |= {"merge_size": self.merge, "max_position_embeddings": self.side**2}
        own |= {
            "image_size": None,
            "num_channels": None,
            "layer_types": [f"{kind}_attention" for kind in self.layer_kinds],
        }
        own["rope_parameters"] = {"rope_type": "axial", "rope_theta": self.rope_theta}
        return expressible(self, vision.vision_to_hf(self, "MuseGlimmerVision", **own))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, T C p p]."""
    D, std, pixels = config.hidden_size, config.initializer_range, config.num_channels * config.patch_size**2
    tree: Tree = {"patch_proj": weight((D, pixels), ("embed", "pixel"), std)} | layer_norm_leaves(
        "first_norm", D, "embed"
    )
    tree["embed_positions"] = embedding(config.side**2, D, std, axis="position")
    return tree | {"layers": [vision.vision_layer(config)] * config.num_hidden_layers} | vision.last_norm(config)


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names: dict[str, Any] = {"embed_positions": "patch_embedder.position_embedding_table.weight"}
    names |= {"patch_proj": "patch_embedder.patch_embedding.weight"}
    names |= vision.weight_and_bias("first_norm", "ln_pre") | vision.weight_and_bias("norm", "ln_post")
    return names | vision.layer_names(config, "layers.", _LAYER)


kinds = qwen_tower.vision_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: every token sees all tokens of its image, or of its window. positions [B, S, 4]."""
    return qwen_tower.window_masks(config, positions, segment_ids, config.side, create=create)


@in_fp64
def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 [B, S, H/2, 2]}: the first half of the angles turns with the column, the second with the row."""
    freqs = frequencies(Rope(theta=config.rope_theta), config.head_dim // 2, device=positions.device)
    angles = torch.cat([positions[..., axis, None].double() * freqs for axis in (1, 0)], -1)
    return dict.fromkeys(sorted(set(config.layer_kinds)), torch.stack((angles.cos(), angles.sin()), -1).float())


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each patch reads; see `position_table.table_inputs`.

    The n-th patch has those of the n-th place of a grid with as many rows as the image has columns.
    """
    row, column, rows, columns = positions.unbind(-1)
    place, narrow = row * columns + column, rows.clamp(min=1)
    turned = torch.stack((place // narrow, place % narrow, columns, rows), -1)
    return position_table.table_inputs(config, turned, resample=position_table.bilinear_zeros, placed=0)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, whose pixels [C T p p] are read frame by frame, and their positions, normed."""
    frames, channels = config.frames, config.num_channels // config.frames
    pixels = inputs["tokens"].unflatten(-1, (channels, frames, -1)).transpose(-3, -2).flatten(-3)
    x = vision.embed_patches(params, {**inputs, "tokens": pixels}, config=config)
    x = x + position_table.table_positions(params["embed_positions"], inputs)
    return layer_norm(x, params["first_norm"], params["first_norm_bias"], eps=config.layer_norm_eps)

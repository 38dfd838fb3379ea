"""Common parts of Qwen's vision towers (arXiv 2502.13923): a patch is `frames` frames, rotary tables have two axes.

An image [C, H, W] is its own frames: patch_rows([image.repeat_interleave(config.frames, 0)], config). So are frames
[T, C, H, W] of a video: frames.transpose(0, 1).flatten(0, 1), T = config.frames.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Everything, SameSpan
from fnmodels.inputs.segments import text_order
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.spec import Leaf, Normal
from fnmodels.models.common.storage import StoredNames, fuse
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.rotary import Rope, frequencies
from fnmodels.tree import Tree

# ours: theirs
_NAMES = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}


@dataclass(frozen=True, kw_only=True)
class QwenTowerConfig(vision.VisionConfig):
    """num_channels: those of all frames of a patch. merge: the side of the cells of patches that become one feature."""

    frames: int = 2
    merge: int = 2
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 4:
            raise ConfigError(f"The heads are {self.head_dim} wide, but must be a multiple of 4, for rows and columns.")

    @property
    def special_tokens(self) -> int:
        """0: every token of an image is a patch."""
        return 0


def tower_fields(
    fields: Fields, model_types: Sequence[str], *, sizes: tuple[int, int, int, int], patch: int, activation: str
) -> tuple[Fields, dict[str, Any]]:
    """(fields under the usual names, the Config fields); sizes: as for `vision.vision_fields`."""
    fields.expect("is_encoder_decoder", False)
    values = dict(fields.values)
    for ours, theirs in _NAMES.items():
        if theirs in values:
            values[ours] = values.pop(theirs)
    if "in_chans" in values:  # in older files
        values["in_channels"] = values.pop("in_chans")
    fields = Fields(values, fields.where)
    usual = vision.vision_fields(fields, model_types, eps=1e-6, sizes=sizes, patch=patch, activation=activation)
    fields.expect("spatial_patch_size", usual["patch_size"])
    rope = Fields(fields.take("rope_parameters", {}), "rope_parameters")
    rope.expect("rope_type", "axial", "default")
    theta, frames = rope.number("rope_theta", 10000.0), fields.integer("temporal_patch_size", 2)
    usual["num_channels"] = fields.integer("in_channels", 3) * frames
    merge = fields.integer("spatial_merge_size", 2)
    return fields, usual | {"frames": frames, "merge": merge, "rope_theta": theta}


def layer_list(fields: Fields, name: str, default: list[int]) -> list[int]:
    """A list of layers, from 0."""
    layers = fields.take(name, default)
    if not isinstance(layers, list | tuple) or any(type(i) is not int or i < 0 for i in layers):
        raise ConfigError(f"{fields.where}: {name!r} is {shown(layers)}, but must be a list of layers, from 0.")
    return list(layers)


def tower_to_hf(config: Any, classes: str, **own: Any) -> ConfigJson:
    """A config.json of a tower with the fields of QwenTowerConfig and `own`."""
    rest = {"num_channels": None, "image_size": None, "layer_norm_eps": None, "spatial_merge_size": config.merge}
    rest |= {"temporal_patch_size": config.frames, "in_channels": config.num_channels // config.frames}
    rest |= {"rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta}}
    out = vision.vision_to_hf(config, classes, **rest | own)
    return expressible(config, {_NAMES.get(name, name): value for name, value in out.items()})


def patch_leaf(config: QwenTowerConfig) -> Leaf:
    """The weight of the convolution that embeds patches: [D, C, T, p, p]."""
    p, T = config.patch_size, config.frames
    shape = (config.hidden_size, config.num_channels // T, T, p, p)
    axes = ("embed", "channel", "frame", "patch_row", "patch_column")
    return Leaf(shape, torch.float32, axes, Normal(config.initializer_range))


def layer_names(config: QwenTowerConfig, parts: Mapping[str, str]) -> StoredNames:
    """{path: name on disk} of the layers: q, k and v are fused; parts {path in a layer: its name without ".weight"}."""
    names: StoredNames = {}
    for i in range(config.num_hidden_layers):
        at, there = f"layers.{i}.attention", f"blocks.{i}.attn.qkv"
        for ours, theirs in (("proj", "weight"), ("bias", "bias")):
            rows = {name: config.head_dim * heads for name, heads in zip("qkv", _heads(config), strict=True)}
            names |= fuse(f"{there}.{theirs}", {f"{at}.{name}_{ours}": count for name, count in rows.items()})
    return names | vision.layer_names(config, "blocks.", {"attention.o_proj": "attn.proj", **parts})


def _heads(config: QwenTowerConfig) -> tuple[int, int, int]:
    """The heads of queries, keys and values."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    return heads, kv_heads, kv_heads


@in_fp64
def freqs_cis(config: Any, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 [B, S, H/2, 2]}: the first half of the angles turns with the row, the second with the column."""
    freqs = frequencies(Rope(theta=config.rope_theta), config.head_dim // 2, device=positions.device)
    angles = torch.cat([positions[..., axis, None].double() * freqs for axis in (0, 1)], -1)
    table = torch.stack((angles.cos(), angles.sin()), -1).float()
    return dict.fromkeys(sorted(set(vision_kinds(config))), table)


def window_masks(
    config: Any, positions: Tensor, segment_ids: Tensor, side: int, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of the kinds "full", the image, and "window", its squares of `side` patches. positions [B, S, 4]."""
    masks = {"full": vision.attention_masks(config, positions, segment_ids, create=create)["full"]}
    if "window" in config.layer_kinds:
        row, column = (positions[..., :2] // side).unbind(-1)
        spans = 1 + row * (positions[..., 3] // side + 1) + column
        order = text_order(positions[..., :2], segment_ids)
        masks["window"] = build_mask(Everything() & SameSpan(), order, segment_ids, spans=spans, create=create)
    return {kind: masks[kind] for kind in sorted(set(config.layer_kinds))}


def vision_kinds(config: Any) -> tuple[str, ...]:
    """The kind of each layer: its `layer_kinds`, or "full"."""
    layer_kinds: tuple[str, ...] = getattr(config, "layer_kinds", vision.kinds(config))
    return layer_kinds


def unembed(params: Tree, x: Tensor, /, *, config: Any) -> Tensor:
    """The hidden states, unchanged."""
    return x

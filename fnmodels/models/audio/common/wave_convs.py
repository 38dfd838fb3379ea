"""The convolutions of encoders of raw waves: strided ones make tokens, and a wide one says where they stand.

Both read clips that share a row as if each were alone: a token holds its samples (`fnmodels.inputs.waves`), and the
wide convolution reads a line on which zeros stand between clips.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import Segments
from fnmodels.inputs.values import readable
from fnmodels.inputs.waves import WaveConfig, Windows, reach, windows_of
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.spec import Constant, Leaf, Normal, bias, layer_norm_leaves
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.ops import ACTIVATIONS, layer_norm
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, rows_are_invariant
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

_EPS = 1e-5  # of the norms of convolutions; no field of the file


SIZES = {"conv_dim": (512,) * 7, "conv_stride": (5, 2, 2, 2, 2, 2, 2), "conv_kernel": (10, 3, 3, 3, 3, 2, 2)}
PLACES = {"num_conv_pos_embeddings": 128, "num_conv_pos_embedding_groups": 16}


class ConvConfig(WaveConfig, Protocol):
    """The fields that these functions read."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def conv_dim(self) -> tuple[int, ...]: ...
    @property
    def conv_bias(self) -> bool: ...
    @property
    def conv_act(self) -> str: ...
    @property
    def num_conv_pos_embeddings(self) -> int: ...
    @property
    def num_conv_pos_embedding_groups(self) -> int: ...


def conv_fields(fields: Fields) -> dict[str, Any]:
    """The fields of ConvConfig from a config.json, but hidden_size and initializer_range."""
    found: dict[str, Any] = {name: _integers(fields, name, default) for name, default in SIZES.items()}
    found |= {name: fields.integer(name, default) for name, default in PLACES.items()}
    found["conv_bias"] = fields.boolean("conv_bias", False)
    found["conv_act"] = fields.choice("feat_extract_activation", tuple(ACTIVATIONS), "gelu")
    found["clip_norm"] = fields.choice("feat_extract_norm", ("group", "layer"), "group") == "group"
    return found


def conv_to_hf(config: ConvConfig) -> ConfigJson:
    """The fields of config.json that `conv_fields` reads."""
    out: ConfigJson = {name: list(getattr(config, name)) for name in SIZES}
    out |= {name: getattr(config, name) for name in (*PLACES, "conv_bias")}
    out["feat_extract_norm"] = "group" if config.clip_norm else "layer"
    return out | {"feat_extract_activation": config.conv_act}


def check_convs(config: ConvConfig) -> None:
    """ConfigError for convolutions that do not fit each other, or the hidden size."""
    sizes = [getattr(config, name) for name in SIZES]
    if len({*map(len, sizes)}) != 1 or not sizes[0] or min(map(min, sizes)) < 1:
        raise ConfigError(
            f"{', '.join(SIZES)} are {', '.join(map(str, sizes))}; each must have a number of 1 or more for every "
            "convolution."
        )
    groups = config.num_conv_pos_embedding_groups
    if config.hidden_size % groups:
        raise ConfigError(f"hidden_size {config.hidden_size} is not a multiple of the {groups} groups.")


def _integers(fields: Fields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = fields.take(name, list(default))
    if not isinstance(value, list | tuple) or not all(type(n) is int for n in value):
        raise ConfigError(f"{fields.where}: {name!r} is {shown(value)}, but must be a list of integers.")
    return tuple(value)


def strided_leaves(config: ConvConfig) -> Tree:
    """The strided convolutions [out, in, taps] and their norms: "conv0_proj", "conv0_norm" and so on."""
    tree: Tree = {}
    for i, (out, kernel) in enumerate(zip(config.conv_dim, config.conv_kernel, strict=True)):
        inner, axis = (config.conv_dim[i - 1], "inner_channel") if i else (1, "one")
        std = (2 / (inner * kernel)) ** 0.5
        tree[f"conv{i}_proj"] = Leaf((out, inner, kernel), torch.float32, ("channel", axis, "kernel"), Normal(std))
        if config.conv_bias:
            tree[f"conv{i}_bias"] = bias(out, "channel")
        if not (config.clip_norm and i):
            tree |= layer_norm_leaves(f"conv{i}_norm", out, "channel")
    return tree


def wide_leaves(config: ConvConfig) -> Tree:
    """The wide convolution: its weight as a direction and a norm for each tap (weight norm, arXiv 1602.07868)."""
    D, taps = config.hidden_size, config.num_conv_pos_embeddings
    scale = Leaf((1, 1, taps), torch.float32, ("one", "one", "kernel"), Constant(1.0), decay=False)
    shape, axes = (D, D // config.num_conv_pos_embedding_groups, taps), ("embed", "group_channel", "kernel")
    direction = Leaf(shape, torch.float32, axes, Normal(config.initializer_range), decay=False)
    return {"place_scale": scale, "place_proj": direction, "place_bias": bias(D, "embed")}


def conv_names(config: ConvConfig, at: str) -> dict[str, str]:
    """{path of a parameter: its name on disk} of all convolutions, and of the projection between them; at: a prefix."""
    where = {"projection_norm": "feature_projection.layer_norm", "projection_proj": "feature_projection.projection"}
    for i in range(len(config.conv_dim)):
        layer = f"feature_extractor.conv_layers.{i}"
        where |= {f"conv{i}_proj": f"{layer}.conv", f"conv{i}_norm": f"{layer}.layer_norm"}
    names: dict[str, str] = {}
    for path, name in where.items():
        names |= weight_and_bias(path, f"{at}{name}")
    wide = f"{at}encoder.pos_conv_embed.conv"
    return names | {
        "place_scale": f"{wide}.weight_g",
        "place_proj": f"{wide}.weight_v",
        "place_bias": f"{wide}.bias",
    }


def batch_inputs(config: ConvConfig, positions: Tensor) -> dict[str, Any]:
    """Inputs of the wide convolution: a row's tokens on a line, with as many zeros between clips as it reaches.

    Returns {"line" [B, L]: the token at each place, -1 for zeros; "place" [B, S] of each token; "order": `Segments`,
    for tokens that were permuted would have other neighbours}. L depends on values, on the meta device on the
    shape alone. ValueError for positions that are not those of `wave_rows`.
    """
    if positions.ndim != 3 or positions.shape[-1] != 2:
        raise ValueError(
            "The positions of a clip's tokens are (index, tokens of the clip), [B, S, 2], not "
            f"{list(positions.shape)}: fnmodels.inputs.wave_rows makes them with the waves."
        )
    at, count = positions.unbind(-1)
    valid, slots = count > 0, torch.arange(at.shape[1], device=at.device)
    clip = (valid & (at == 0)).cumsum(1)
    place = slots + config.num_conv_pos_embeddings // 2 * (clip - 1).clamp(min=0)
    longest = int(place.max()) + 1 if place.numel() and readable(place) else at.shape[1]
    line = torch.full((len(at), longest + 1), -1, device=at.device)
    line = line.scatter(1, place.where(valid, longest), slots.expand_as(place))[:, :-1]
    return {"line": line, "place": place, "order": Segments(clip.where(valid, 0))}


def example_inputs(config: ConvConfig, positions: Tensor, /) -> dict[str, Any]:
    """Inputs of rows [B, S], a clip each; see `family.function_of`."""
    count = torch.full_like(positions, positions.shape[1])
    placed, width = torch.stack((positions, count), -1), reach(config)[0]
    width += (config.conv_kernel[0] + 1) * config.conv_kernel[0] if config.clip_norm else 0
    waves = torch.zeros(*positions.shape, width, device=positions.device)
    return {"tokens": waves, "positions": placed, **batch_inputs(config, placed)}


def convolved(params: Tree, waves: Tensor, config: ConvConfig) -> Tensor:
    """[B, S, C]: each token's samples through the strided convolutions."""
    windows = windows_of(waves, config)
    x = windows.samples[..., None].to(params["conv0_proj"].dtype)  # [B, S, samples, channels]
    for i, (kernel, stride) in enumerate(zip(config.conv_kernel, config.conv_stride, strict=True)):
        weights, offset = params[f"conv{i}_proj"].flatten(1), params.get(f"conv{i}_bias")
        y = linear(x.unfold(-2, kernel, stride).flatten(-2), weights, offset)
        if not config.clip_norm:
            y = layer_norm(y, params[f"conv{i}_norm"], params[f"conv{i}_norm_bias"], eps=_EPS)
        elif not i:
            y = _over_clip(y, windows, weights, offset)
            y = (y * upcast(params["conv0_norm"]) + upcast(params["conv0_norm_bias"])).to(x.dtype)
        x = elementwise(ACTIVATIONS[config.conv_act], y)
    return x.squeeze(-2)


def _over_clip(y: Tensor, windows: Windows, weights: Tensor, offset: Tensor | None) -> Tensor:
    """y [B, S, n, C] with mean 0 and variance 1 of each channel over its clip, in fp32 at least."""
    assert windows.mean is not None and windows.root is not None
    wide = upcast(weights)
    mean = linear(windows.mean.to(wide.dtype), wide, None if offset is None else upcast(offset))
    variance = linear(windows.root.to(wide.dtype), wide).square().sum(-2)
    return (upcast(y) - mean[..., None, :]) * (variance + _EPS).rsqrt()[..., None, :]


def placed(params: Tree, x: Tensor, inputs: Mapping[str, Any], config: ConvConfig) -> Tensor:
    """[B, S, D]: the wide convolution in groups of x, which is 0 at padding; inputs with those of `batch_inputs`."""
    direction, line = params["place_proj"], inputs["line"][..., None]
    length = upcast(direction).square().sum((0, 1), keepdim=True).sqrt()
    weights = (upcast(direction) * (upcast(params["place_scale"]) / length)).to(x.dtype)
    width, taps = x.shape[-1], weights.shape[-1]
    spread = x.gather(1, line.clamp(min=0).expand(-1, -1, width)).where(line >= 0, 0)
    spread = F.pad(spread.mT, (taps // 2, (taps - 1) // 2))
    if rows_are_invariant():  # products of one token at a time
        read = spread.unfold(-1, taps, 1).unflatten(1, (-1, weights.shape[1])).movedim(-2, 1)  # [B, L, groups, c, taps]
        groups = weights.unflatten(0, (read.shape[2], -1))
        parts = (linear(read[:, :, g].flatten(-2), group.flatten(1)) for g, group in enumerate(groups))
        y = torch.cat(list(parts), -1) + params["place_bias"]
    else:
        y = F.conv1d(spread, weights, params["place_bias"], groups=width // weights.shape[1]).mT
    y = elementwise(ACTIVATIONS[config.conv_act], y)
    return y.gather(1, inputs["place"][..., None].expand(-1, -1, width))

"""Helpers of this folder: a prepared batch, names of the parts of the residual stream, rows that are no padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import family_of
from fnmodels.taps import tap_names
from fnmodels.tree import Tree

Prepared = tuple[Tree, Mapping[str, MaskLike], Mapping[str, Tensor]]  # of `fnmodels.prepare`
ADDED = ("mamba", "attention", "mlp", "per_layer")  # the taps of a layer that it adds to the residual stream


def layer_count(config: DecoderConfig) -> int:
    """The number of layers."""
    return len(family_of(config).kinds(config))


def names_of(config: DecoderConfig, *taps: str) -> list[str]:
    """The names "layers.N.TAP" among these that the model has, in the order of the layers."""
    wanted = [f"layers.{index}.{tap}" for index in range(layer_count(config)) for tap in taps]
    known = tap_names(config)
    return [name for name in wanted if name in known]


def valid_of(prepared: Prepared) -> Tensor:
    """bool [B, S], False at padding."""
    inputs: Any = prepared[0]
    valid: Tensor = inputs["valid"]
    return valid


def along_sequence(mask: Tensor, value: Tensor) -> Tensor:
    """A mask [S] or [B, S] in a form that broadcasts with value [B, S, ...]."""
    return mask.reshape(*mask.shape, *[1] * (value.ndim - 2))


def differentiable(value: Tensor, name: str) -> Tensor:
    """An edit: the value, with a gradient from here on."""
    return value if value.requires_grad else value.detach().requires_grad_()

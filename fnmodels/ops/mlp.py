"""Feed-forward networks (MLPs), gated and plain, and the table of activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from .linear import linear

# By Hugging Face's names; further ones (quick_gelu, ...) are added with the families that use them.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "gelu_fast": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def glu(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * up, the gated linear unit between the projections of a gated MLP or expert."""
    return ACTIVATIONS[activation](gate) * up


def gated_mlp(layer: Mapping[str, Tensor], x: Tensor, *, activation: str) -> Tensor:
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202); x [..., D]. The biases are optional leaves."""
    gate = linear(x, layer["gate_proj"], layer.get("gate_bias"))
    up = linear(x, layer["up_proj"], layer.get("up_bias"))
    return linear(glu(gate, up, activation=activation), layer["down_proj"], layer.get("down_bias"))


def plain_mlp(layer: Mapping[str, Tensor], x: Tensor, *, activation: str) -> Tensor:
    """down(activation(up(x))), without a gate (arXiv 1706.03762); x [..., D]. The biases are optional leaves."""
    up = linear(x, layer["up_proj"], layer.get("up_bias"))
    return linear(ACTIVATIONS[activation](up), layer["down_proj"], layer.get("down_bias"))

"""Feed-forward networks (MLPs), gated and plain, and the table of activations."""

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.options import Tap, untapped

from .invariant.rows import elementwise, rows_are_invariant
from .linear import linear, linear_gelu, linears

# By Hugging Face's names; further ones are added with the families that use them.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "gelu_fast": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


# `approximate` of those that `plain_mlp` computes with the product where nothing reads their argument again: a second
# tensor of the width of an MLP costs a tenth of an encoder's forward pass.
_GELU = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}


def glu(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * up, the gated linear unit between the projections of a gated MLP or expert."""
    return elementwise(ACTIVATIONS[activation], gate) * up


def clamped_glu(gate: Tensor, up: Tensor, *, activation: str, limit: float) -> Tensor:
    """`glu` of the gate at most `limit`, and of up between -limit and limit (DeepSeek V4)."""
    return glu(gate.clamp(max=limit), up.clamp(min=-limit, max=limit), activation=activation)


def limited_glu(gate: Tensor, up: Tensor, *, activation: str, limit: float) -> Tensor:
    """`glu` of activation(gate) at most `limit`, and of up between -limit and limit (Step 3.5)."""
    return elementwise(ACTIVATIONS[activation], gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)


def clamped_swiglu(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha gate) * (up + 1), with gate clamped to at most `limit` and up to [-limit, limit]."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * elementwise(torch.sigmoid, alpha * gate) * (up + 1)


def softcapped_swiglu(gate: Tensor, up: Tensor, *, gate_cap: float, up_cap: float) -> Tensor:
    """cap(gate, gate_cap) * sigmoid(gate) * cap(up, up_cap), cap(x, c) = c tanh(x / c); in fp32 (Inkling 2)."""
    wide, other = upcast(gate), upcast(up)
    capped = gate_cap * elementwise(torch.tanh, wide / gate_cap)
    other = up_cap * elementwise(torch.tanh, other / up_cap)
    return (capped * elementwise(torch.sigmoid, wide) * other).to(gate.dtype)


def gated_mlp(layer: Mapping[str, Tensor], x: Tensor, *, activation: str, tap: Tap = untapped) -> Tensor:
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202); x [..., D]. The biases are optional leaves.

    tap: called with "mlp.pre", gate(x), and "mlp.neurons", what `down` reads, both [..., F].
    """
    gate, up = linears(x, layer, ("gate", "up"))
    neurons = tap("mlp.neurons", glu(tap("mlp.pre", gate), up, activation=activation))
    return linear(neurons, layer["down_proj"], layer.get("down_bias"))


def acting_mlp(
    layer: Mapping[str, Tensor], x: Tensor, *, act: Callable[[Tensor, Tensor], Tensor], tap: Tap = untapped
) -> Tensor:
    """`gated_mlp` with a function act(gate, up) of both projections, such as `clamped_glu`."""
    gate, up = linears(x, layer, ("gate", "up"))
    neurons = tap("mlp.neurons", act(tap("mlp.pre", gate), up))
    return linear(neurons, layer["down_proj"], layer.get("down_bias"))


def plain_mlp(layer: Mapping[str, Tensor], x: Tensor, *, activation: str, tap: Tap = untapped) -> Tensor:
    """down(activation(up(x))), without a gate (arXiv 1706.03762); x [..., D]. The biases are optional leaves.

    tap: called with "mlp.pre", up(x), and "mlp.neurons", what `down` reads, both [..., F].
    """
    given = x, layer["up_proj"], layer.get("up_bias")
    if tap is untapped and activation in _GELU and not torch.is_grad_enabled() and not rows_are_invariant():
        neurons = linear_gelu(*given, approximate=_GELU[activation])
    else:
        neurons = tap("mlp.neurons", elementwise(ACTIVATIONS[activation], tap("mlp.pre", linear(*given))))
    return linear(neurons, layer["down_proj"], layer.get("down_bias"))


def xielu_mlp(layer: Mapping[str, Tensor], x: Tensor, *, tap: Tap = untapped) -> Tensor:
    """down(xielu(up(x))), with the activation's own parameters beside the projections; x [..., D]. tap: `plain_mlp`."""
    scalars = (layer[f"xielu_{name}"] for name in ("alpha_p", "alpha_n", "beta", "eps"))
    up = tap("mlp.pre", linear(x, layer["up_proj"]))
    return linear(tap("mlp.neurons", xielu(up, *scalars)), layer["down_proj"])


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """A parabola for x > 0, and beside it the integral of an ELU (arXiv 2411.13010); in fp32 at least.

    alpha_p, alpha_n [1]: curvatures of both sides before softplus. beta [] is the slope at 0, and eps [] < 0 the
    greatest argument of expm1, so that it stays finite where x > 0.
    """
    wide = upcast(x)
    zero = torch.zeros_like(wide[..., :1])  # one number for each row, whose sum with a parameter `per_sample` follows
    alpha_p, alpha_n, beta, eps = (zero + upcast(scalar) for scalar in (alpha_p, alpha_n, beta, eps))
    positive, negative = (elementwise(F.softplus, alpha) for alpha in (alpha_p, alpha_n))
    negative = beta + negative
    below = (elementwise(torch.expm1, torch.minimum(wide, eps)) - wide) * negative
    return (torch.where(wide > 0, positive * wide * wide, below) + beta * wide).to(x.dtype)

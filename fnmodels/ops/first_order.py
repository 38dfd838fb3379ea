"""A sentence of ours where a fused kernel cannot be differentiated further.

Fused kernels have a backward, and no derivative of that backward and no forward-mode derivative. Torch says so in terms
of internal names, in the case of a second backward long after the call. `first_order` is the identity on the kernel's
inputs, and an autograd node that knows which kernel it guards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sentence(kernel: str) -> str:
    return (
        f'This transform (forward mode, or a second derivative) does not go through kernel="{kernel}"; '
        'kernel="math" supports all of them.'
    )


def first_order(kernel: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, in front of `kernel`: jvp and a second backward through them raise NotImplementedError.

    About 10 us. A compiled graph knows no second derivatives anyway, and a custom jvp would break it.
    """
    if torch.compiler.is_compiling():
        return tensors
    return _Guard.apply(kernel, *tensors)


class _Guard(torch.autograd.Function):
    """Identity; its backward puts `_Stop` on the gradients, which the second backward meets before the kernel's own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kernel: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.kernel = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, *grads)
        return (None, *(None if g is None else _Stop.apply(ctx.kernel, g) for g in grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(sentence(ctx.kernel))


class _Stop(torch.autograd.Function):
    """Identity that cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kernel: str, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.kernel = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        raise NotImplementedError(sentence(ctx.kernel))

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:
        raise NotImplementedError(sentence(ctx.kernel))

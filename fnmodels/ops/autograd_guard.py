"""A sentence of ours where a fused kernel cannot be differentiated further.

Fused kernels have a backward, but no derivative of that backward, and no forward-mode derivative. Torch says so in
terms of internal names, and in the case of a second backward long after the call. `first_order` is the identity on a
kernel's inputs: an autograd node that knows which kernel it guards, and speaks when such a transform arrives at it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels.inputs.values import batched_gradient


def first_order(kernel: str, *tensors: Tensor, vmap: bool = True) -> tuple[Tensor, ...]:
    """The tensors, in front of `kernel`: jvp, a second backward, and vmap=False also vmap, raise NotImplementedError.

    kernel: one of attention's, or "grouped" for that of experts.
    It costs 20 us where gradients are recorded. In a graph that is traced there is no node to speak later, so what is
    active by then is asked for; a second derivative that is taken inside of compiled code meets torch's own error.
    """
    if torch.compiler.is_compiling():
        from .torch_internals import transforms  # here, for making it imports dynamo

        active = transforms() or ()
        if "Jvp" in active or ("Vmap" in active and not vmap):
            refuse(kernel)
        return tensors
    if vmap and not torch.is_grad_enabled():
        return tensors
    return (_Guard if vmap else _Wall).apply(kernel, *tensors)


def refuse(kernel: str) -> NoReturn:
    what, other = ("experts", "dense") if kernel in ("grouped", "loop") else ("kernel", "math")
    raise NotImplementedError(
        f'{what}="{kernel}" does not support this transform (forward mode, a second derivative, or vmap): '
        f'{what}="{other}" supports all of them.'
    )


class FirstOrder(torch.autograd.Function):
    """Base of the Functions of experts behind `first_order`, where no vmap and no jvp arrives. Keeps its inputs."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> NoReturn:
        refuse("loop")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("loop")


class _Guard(torch.autograd.Function):
    """Identity; its backward puts `_Stop` on the gradients, which a second backward meets before the kernel's own."""

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
        if not torch.is_grad_enabled():  # no second backward is being prepared
            return (None, *grads)
        if any(g is not None and batched_gradient(g) for g in grads):
            refuse(ctx.kernel)  # of slopes side by side (is_grads_batched) a second backward would miss `_Stop`
        return (None, *(None if g is None else _Stop.apply(ctx.kernel, g) for g in grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> NoReturn:
        refuse(ctx.kernel)


class _Wall(_Guard):
    """For kernels that vmap does not go through either."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, kernel: str, *tensors: Tensor) -> NoReturn:
        refuse(kernel)


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
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        refuse(ctx.kernel)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> NoReturn:
        refuse(ctx.kernel)

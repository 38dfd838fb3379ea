"""Guards that raise a clear error for transforms which a fused kernel does not support (jvp, double backward, vmap).

Fused kernels have a backward, but no double backward and no forward-mode derivative. Torch's own errors use internal
names, and for a second backward come long after the call. `first_order` is the identity on a kernel's inputs: an
autograd node that knows the name of the kernel and raises when such a transform reaches it.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels.inputs.values import batched_gradient

from .torch_internals import differentiated_once, is_outermost


def first_order(kernel: str, *tensors: Tensor, vmap: bool = True) -> tuple[Tensor, ...]:
    """`tensors` unchanged; jvp, a second backward and (with vmap=False) vmap through them raise NotImplementedError.

    kernel: the name of the attention kernel that follows, or "grouped" or "loop" for experts.
    It costs 20 us where gradients are recorded, and nothing inside of a single `torch.func.grad`. A compiled graph has
    no such node, so active transforms are checked while it is traced; a second derivative taken inside compiled code
    raises torch's own error.
    """
    if torch.compiler.is_compiling():
        from .torch_internals import transforms  # here, for making it imports dynamo

        active = transforms() or ()
        if "Jvp" in active or ("Vmap" in active and not vmap):
            refuse(kernel)
        return tensors
    if vmap and (not torch.is_grad_enabled() or differentiated_once(*tensors)):
        return tensors
    return (_Guard if vmap else _GuardAgainstVmap).apply(kernel, *tensors)


def guarded(kernel: str, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """function(q, k, v, **options), a kernel of torch's own; transforms that it does not support raise
    NotImplementedError.

    In plain autograd a hook on the kernel's node does what `first_order` does on its inputs, and takes no time.
    """
    plain = is_outermost()
    if not plain:
        q, k, v = first_order(kernel, q, k, v)
    try:
        result = function(q, k, v, **options)
    except NotImplementedError:  # forward mode where no gradient is recorded
        refuse(kernel)
    if plain and result.grad_fn is not None:
        result.grad_fn.register_hook(functools.partial(_stop, kernel))
    return result


def _stop(kernel: str, grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
    """A hook that lets a first backward pass, and puts `_Stop` in the way of a second one."""
    if not torch.is_grad_enabled():  # no graph for a second backward is being recorded
        return None
    if any(g is not None and batched_gradient(g) for g in grads):
        refuse(kernel)  # with is_grads_batched a second backward would not reach `_Stop`
    return tuple(None if g is None else _Stop.apply(kernel, g)[0] for g in grads)


def refuse(kernel: str) -> NoReturn:
    what, other = ("experts", "dense") if kernel in ("grouped", "loop") else ("kernel", "math")
    raise NotImplementedError(
        f'{what}="{kernel}" does not support this transform (forward mode, a second derivative, or vmap): '
        f'{what}="{other}" supports all of them.'
    )


class FirstOrder(torch.autograd.Function):
    """Base class of the experts' Functions, which run after `first_order`; saves its inputs for backward."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        refuse("loop")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("loop")


class _Guard(torch.autograd.Function):
    """Identity whose backward passes the gradients through `_Stop`, which a second backward reaches first."""

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
        stopped = _stop(ctx.kernel, grads, None)
        return (None, *(grads if stopped is None else stopped))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> NoReturn:
        refuse(ctx.kernel)


class _GuardAgainstVmap(_Guard):
    """`_Guard` for kernels that do not support vmap either."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, kernel: str, *tensors: Tensor) -> NoReturn:
        refuse(kernel)


class _Stop(_Guard):
    """Identity that cannot be differentiated."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        refuse(ctx.kernel)

"""The rotation of queries and keys by blocks of tokens, which stay in the cache, for large tensors on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.torch_internals import alone

from .blocks import Space, like, rows_of_block

Rotate = Callable[[Tensor, Tensor], Tensor]

_MIN_ELEMENTS = 1 << 18  # below it the overhead of Python dominates


def fits_blocks(x: Tensor, table: Tensor) -> bool:
    """Whether these are plain tensors of more than one block, in eager mode, and the table needs no gradient."""
    return (
        x.numel() >= _MIN_ELEMENTS
        and x.dtype in (torch.float32, torch.bfloat16)
        and table.dtype is torch.float32
        and (x.ndim, table.ndim, table.shape[1]) == (4, 4, x.shape[1])
        and not table.requires_grad
        and not table.is_inference()  # which the backward pass could not read
        and alone(x, table)
    )


def rotate_by_blocks(x: Tensor, table: Tensor, plain: Rotate) -> Tensor:
    """x [B, S, N, H] rotated by `table` [B|1, S, R/2, 2].

    plain: the same in torch's operations, of which further derivatives are taken.
    """
    rotated: Tensor = _Rotary.apply(x, table, plain)
    return rotated


class _Rotary(torch.autograd.Function):
    """`rotate_by_blocks`. Its gradient is the rotation back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, table: Tensor, plain: Rotate) -> Tensor:
        return _rotated(x, table, 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plain = inputs[2]
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        rotated: Tensor = ctx.plain(tangent, ctx.saved_tensors[0])
        return rotated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (table,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not alone(grad):  # a second derivative, or several first ones
            return ctx.plain(grad, table * table.new_tensor((1.0, -1.0))), None, None
        return _rotated(grad, table, -1.0), None, None


def _rotated(x: Tensor, table: Tensor, sign: float) -> Tensor:
    """The rotation by the angles of the table, or with the sign -1 by their negatives."""
    half, out = table.shape[-2], like(x)
    cos, sin = (t.expand(len(x), -1, 1, -1) for t in table.unsqueeze(-3).unbind(-1))
    cos, sin = torch.cat((cos, cos), -1), sin * sign
    space, size = Space(cos), rows_of_block(x.shape[2] * x.shape[3])
    for rows in zip(*(t.flatten(0, 1).split(size) for t in (out, x, cos, sin, -sin)), strict=True):
        into, given, of_cos, of_sin, negative = rows
        read = given[..., : 2 * half]
        read = read if x.dtype is cos.dtype else space("read", *read.shape).copy_(read)
        to = into[..., : 2 * half] if x.dtype is cos.dtype else space("turned", *read.shape)
        turned = torch.mul(read, of_cos, out=to)
        turned[..., :half].addcmul_(read[..., half:], negative)
        turned[..., half:].addcmul_(read[..., :half], of_sin)
        if turned.dtype is not into.dtype:
            into[..., : 2 * half].copy_(turned)
        if 2 * half < x.shape[-1]:
            into[..., 2 * half :].copy_(given[..., 2 * half :])
    return out

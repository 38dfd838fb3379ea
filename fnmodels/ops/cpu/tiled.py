"""Tiled causal attention by batched matmuls, the fastest way to train on a CPU in eager mode.

Torch's fused CPU kernel runs at about a third of the matmul peak, in bf16 no faster than in fp32. Here each product of
a tile of queries with its visible keys is one batched matmul over all groups, so that the work runs at matmul speed and
above the diagonal only the tile's own corner is computed. The backward recomputes the probabilities; only q, k and v
are saved. Measured on 4 x 512 tokens, 8 heads of 64, 4 kv heads, forward and backward, against the fused kernel: on a
Zen 4, 1.4 times as fast in fp32 and 2.1 times in bf16; on a Zen 5, 1.4 and 2.8 times, and in bf16 at 2,048 tokens 1.4
to 1.8 times; on a Xeon with AMX, whose small products are fast too, 1.1 and 1.2 times, and in fp32 slower from 1,024
tokens on (0.8 times).

In bf16 the scores are rounded to bf16 before the softmax (which is fp32 inside), as in most written-out
implementations: the error against fp64 is 3.5e-3 where the fused kernel's is 2.0e-3. On CPUs with AMX the forward pass
in bf16 is the fused kernel's, which takes half of the time of tiles there; its backward pass takes 1.5 times as long as
theirs. Where `product_table` measured fp32 products to be the faster ones, bf16 tiles are computed in fp32 and rounded
once, which takes 0.7 of the time.

Row: train_step.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels.inputs.values import batched_gradient
from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.torch_internals import MATRIX_TILES

from .tiled_kernel import save_inputs, tiles_backward, tiles_forward

# {dtype: range of lengths where tiles measured faster}; CPUs with AMX are those whose fused kernel is fast. In fp16
# tiles take 1.4 (512 tokens) to 3 times (2,048) as long as the fused kernel.
_LENGTHS = {
    torch.bfloat16: (32, 1024 if MATRIX_TILES else 2048),
    torch.float32: (256, 512 if MATRIX_TILES else 1024),
}


def causal_tiles(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """softmax(scale q k^T, causal by index) v: q [B, S, N, H], k [B, S, G, H], v [B, S, G, Hv] -> [B, S, N, Hv].

    Supports one backward, and vmap. Callers pass inputs through `first_order`, which refuses other transforms.
    """
    if torch.compiler.is_compiling():
        from .tiled_op import compiled_tiles  # imported late: it imports dynamo, which imports sympy

        return compiled_tiles(q, k, v, scale)
    return _Tiles.apply(q, k, v, scale)


def tiles_are_faster(q: Tensor) -> bool:
    """Whether tiles support these queries and are faster than the fused kernel."""
    low, high = _LENGTHS.get(q.dtype, (1, 0))
    fits = q.device.type == "cpu" and low <= q.shape[1] <= high
    if fits and torch.compiler.is_compiling():
        from fnmodels.ops.torch_internals import transforms  # here, for making it imports dynamo

        return transforms() == ()
    return fits


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return tiles_forward(q, k, v, scale)

    setup_context = staticmethod(save_inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if batched_gradient(grad_output):
            # autograd.grad(is_grads_batched=True) uses another vmap than torch.func's: it ignores the vmap rules of
            # Functions, and calls an operator once per gradient.
            from .tiled_op import backward_tiles

            return *backward_tiles(*ctx.saved_tensors, grad_output, ctx.scale), None
        return *_Backward.apply(*ctx.saved_tensors, grad_output, ctx.scale), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        out = _Tiles.apply(*_fold(info.batch_size, in_dims[:3], args[:3]), args[3])
        return out.unflatten(0, (info.batch_size, -1)), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("blocks")


class _Backward(torch.autograd.Function):
    """The backward as a Function of its own, which refuses a second derivative through buffers written in place."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return tiles_backward(q, k, v, grad_output, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refuse("blocks")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        grads = _Backward.apply(*_fold(info.batch_size, in_dims[:4], args[:4]), args[4])
        return tuple(grad.unflatten(0, (info.batch_size, -1)) for grad in grads), (0, 0, 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("blocks")


def _fold(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Merge the mapped dimension into the batch: rows do not attend to each other anyway."""
    pairs = zip(tensors, dims, strict=True)
    return [(t.expand(size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1) for t, d in pairs]

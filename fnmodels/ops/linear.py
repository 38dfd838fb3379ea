"""Products with weights.

On a CPU torch leaves bf16 to oneDNN but fp32 to MKL, which is slower on AMD's processors: 82 to 89 GFLOP/s a core
where oneDNN has 93 to 103, measured at 2,048 tokens and widths of 256 to 8,192, and 100 against 230 where there is
AVX-512. These products are three quarters of a training step. So large ones, and their gradients, take the operator
that Inductor emits for oneDNN; in graphs it stands behind one of ours (`linear_op`).
`torch.backends.mkldnn.flags(enabled=False)` leaves all to MKL again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .torch_internals import alone, in_graph, onednn_linear

_ONEDNN = torch.backends.mkldnn.is_available()
_LEAST = 1 << 24  # multiplications: of a smaller product, what a Function costs in Python is more than a tenth


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] weight^T + bias [..., out], weight [out, in]: F.linear, and everywhere but in large fp32 products it.

    So a leaf that is no tensor (`params.lora`) meets F.linear, and all transforms do.
    """
    if not _pays(x, weight, bias):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        from .linear_op import compiled_linear  # here, for it imports dynamo

        return compiled_linear(x, weight, bias)
    product: Tensor = _Linear.apply(x, weight, bias)
    return product


def _pays(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = (x, weight) if bias is None else (x, weight, bias)
    compiled = torch.compiler.is_compiling()
    return (
        _ONEDNN
        and x.dtype is torch.float32
        and (in_graph(*given) if compiled else bool(torch.backends.mkldnn.enabled))
        and all(isinstance(t, Tensor) and t.dtype is torch.float32 for t in given)
        and x.ndim > 1
        and weight.ndim == 2
        and x.shape[-1] == weight.shape[1]
        and x.numel() * weight.shape[0] >= _LEAST
        and (compiled or alone(*given))  # last, for it takes longer
    )


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return onednn_linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor, of_weight: Tensor, of_bias: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        return F.linear(of_x, weight, of_bias) + F.linear(x, of_weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # oneDNN copies what it is given transposed, which costs less than it gains.
        rows = slope.reshape(-1, slope.shape[-1])  # flatten has no rule for slopes side by side (is_grads_batched)
        return (
            linear(slope, weight.t()) if of_x else None,
            linear(rows.t(), x.flatten(0, -2).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )

"""oneDNN's product of two matrices, eager and in a compiled graph alike."""

import torch
from torch import Tensor

from .torch_internals import onednn_linear

_WIDENED = 1 << 22  # elements of a weight in fp32 at a time


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] weight^T + bias, fp32 or bf16, not differentiable; bf16 is widened, see `linear`."""
    x, weight = _dense(x), _dense(weight)
    if x.dtype is torch.float32:
        return onednn_linear(x, weight, bias)
    wide, y = x.float(), x.new_empty(*x.shape[:-1], weight.shape[0])
    step = max(1, _WIDENED // x.shape[-1])
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        y[..., part] = onednn_linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return y


def _dense(x: Tensor) -> Tensor:
    """x, copied unless its rows or columns follow each other: other strides take oneDNN a hundred times as long.

    Slices have such strides, and the gradient of a sum.
    """
    return x if x.is_contiguous() or (x.ndim == 2 and x.t().is_contiguous()) else x.contiguous()

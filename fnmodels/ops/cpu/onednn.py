"""Products of two matrices by the library that is fastest on this machine, eager and in a compiled graph alike.

Row: train_step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.torch_internals import onednn_linear

_WIDENED = 1 << 20  # elements of an argument in fp32 at a time: 4 MiB, which costs no time


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] weight^T + bias, fp32 or bf16, not differentiable; bf16 is widened, see `linear`.

    A weight in oneDNN's own layout (`params.packed`) is multiplied by oneDNN as it is.
    """
    if weight.is_mkldnn:
        return onednn_linear(dense(x), weight, bias)
    if x.dtype is torch.float32:
        return _fp32(x, weight, bias)
    from . import product_table  # here, for its import measures

    if not product_table.WIDENS:
        return onednn_linear(dense(x), dense(weight), bias)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    y = x.new_empty(rows.shape[0], weight.shape[0])
    wide_bias = None if bias is None else bias.float()
    step = max(1, _WIDENED // x.shape[-1])
    for top in range(0, rows.shape[0], step):
        wide = rows[top : top + step].float()
        for left in range(0, weight.shape[0], step):
            part = slice(left, left + step)
            added = None if wide_bias is None else wide_bias[part]
            y[top : top + step, part] = _fp32(wide, weight[part].float(), added)
    return y.view(*x.shape[:-1], -1)


def _fp32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from . import product_table  # here, for its import measures

    x, weight = dense(x), dense(weight)
    if (transposed(x), transposed(weight)) in product_table.ONEDNN:
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def transposed(x: Tensor) -> bool:
    return not x.is_contiguous()


def dense(x: Tensor) -> Tensor:
    """x, copied unless its rows or columns follow each other: other strides take oneDNN a hundred times as long.

    Slices have such strides, and the gradient of a sum.
    """
    return x if x.is_contiguous() or (x.ndim == 2 and x.t().is_contiguous()) else x.contiguous()

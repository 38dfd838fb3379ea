"""Linear layers and activations of kernel="invariant": the bits of a row of the result depend on that row alone.

A matrix product's kernel is chosen by the number of rows, and kernels add in different orders. Measured on CPUs with
and without AVX-512: oneDNN's fp32 kernels give a row the same bits in products of two rows or more, and so do torch's
bf16 products without AMX that are not tiny; MKL needs four rows, or twelve. So these layers take one library for
products of every size, and repeat rows where there are fewer; gradients of weights alone, which are sums over rows, may
take the other library. With AMX, a row of a bf16 product over 512 inputs or more has other bits among 37 rows than
among 600: there bf16 products are computed by oneDNN in fp32 and rounded once. `fnmodels.explain_invariance` measures
what holds on the machine at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.values import readable
from fnmodels.ops.torch_internals import MATRIX_TILES, has_onednn_linear, onednn_linear

# Whether the code runs within `invariant_rows(True)`; for code that is not compiled, which dynamo cannot read it in.
INVARIANT: ContextVar[bool] = ContextVar("fnmodels_invariant_rows", default=False)
BLOCK = 64  # elements
GRAIN = 32768  # elements: torch gives each thread at least so many,
GELU_GRAIN = 16384  # but all threads a part of a gelu of more than so many
LANES = 16  # elements of a vector, fp32
LEAST_ROWS = 2  # of a product by oneDNN, or in half precision
LEAST_ROWS_OF_MKL = 12
SMALL_PRODUCT = 4096  # multiplications; torch computes half-precision products of at most so many by another kernel
SUMMED = 256  # rows that a product sums over at most: MKL gives threads a part each of some 768 rows or more
WIDENED = 1 << 20  # elements of a weight in fp32 at a time, which stay in the cache


_NOTHING = nullcontext()


def invariant_rows(wanted: bool) -> AbstractContextManager[None]:
    """If `wanted`, `ops.linear` and the norms in this context give a row its bits whatever the other rows are.

    The scope is one call of a block or a head, which enters it itself, so that it holds in recomputation too.
    """
    return _entered() if wanted else _NOTHING


@contextmanager
def _entered() -> Iterator[None]:
    if torch.compiler.is_compiling():
        _refuse()
    before = INVARIANT.set(True)
    try:
        yield
    finally:
        INVARIANT.reset(before)


def rows_are_invariant() -> bool:
    """Whether the code runs within `invariant_rows(True)`."""
    return not torch.compiler.is_compiling() and INVARIANT.get()


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), element by element. Within `invariant_rows`, equal elements have equal bits wherever they are.

    Torch computes blocks of a thread's elements by vector instructions and the rest one by one, with another exp. So
    the elements are filled up until each thread has whole blocks.
    """
    if torch.compiler.is_compiling() or not INVARIANT.get():
        return function(x)
    flat = x.reshape(-1)
    missing = _whole_blocks(len(flat), torch.get_num_threads()) - len(flat)
    return function(F.pad(flat, (0, missing)) if missing else flat)[: len(flat)].view(x.shape)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension. Within `invariant_rows`, also a row's gradient has bits of its own.

    Torch's backward pass adds the elements beyond whole vectors in another order in a thread of several.
    """
    if not rows_are_invariant():
        return x.softmax(-1)
    return F.pad(x, (0, -x.shape[-1] % LANES), value=-torch.inf).softmax(-1)[..., : x.shape[-1]]


def pairwise_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim`, halves added to each other element by element: an order that depends on this size alone."""
    while (size := x.shape[dim]) > 1:
        if size % 2:
            x = torch.cat((x, torch.zeros_like(x.narrow(dim, 0, 1))), dim)
        first, second = x.unflatten(dim, (2, -1)).unbind(dim - 1 if dim < 0 else dim)
        x = first + second
    return x.squeeze(dim)


def _whole_blocks(count: int, threads: int) -> int:
    """The least number from `count` that torch's threads, of which a small tensor gets fewer, share in whole blocks."""
    while count % (unit := BLOCK * math.lcm(*_shares(count, threads))):
        count += -count % unit
    return count


def _shares(count: int, threads: int) -> tuple[int, int]:
    """The numbers of threads that share `count` elements, in general and in a gelu."""
    return min(threads, max(-(-count // GRAIN), 1)), threads if count > GELU_GRAIN else 1


def _refuse() -> NoReturn:
    raise NotImplementedError(
        'kernel="invariant" runs in eager mode on plain tensors, without vmap, jvp and torch.compile: kernel="math" '
        "supports every transform, and the other kernels are compiled."
    )


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear; x [..., in], weight [out, in], bias [out]. First derivatives only.

    The gradient of x has invariant rows too; those of weight and bias are sums over rows, whose bits do not depend on
    the number of threads. A weight that is no tensor (an adapter) computes its product by this function.
    NotImplementedError under transforms, in compiled graphs, off the CPU, and for a weight that multiplies in another
    way (a shard).
    """
    if not (readable(x) and (readable(weight) or not isinstance(weight, Tensor))):
        _refuse()
    if not x.is_cpu:
        raise NotImplementedError(f'kernel="invariant" runs on the CPU, and these activations are on {x.device}.')
    if not isinstance(weight, Tensor):
        if not getattr(weight, "invariant", False):
            raise NotImplementedError(
                f'kernel="invariant" multiplies by whole weights and adapters, not by a {type(weight).__name__}.'
            )
        return F.linear(x, weight, bias)
    if not isinstance(bias, Tensor | None):  # it computes the product by this function too
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():  # a Function's call takes longer than a small product
        return _InvariantLinear.forward(x, weight, bias)
    y: Tensor = _InvariantLinear.apply(x, weight, bias)
    return y


class _InvariantLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if MATRIX_TILES and x.dtype is weight.dtype is torch.bfloat16 and has_onednn_linear():
            return _in_fp32(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])
        onednn = x.dtype is weight.dtype is torch.float32 and has_onednn_linear()
        count, least = len(rows), LEAST_ROWS if onednn or x.dtype.itemsize == 2 else LEAST_ROWS_OF_MKL
        if x.dtype.itemsize == 2:
            least = max(least, SMALL_PRODUCT // max(1, weight.numel()) + 1)
        if 0 < count < least:
            rows = torch.cat((rows, rows[-1:].expand(least - count, -1)))
        out = onednn_linear(rows, weight, bias) if onednn and rows.numel() else F.linear(rows, weight, bias)
        return out[:count].reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        _refuse()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        _refuse()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        return (
            invariant_linear(grad_output, weight.t(), None) if needs_x else None,
            _over_rows(rows, x.reshape(-1, x.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _over_rows(grad_output: Tensor, x: Tensor) -> Tensor:
    """grad_output [rows, out] transposed times x [rows, in]. MKL, where it is faster, takes some rows at a time."""
    from fnmodels.ops.cpu import product_table  # here, for its import measures

    if x.dtype is not torch.float32 or grad_output.dtype is not x.dtype or (True, True) in product_table.ONEDNN:
        return invariant_linear(grad_output.t(), x.t(), None)
    total = x.new_zeros(grad_output.shape[1], x.shape[1])
    for part, rows in zip(grad_output.split(SUMMED), x.split(SUMMED), strict=True):
        total.addmm_(part.t(), rows)
    return total


def _in_fp32(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The bf16 product by fp32 products of a part of the weight at a time; the parts depend on its shape alone."""
    wide, step = rows.float(), max(1, WIDENED // max(1, weight.shape[1]))
    out = rows.new_empty(len(rows), weight.shape[0])
    for top in range(0, weight.shape[0], step):
        part = slice(top, top + step)
        added = None if bias is None else bias[part].float()
        out[:, part] = _InvariantLinear.forward(wide, weight[part].float(), added)
    return out

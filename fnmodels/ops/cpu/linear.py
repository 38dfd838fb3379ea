"""Large products on a CPU the way that is fastest on this machine, and their gradients.

On a CPU torch runs fp32 products in MKL and bf16 products in oneDNN. Which library is faster, and whether bf16 products
are faster by fp32 ones, differs between processors by a factor of two and is measured once per machine
(`product_table`, `explain_products`). These products are three quarters of a training step. So large ones, and their
gradients, call the operator that Inductor emits for oneDNN where that is faster; in compiled graphs it is wrapped in a
custom operator (`linear_op`). Widened bf16 arguments are converted a part at a time, and each result is rounded once.
`torch.backends.mkldnn.flags(enabled=False)` switches back to torch's own.

Row: train_step.
"""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.values import batched_gradient
from fnmodels.ops.torch_internals import in_graph, is_plain_eager, no_view, onednn_linear
from fnmodels.ops.unread import within_unread

from .onednn import dense, product, transposed

_ONEDNN = torch.backends.mkldnn.is_available()
_WITH_ONEDNN = (torch.float32, torch.bfloat16)
_MIN_MULTIPLICATIONS = 1 << 24  # below it the Python overhead of a Function exceeds a tenth of the product
# Rows of a bf16 product: with fewer, conversions cost more than widening gains, with and without bf16 instructions.
_MIN_WIDENED_ROWS = 16
_MIN_WIDENED_SIDE = 128


def is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether this product takes so long that `large_linear` may gain: the one question asked of small ones."""
    return isinstance(weight, Tensor) and x.numel() * weight.shape[0] >= _MIN_MULTIPLICATIONS


def large_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in eager mode, by `product` where that is faster."""
    if not uses_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():  # a Function's call takes as long as a small product
        return product(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


def linear_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in code that torch.compile traces."""
    if _one_row(x, weight):
        return _reduction(x, weight, bias)
    if not uses_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    from .linear_op import compiled_linear  # here, for it imports dynamo

    return compiled_linear(x, weight, bias)


def large_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor | None:
    """F.gelu of a large product, without gradients, in one pass over the result; None where it is two."""
    if torch.compiler.is_compiling() or not (is_large(x, weight) and uses_onednn(x, weight, bias)):
        return None
    x, weight = dense(x), dense(weight)
    return onednn_linear(x, weight, bias, approximate) if _is_onednn(x, weight) else None


def uses_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` of these calls `product` instead of F.linear."""
    if not (_ONEDNN and isinstance(weight, Tensor) and weight.ndim == 2 and x.ndim > 1):
        return False
    compiled = torch.compiler.is_compiling()
    # Exported graphs have sizes that must not be compared, and so have compiled ones where no size decides.
    if compiled and (torch.compiler.is_exporting() or not x.is_cpu or x.dtype not in _WITH_ONEDNN):
        return False
    if not is_large(x, weight):
        return False  # early, for decoding has many small products, and tracing what follows takes longer than they do
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        x.dtype in _WITH_ONEDNN
        and (in_graph(*tensors) if compiled else bool(torch.backends.mkldnn.enabled))
        and all(isinstance(t, Tensor) and t.dtype is x.dtype for t in tensors)
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and (compiled or is_plain_eager(*tensors))  # late, because it takes longer
        and (within_unread() or _gains(x, weight, bias is not None and not compiled))
    )


def gains_alone(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` of these two matrices is a large one that torch's own would be slower for."""
    return uses_onednn(x, weight, None) and (x.dtype is torch.bfloat16 or _is_onednn(x, weight))


def _gains(x: Tensor, weight: Tensor, biased: bool) -> bool:
    """Whether this large product is faster than torch's own on this machine.

    biased: with a bias, in eager mode, where torch first copies the bias into each row of a bf16 result, which takes up
    to half as long as the product with AMX.
    """
    from . import product_table  # here, for its import measures

    if x.dtype is torch.float32:
        return bool(product_table.ONEDNN)
    if not product_table.BF16:
        return x.numel() >= _MIN_WIDENED_ROWS * x.shape[-1]
    if not product_table.WIDENS:
        return biased
    return (
        x.numel() >= _MIN_WIDENED_SIDE * x.shape[-1]
        and weight.shape[0] >= _MIN_WIDENED_SIDE
        and weight.shape[1] >= _MIN_WIDENED_SIDE
    )


def _is_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` of these is one product of oneDNN in their dtype."""
    from . import product_table  # here, for its import measures

    if x.dtype is torch.bfloat16:
        return not product_table.WIDENS
    return (transposed(x), transposed(weight)) in product_table.ONEDNN


def _one_row(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a product of one row in compiled code without gradients, as in decoding."""
    return (
        not torch.is_grad_enabled()
        and isinstance(weight, Tensor)
        and x.device.type == "cpu"
        and x.dtype is weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)  # the sum is in fp32
        and all(size == 1 for size in x.shape[:-1])  # of sizes that are symbols, numel would make constants
        and weight.ndim == 2
        and x.shape[-1] == weight.shape[1]
    )


def _reduction(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of one row: Inductor's loop reads at the memory's bandwidth, twice as fast as the libraries.

    The weight's rows are summed in two halves, which Inductor makes one loop: what it reads and computes of x, often a
    norm, serves two rows (a tenth of a step in fp32, a fifth in bf16; four parts are slower, for products of the same
    x, such as gate and up, are in one loop already).
    """
    wide = x.flatten().float()
    y = torch.cat([(wide * half.float()).sum(-1) for half in weight.tensor_split(2)])
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def explain_products() -> dict[str, str]:
    """The kinds of products that large linear layers take on this machine's CPU, and the rates that decided.

    The rates are read from a file of the machine, and measured if there is none, or if the machine was too busy when
    they were.

    Returns:
        {kind of product: the measured rates and the choice}, and the name of the file under "file".
    """
    from . import product_table

    return product_table.explained()


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return no_view(product(x, weight, bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: Tensor, bias_tangent: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        return F.linear(x_tangent, weight, bias_tangent) + F.linear(x, weight_tangent)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        # oneDNN copies transposed arguments, which costs less than it gains.
        rows = grad_output.reshape(-1, grad_output.shape[-1])  # flatten has no batching rule for is_grads_batched
        if torch.is_grad_enabled():  # for a second derivative, which has twice as many transposed arguments
            grad_weight = _UnreadProduct.apply if within_unread() and weight.is_leaf else _product_over_rows
            return (
                _times(grad_output, weight) if needs_x else None,
                grad_weight(rows, x.flatten(0, -2)) if needs_weight else None,
                rows.sum(0) if needs_bias else None,
            )
        return (
            _times(grad_output, weight) if needs_x else None,
            _linear(rows.t(), x.flatten(0, -2).t()) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return large_linear(x, weight, None) if is_large(x, weight) else F.linear(x, weight)


def _times(grad_output: Tensor, weight: Tensor) -> Tensor:
    """grad_output weight, also where a vmap has batched the gradients of a graph that was made outside of it."""
    if batched_gradient(grad_output):  # a vmap that ignores the rules of Functions
        return grad_output @ weight
    if torch.is_grad_enabled() or torch.func.debug_unwrap(grad_output, recurse=False) is not grad_output:
        y: Tensor = _Times.apply(grad_output, weight)
        return y
    return _linear(grad_output, weight.t())


class _Times(torch.autograd.Function):
    """x [..., out] weight -> [..., in]. A batch over x becomes rows of one product."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight.t(), None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        if in_dims[0] is None or in_dims[1] is not None:
            return torch.func.vmap(torch.matmul, in_dims)(x, weight), 0
        return _Times.apply(x.movedim(in_dims[0], 0), weight), 0

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            _linear(grad_output, weight) if needs_x else None,
            _product_over_rows(x.flatten(0, -2), grad_output.flatten(0, -2)) if needs_weight else None,
        )

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, weight_tangent: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        parts = [] if x_tangent is None else [x_tangent @ weight]
        parts += [] if weight_tangent is None else [x @ weight_tangent]
        total: Tensor = sum(parts)
        return total


def _product_over_rows(rows: Tensor, x: Tensor) -> Tensor:
    return rows.t() @ x


class _UnreadProduct(torch.autograd.Function):
    """`_product_over_rows` as a node of the graph, without its value: NaN everywhere."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, x: Tensor) -> Tensor:
        return x.new_full((), torch.nan).expand(rows.shape[1], x.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        rows, x = ctx.saved_tensors
        return _linear(x, grad_output), _linear(rows, grad_output.t())

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError("Gradients that are never read have no values to differentiate forward.")

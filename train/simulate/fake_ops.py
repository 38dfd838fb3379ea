"""Replacements on meta for operations that communicate, or whose saved tensors meta does not know."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fnmodels.ops.moe.dispatch import combine
from fnmodels.ops.moe.experts import grouped_experts, sorted_rows
from fnmodels.ops.torch_internals import is_grouped_product
from train.parallel.mesh import Mesh

from .operations import Counter


def check_grouped(leaves: Mapping[str, Tensor], mesh: Mesh) -> None:
    """ValueError for experts that a step would not compute as a grouped product."""
    for name, leaf in leaves.items():
        width, item = leaf.shape[-1], leaf.element_size()
        if leaf.ndim == 3 and width * item % 16:
            raise ValueError(
                f"Rows of the experts' {name} are {width} elements wide (tp = {mesh.tp}), {width * item} bytes, and "
                "grouped products, which are simulated, take multiples of 16 bytes: choose another tp."
            )


class Flash(torch.autograd.Function):
    """Shapes of fused attention, and what it saves: its arguments, its result, one number per query and head."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)


class Products(TorchFunctionMode):
    """Replaces F.grouped_mm, which meta supports in one dtype only, and counts its FLOPs."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_grouped_product(func):
            self.counter.add(products=2.0 * args[0].numel() * args[1].shape[-1], number=1.0)
            return _Product.apply(*args[:2], kwargs["offs"])
        return func(*args, **(kwargs or {}))


class _Product(torch.autograd.Function):
    """Shapes of rows [N, D] times each its expert's [E, D, F], and what it saves: its arguments."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return rows.new_empty(len(rows), weight.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


def exchanged(
    ranks: int,
    leaves: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Any,
    input_weighted: bool = False,
) -> Tensor:
    """`train.parallel.expert.expert_parallel`; an exchange of equally many rows per expert is a copy."""
    here = leaves["down_proj"].shape[0]
    rows, dispatched, weights = sorted_rows(x, weights, indices, valid, ranks * here, input_weighted)
    got = rows.clone()
    expert = indices.new_empty(len(got), 1)
    ones, real = got.new_ones(len(got), 1), torch.ones(len(got), dtype=torch.bool, device=got.device)
    return combine(grouped_experts(leaves, got, ones, expert, real, act=act).clone(), dispatched, weights)

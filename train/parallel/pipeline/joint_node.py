"""Routes all parameters of a layer through one autograd node, for schedules that split the backward pass.

The weight half of a split backward (torch 2.13) traverses the graph again for each parameter by itself, and frees what
it has passed. Parameters whose paths meet, in a collective or in a head that reads several, would find nodes freed by
another one's traversal; parameters behind one node are traversed together.
"""

from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree


def together(values: Tree) -> Tree:
    """The same tree; all tensors that require a gradient have one common autograd node."""
    found = iter(_Together.apply(*(leaf for leaf in tree.leaves(values) if leaf.requires_grad)))
    return tree.map(lambda leaf: next(found) if leaf.requires_grad else leaf, values)


class _Together(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(tangent.view_as(tangent) for tangent in tangents)

"""Leaves from one node of the graph, for schedules that split the backward pass.

These (torch 2.13) go through it once more for weights, for each leaf by itself, and free what they have passed. Leaves
that meet on the way, in a message or in a head that reads several, would find their way through others' nodes gone;
those of one node are taken together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.options import Block
from fnmodels.tree import Tree


def together(values: Tree) -> Tree:
    """The same leaves; those that need a gradient have the same node behind them."""
    found = iter(_Together.apply(*(leaf for leaf in tree.leaves(values) if leaf.requires_grad)))
    return tree.map(lambda leaf: next(found) if leaf.requires_grad else leaf, values)


def as_one(block: Block) -> Block:
    """A `layer_fn`: the block with the leaves of its layer taken `together`."""
    return lambda layer, *args, **more: block(together(layer), *args, **more)


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

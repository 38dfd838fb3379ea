"""Model merging: params trees of one config as points that are added, interpolated or elected between."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree


def merge_linear(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """The weighted sum of models, sum_i weights[i] * trees[i].

    Args:
        trees: Parameters of one structure.
        weights: A number for each; those that sum to 1 average.

    Returns:
        The tree.

    Raises:
        ValueError: The number of weights differs, or the structures do.
    """
    _check_one_per_tree(trees, weights)
    return tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *trees)


def merge_task_arithmetic(base: Tree, tuned: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """Task arithmetic (arXiv 2212.04089): base + sum_i weights[i] * (tuned[i] - base).

    Args:
        base: The parameters that all were tuned from.
        tuned: The tuned parameters.
        weights: A number for each; a negative weight removes a task.

    Returns:
        The tree.
    """
    return merge_linear([base, *tuned], [1 - sum(weights), *weights])


def merge_slerp(one: Tree, other: Tree, fraction: float) -> Tree:
    """Spherical interpolation of two models leaf by leaf; linear for (anti)parallel leaves.

    Args:
        one: The parameters at fraction 0.
        other: The parameters at fraction 1.
        fraction: From 0 to 1.

    Returns:
        The tree.
    """

    def interpolate(a: Tensor, b: Tensor) -> Tensor:
        x, y = (leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in (a, b))  # lengths overflow fp16
        lengths = x.norm() * y.norm()
        angle = torch.acos((torch.dot(x.flatten(), y.flatten()) / lengths).clamp(-1, 1))
        if lengths == 0 or torch.sin(angle) < 1e-6:
            return torch.lerp(x, y, fraction).to(a.dtype)
        mixed = (torch.sin((1 - fraction) * angle) * x + torch.sin(fraction * angle) * y) / torch.sin(angle)
        return mixed.to(a.dtype)

    return tree.map(interpolate, one, other)


def merge_ties(base: Tree, tuned: Sequence[Tree], *, density: float) -> Tree:
    """TIES (arXiv 2306.01708): trims each task's change, elects a sign per element, averages the changes that agree.

    Args:
        base: The parameters that all were tuned from.
        tuned: The tuned parameters.
        density: The fraction of each leaf's elements, the largest by magnitude, that a change keeps, above 0 and at
            most 1.

    Returns:
        The tree.

    Raises:
        ValueError: The density is out of range, or the structures differ.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, not {density}.")

    def merged(start: Tensor, *ends: Tensor) -> Tensor:
        changes = torch.stack([_trimmed(end - start, density) for end in ends])
        agrees = (changes.sign() == changes.sum(0).sign()) & (changes != 0)
        mean = (changes * agrees).sum(0) / agrees.sum(0).clamp(min=1)
        return start + mean

    return tree.map(merged, base, *tuned)


def _trimmed(change: Tensor, density: float) -> Tensor:
    """`change` with all but its largest elements set to 0."""
    kept = change.abs().flatten().topk(max(1, round(density * change.numel()))).indices
    trimmed = torch.zeros_like(change).flatten()
    return trimmed.index_copy(0, kept, change.flatten()[kept]).view(change.shape)


def _check_one_per_tree(trees: Sequence[Tree], weights: Sequence[float]) -> None:
    if len(trees) != len(weights) or not trees:
        raise ValueError(f"Each tree takes one weight: there are {len(trees)} trees and {len(weights)} weights.")

"""Trees of tensors as vectors: inner products, sums, stacks for vmap, and one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .mapping import map, map_with_path
from .nodes import Tree
from .paths import leaves


def vdot(one: Tree, other: Tree) -> torch.Tensor:
    """The inner product of two trees of real tensors: the sum over all elements of their products.

    Args:
        one: A tree of tensors.
        other: A tree of the same structure and shapes.

    Returns:
        A 0-d tensor.

    Raises:
        ValueError: The structures or shapes differ, or there are no leaves.
    """
    products: list[torch.Tensor] = []

    def add(path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        if x.shape != y.shape:
            raise ValueError(
                f"The leaves at {path!r} have shapes {list(x.shape)} and {list(y.shape)}, which must agree."
            )
        products.append(torch.dot(x.reshape(-1), y.reshape(-1)))

    map_with_path(add, one, other)
    if not products:
        raise ValueError("The inner product of trees without leaves has no dtype: pass trees of tensors.")
    return torch.stack(products).sum()


def axpy(scale: float | torch.Tensor, x: Tree, y: Tree) -> Tree:
    """scale * x + y, leaf by leaf.

    Args:
        scale: A number or a 0-d tensor.
        x: A tree of tensors.
        y: A tree of the same structure.

    Returns:
        The tree of sums.
    """
    return map(lambda a, b: scale * a + b, x, y)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stacks trees for vmap.

    Args:
        trees: n trees of one structure.

    Returns:
        A tree whose leaves [n, *shape] hold those of the trees.

    Raises:
        ValueError: There is no tree, or the structures differ.
    """
    if not trees:
        raise ValueError("stack takes at least one tree; there are none.")
    return map(lambda *leaves: torch.stack(leaves), *trees)


def unstack(stacked: Tree) -> list[Tree]:
    """The trees of `stack`, as views.

    Args:
        stacked: A tree of leaves [n, *shape].

    Returns:
        n trees.

    Raises:
        ValueError: The leaves do not agree on n.
    """
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves(stacked)}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(f"All leaves must have one size in dimension 0; the sizes are {sorted(sizes, key=str)}.")
    return [map(lambda leaf, i=i: leaf[i], stacked) for i in range(sizes.pop() or 0)]


def ravel(tree: Tree) -> tuple[torch.Tensor, Callable[[torch.Tensor], Tree]]:
    """All elements of a tree as one vector, in the order of `flatten`.

    Args:
        tree: A tree of tensors of one dtype.

    Returns:
        The vector [n], and its inverse, vector [n] -> tree. The inverse keeps the vector's dtype, returns views of it,
        and raises ValueError for a vector of another size.

    Raises:
        ValueError: Leaves have several dtypes, or there are none.
    """
    parts = leaves(tree)
    if len({leaf.dtype for leaf in parts}) != 1:
        names = sorted({str(leaf.dtype) for leaf in parts})
        raise ValueError(f"A vector has one dtype; the leaves have {names or 'none, for there are no leaves'}.")
    total = sum(leaf.numel() for leaf in parts)

    def inverse(vector: torch.Tensor) -> Tree:
        if vector.shape != (total,):
            raise ValueError(
                f"The vector must be [{total}], the number of elements of the tree; it is {list(vector.shape)}."
            )
        pieces = iter(vector.split([leaf.numel() for leaf in parts]))
        return map(lambda leaf: next(pieces).view(leaf.shape), tree)

    return torch.cat([leaf.reshape(-1) for leaf in parts]), inverse

"""`map` over the leaves of one tree, or of several with the same structure."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from .nodes import Tree, node_fields
from .paths import LEAVES, PLAIN, flatten


def map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """The tree of function(leaf, *leaves of rest); None is an empty subtree.

    Args:
        function: Called for each leaf.
        tree: The tree whose structure the result has.
        *rest: Trees of the same structure.

    Returns:
        The tree of results.

    Raises:
        ValueError: The structures differ.
    """
    return _map(function, tree, rest, ()) if rest else _map_one(function, tree)


# Both run over every parameter in every step. A tree alone cannot differ from another, and paths are only formatted for
# an error. Entries of dicts that are all tensors need no step of Python each.
def _map_one(function: Callable[[Any], Any], tree: Tree) -> Tree:
    if isinstance(tree, LEAVES):
        return function(tree)
    if isinstance(tree, dict):
        if PLAIN.issuperset(builtins.map(type, tree.values())):
            entries = dict(zip(tree, builtins.map(function, tree.values()), strict=True))
        else:
            entries = {key: _map_one(function, value) for key, value in tree.items()}
        return tree.with_entries(entries) if hasattr(tree, "with_entries") else entries
    if isinstance(tree, list):
        return [_map_one(function, value) for value in tree]
    if isinstance(tree, tuple):
        values = [_map_one(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if tree is None:
        return None
    if (fields := node_fields(tree)) is not None:
        return dataclasses.replace(tree, **{n: _map_one(function, getattr(tree, n)) for n in fields[0]})
    return function(tree)


def filler(tree: Tree) -> Callable[[Iterator[Any]], Tree]:
    """Makes a function that makes the same tree of other leaves, with a step of Python per container.

    Args:
        tree: The tree whose structure its results have.

    Returns:
        A function of an iterator over leaves, which takes as many as the tree has, in the order of `leaves`.
    """
    if isinstance(tree, dict) and not hasattr(tree, "with_entries"):
        keys = tuple(tree)
        if PLAIN.issuperset(builtins.map(type, tree.values())):
            return lambda leaves: dict(zip(keys, leaves, strict=False))  # takes no leaf more than there are keys
        parts = {key: filler(value) for key, value in tree.items()}
        return lambda leaves: {key: part(leaves) for key, part in parts.items()}
    if isinstance(tree, list):
        entries = [filler(value) for value in tree]
        return lambda leaves: [entry(leaves) for entry in entries]
    return next if type(tree) in PLAIN else lambda leaves: map(lambda _: next(leaves), tree)


def _map(function: Callable[..., Any], tree: Tree, rest: tuple[Tree, ...], path: tuple[Any, ...]) -> Tree:
    if isinstance(tree, dict):
        for other in rest:
            if not isinstance(other, dict) or other.keys() != tree.keys():
                raise ValueError(_differs(path, tree, other))
        entries = {k: _map(function, v, tuple([r[k] for r in rest]), (*path, k)) for k, v in tree.items()}
        return tree.with_entries(entries) if hasattr(tree, "with_entries") else entries
    if isinstance(tree, (list, tuple)):
        for other in rest:
            if type(other) is not type(tree) or len(other) != len(tree):
                raise ValueError(_differs(path, tree, other))
        values = [_map(function, v, tuple([r[i] for r in rest]), (*path, i)) for i, v in enumerate(tree)]
        if isinstance(tree, list):
            return values
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if tree is None:
        if any(other is not None for other in rest):
            raise ValueError(_differs(path, tree, next(other for other in rest if other is not None)))
        return None
    if (fields := node_fields(tree)) is not None:
        children, context = fields
        for other in rest:
            if type(other) is not type(tree) or any(getattr(other, n) != getattr(tree, n) for n in context):
                raise ValueError(_differs(path, tree, other))
        mapped = {
            n: _map(function, getattr(tree, n), tuple([getattr(r, n) for r in rest]), (*path, n)) for n in children
        }
        return dataclasses.replace(tree, **mapped)
    return function(tree, *rest)


def _differs(path: tuple[Any, ...], tree: Tree, other: Tree) -> str:
    def describe(value: Tree) -> str:
        if isinstance(value, dict):
            return f"a dict with keys {sorted(builtins.map(str, value))}"
        if isinstance(value, (list, tuple)):
            return f"a {type(value).__name__} of {len(value)}"
        return "None" if value is None else f"a {type(value).__name__}"

    where = ".".join(builtins.map(str, path)) or "the root"
    return f"The trees differ at {where!r}: {describe(tree)} against {describe(other)}."


def map_with_path(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """The tree of function(path, leaf, *leaves of rest), with paths as in `flatten`.

    Args:
        function: Called for each leaf.
        tree: The tree whose structure the result has.
        *rest: Trees of the same structure.

    Returns:
        The tree of results.
    """
    paths = iter(flatten(tree))  # in the order in which `map` visits the leaves
    return map(lambda *leaves: function(next(paths), *leaves), tree, *rest)

"""The leaves of a tree, in order or by their dotted paths, and the tree of such paths."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .nodes import Tree, node_fields

PLAIN = frozenset((Tensor, torch.nn.Parameter))  # the types of most leaves
# Types that are never nodes: flags of parameters are found to be leaves without a look for fields, which torch.compile
# traces for tenths of a second.
LEAVES = (Tensor, bool, int, float, str)


def flatten(tree: Tree) -> dict[str, Any]:
    """The leaves by their dotted paths; None and empty containers have no leaves and are lost.

    Args:
        tree: A tree.

    Returns:
        {path: leaf}, in the order of the tree.
    """
    flat: dict[str, Any] = {}
    _walk(tree, "", flat)
    return flat


def _walk(tree: Tree, path: str, into: dict[str, Any]) -> None:
    if isinstance(tree, LEAVES):
        into[path] = tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str) or "." in key or not key:
                raise ValueError(f"The key {key!r} at {path or 'the root'!r} must be a non-empty string without a dot.")
            if isinstance(value, LEAVES):  # which needs no call of its own
                into[f"{path}.{key}" if path else key] = value
            else:
                _walk(value, f"{path}.{key}" if path else key, into)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            _walk(value, f"{path}.{index}" if path else str(index), into)
    elif tree is None:
        return
    elif (fields := node_fields(tree)) is not None:
        for name in fields[0]:
            _walk(getattr(tree, name), f"{path}.{name}" if path else name, into)
    else:
        into[path] = tree


def leaves(tree: Tree) -> list[Any]:
    """The leaves, in the order of `flatten`.

    Args:
        tree: A tree.

    Returns:
        The list of leaves.
    """
    into: list[Any] = []
    _collect(tree, into)
    return into


def _collect(tree: Tree, into: list[Any]) -> None:
    if isinstance(tree, LEAVES):
        into.append(tree)
    elif isinstance(tree, dict):
        values = tree.values()
        if PLAIN.issuperset(map(type, values)):
            into.extend(values)
            return
        for value in values:
            _collect(value, into)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _collect(value, into)
    elif tree is None:
        return
    elif (fields := node_fields(tree)) is not None:
        for name in fields[0]:
            _collect(getattr(tree, name), into)
    else:
        into.append(tree)


def contains(tree: Tree, node: type) -> bool:
    """Whether the tree has a node of a class.

    Args:
        tree: A tree.
        node: The class.

    Returns:
        Whether there is one.
    """
    if isinstance(tree, node):
        return True
    if isinstance(tree, dict):
        return any(contains(value, node) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return any(contains(value, node) for value in tree)
    fields = node_fields(tree)
    return fields is not None and any(contains(getattr(tree, name), node) for name in fields[0])


def watch(tree: Tree) -> Callable[[], bool]:
    """Watches whether a tree keeps its containers, keys and leaves.

    Args:
        tree: A tree of which containers may be changed later.

    Returns:
        A function that returns whether the tree still has the containers, keys and leaves of this call.
    """
    nodes: list[Any] = []
    sizes: list[int] = []
    containers: list[Any] = []  # of each entry, beside its key
    keys: list[Any] = []
    entries: list[Any] = []

    def note(value: Tree) -> None:
        if isinstance(value, (dict, list)):
            nodes.append(value)
            sizes.append(len(value))
            for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                containers.append(value)
                keys.append(key)
                entries.append(entry)
                note(entry)
        elif isinstance(value, tuple):  # it cannot change, but what it holds can
            for entry in value:
                note(entry)
        elif (fields := node_fields(value)) is not None:
            for name in fields[0]:
                note(getattr(value, name))

    def unchanged() -> bool:
        try:
            found = map(operator.getitem, containers, keys)
            return [*map(len, nodes)] == sizes and all(map(operator.is_, found, entries))
        except KeyError:
            return False

    note(tree)
    return unchanged


def unflatten(flat: dict[str, Any], *, like: Tree | None = None) -> Tree:
    """Inverse of `flatten` for dicts and lists: a level whose keys are exactly 0..n-1 becomes a list.

    Args:
        flat: {dotted path: leaf}.
        like: A tree with the same paths, whose order the dicts get: torch.func.jvp takes no two trees whose dicts
            differ in order. None: that of `flat`.

    Returns:
        The tree.

    Raises:
        ValueError: The paths differ from those of `like`, or a path is a leaf and a subtree at once.
    """
    if like is not None:
        paths = flatten(like).keys()
        if different := sorted(paths ^ flat.keys()):
            where = "is only in `flat`" if different[0] in flat else "is only in `like`"
            raise ValueError(f"The path {different[0]!r} {where}, which must have the same paths.")
        flat = {path: flat[path] for path in paths}
    if set(flat) == {""}:
        return flat[""]
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"The path {path!r} goes through {part!r}, which is a leaf itself.")
        if last in node:
            raise ValueError(f"The path {path!r} is given twice, or is a leaf and a subtree at once.")
        node[last] = _Leaf(leaf)
    return _listify(root)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Wraps leaves while building, so that a leaf which is a dict is not mistaken for a level."""

    value: Any


def _listify(node: Any) -> Tree:
    if isinstance(node, _Leaf):
        return node.value
    built = {key: _listify(value) for key, value in node.items()}
    if built and set(built) == {str(i) for i in range(len(built))}:
        return [built[str(i)] for i in range(len(built))]
    return built

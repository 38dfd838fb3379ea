"""Pytrees of tensors: nested dicts, lists, tuples, None and frozen dataclasses, with dotted paths as leaf names.

`torch.utils._pytree` takes eight times as long over 300 leaves, and it keeps dict insertion order, so that two equal
trees built in another order are zipped wrongly. Here `map` matches the entries of dicts by key.
"""

from __future__ import annotations

import builtins
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.utils import _pytree

Tree = Any
_T = TypeVar("_T")
_D = TypeVar("_D", bound="WithEntries")

_NODES: dict[type, tuple[list[str], list[str]]] = {}  # the names of a node's children and of its static fields


def static(**kwargs: Any) -> Any:
    """A dataclass field that is static, hashable context (a rule, a size), not a child of the tree.

    Args:
        **kwargs: Those of `dataclasses.field`, such as default.

    Returns:
        The field.
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


class WithEntries(Protocol):
    """A dict that carries something beside its entries, which `map` and torch's pytrees hand on.

    It has `values()`, and `with_entries(entries)`, which returns the same with other entries.
    """

    def values(self) -> Any: ...
    def __iter__(self) -> Iterator[str]: ...
    def with_entries(self, entries: dict[str, Any], /) -> Any: ...


def pytree(cls: type[_T]) -> type[_T]:
    """Class decorator: registers a frozen dataclass as a node here and in torch's pytrees (vmap, export, pipelining).

    Args:
        cls: The dataclass.

    Returns:
        The same class.
    """
    children, context = _NODES[cls] = _fields(cls)

    # An absent child (None) goes to the context: vmap with in_dims=0 would refuse it as a leaf that is no tensor.
    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        present = [name for name in children if getattr(node, name) is not None]
        statics = tuple((name, getattr(node, name)) for name in context)
        return [(_pytree.GetAttrKey(name), getattr(node, name)) for name in present], (tuple(present), statics)

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        keyed, extra = flatten_with_keys(node)
        return [value for _, value in keyed], extra

    def unflatten(values: Any, extra: tuple[Any, ...]) -> Any:
        present, statics = extra
        return cls(**(dict.fromkeys(children) | dict(zip(present, values, strict=True)) | dict(statics)))

    # The public torch.export.register_dataclass does not support static fields.
    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=_to_json,
        from_dumpable_context=_from_json,
    )
    return cls


def pytree_dict(cls: type[_D]) -> type[_D]:
    """Class decorator: a dict with a method `with_entries` becomes a node of torch's pytrees.

    Args:
        cls: The subclass of dict.

    Returns:
        The same class.
    """

    def unflatten(values: Any, context: tuple[tuple[str, ...], _D]) -> Any:
        names, like = context
        return like.with_entries(dict(zip(names, values, strict=True)))

    def flatten(node: _D) -> tuple[list[Any], tuple[tuple[str, ...], _D]]:
        return list(node.values()), (tuple(node), node.with_entries({}))

    _pytree.register_pytree_node(cls, flatten, unflatten)
    return cls


def _to_json(value: Any) -> Any:
    """Static context as JSON for torch.export.save: numbers, strings, None, tuples and frozen dataclasses of these."""
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"module": type(value).__module__, "class": type(value).__qualname__, "fields": fields}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        # Only classes that are imported already: a file must not decide what gets imported.
        cls = getattr(sys.modules.get(str(value["module"])), value["class"], None)
        if not dataclasses.is_dataclass(cls) or not isinstance(cls, type):
            raise ValueError(f"{value['module']}.{value['class']} is no dataclass that is imported here.")
        return cls(**{name: _from_json(item) for name, item in value["fields"].items()})
    return value


def _fields(node: Any) -> tuple[list[str], list[str]]:
    children: list[str] = []
    context: list[str] = []
    for field in dataclasses.fields(node):
        (context if field.metadata.get("static") else children).append(field.name)
    return children, context


def _node(tree: Tree) -> tuple[list[str], list[str]] | None:
    """The fields of a node of this tree, None for a leaf."""
    if isinstance(tree, torch.Tensor) or tree is None or isinstance(tree, type):
        return None  # None before is_dataclass: torch 2.11 cannot trace it
    kind = type(tree)
    if kind in _NODES:
        return _NODES[kind]
    return _fields(tree) if dataclasses.is_dataclass(tree) and kind in _pytree.SUPPORTED_NODES else None


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
# an error.
def _map_one(function: Callable[[Any], Any], tree: Tree) -> Tree:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        entries = {key: _map_one(function, value) for key, value in tree.items()}
        return tree.with_entries(entries) if hasattr(tree, "with_entries") else entries
    if isinstance(tree, list):
        return [_map_one(function, value) for value in tree]
    if isinstance(tree, tuple):
        values = [_map_one(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if tree is None:
        return None
    if (fields := _node(tree)) is not None:
        return dataclasses.replace(tree, **{n: _map_one(function, getattr(tree, n)) for n in fields[0]})
    return function(tree)


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
    if (fields := _node(tree)) is not None:
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


def _walk(tree: Tree, path: str, into: dict[str, Any]) -> None:
    if isinstance(tree, torch.Tensor):
        into[path] = tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str) or "." in key or not key:
                raise ValueError(f"The key {key!r} at {path or 'the root'!r} must be a non-empty string without a dot.")
            _walk(value, f"{path}.{key}" if path else key, into)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            _walk(value, f"{path}.{index}" if path else str(index), into)
    elif tree is None:
        return
    elif (fields := _node(tree)) is not None:
        for name in fields[0]:
            _walk(getattr(tree, name), f"{path}.{name}" if path else name, into)
    else:
        into[path] = tree


def structure(tree: Tree) -> Any:
    """All of a tree but its leaves, comparable: containers, keys and static fields.

    Args:
        tree: A tree.

    Returns:
        An object with == and a hash.
    """
    return _pytree.tree_structure(tree)


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
    fields = _node(tree)
    return fields is not None and any(contains(getattr(tree, name), node) for name in fields[0])


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
    if isinstance(tree, torch.Tensor):
        into.append(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            _collect(value, into)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _collect(value, into)
    elif tree is None:
        return
    elif (fields := _node(tree)) is not None:
        for name in fields[0]:
            _collect(getattr(tree, name), into)
    else:
        into.append(tree)


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
        elif (fields := _node(value)) is not None:
            for name in fields[0]:
                note(getattr(value, name))

    def unchanged() -> bool:
        try:
            found = builtins.map(operator.getitem, containers, keys)
            return [*builtins.map(len, nodes)] == sizes and all(builtins.map(operator.is_, found, entries))
        except KeyError:
            return False

    note(tree)
    return unchanged


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

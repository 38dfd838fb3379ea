"""Nodes of trees: frozen dataclasses and dicts that are registered here and in torch's pytrees."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
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


def node_fields(tree: Tree) -> tuple[list[str], list[str]] | None:
    """The fields of a node of this tree, None for a leaf."""
    if isinstance(tree, torch.Tensor) or tree is None or isinstance(tree, type):
        return None  # None before is_dataclass: torch 2.11 cannot trace it
    kind = type(tree)
    if kind in _NODES:
        return _NODES[kind]
    return _fields(tree) if dataclasses.is_dataclass(tree) and kind in _pytree.SUPPORTED_NODES else None


def structure(tree: Tree) -> Any:
    """All of a tree but its leaves, comparable: containers, keys and static fields.

    Args:
        tree: A tree.

    Returns:
        An object with == and a hash.
    """
    return _pytree.tree_structure(tree)

"""Pytrees of tensors: nested dicts, lists, tuples, None and frozen dataclasses, with dotted paths as leaf names.

`torch.utils._pytree` takes eight times as long over 300 leaves, and it keeps dict insertion order, so that two equal
trees built in another order are zipped wrongly. Here `map` matches the entries of dicts by key.
"""

from .algebra import axpy, ravel, stack, unstack, vdot
from .mapping import map, map_with_path
from .nodes import Tree as Tree
from .nodes import WithEntries, pytree, pytree_dict, static, structure
from .paths import contains, flatten, leaves, unflatten, watch

__all__ = [
    "WithEntries",
    "axpy",
    "contains",
    "flatten",
    "leaves",
    "map",
    "map_with_path",
    "pytree",
    "pytree_dict",
    "ravel",
    "stack",
    "static",
    "structure",
    "unflatten",
    "unstack",
    "vdot",
    "watch",
]

"""Parameters under the names and in the layout of Hugging Face, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError
from fnmodels.models.common.storage import join
from fnmodels.tree import Tree
from params.io.safetensors_file import NAMES, LazyTensor

from .shard_index import as_lines
from .tensor_map import Piece, by_name, dtype_class, duplicate_names, stored_leaves


def export(config: Any, params: Tree, fetch: Callable[[str], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, tensor) of everything that a checkpoint of `config` holds: the inverse of `load_pretrained`.

    For handing new weights to an inference engine. A tensor on disk that is a leaf is that leaf, detached and not
    copied; one that several leaves make up, or that lies transposed, is made when its turn comes. A tied head is not
    there twice; what a family's files hold twice is. MismatchError names every leaf that is not what `config` calls
    for, before the first is handed out.

    fetch: makes a leaf of its path, where params says shapes and dtypes alone (on meta), for leaves that lie in parts.
    It is called when a tensor's turn comes, in the order of the spec, and what it makes is kept for the next tensor.
    """
    tensors = lazy_tensors(config, params, fetch)
    return ((name, tensor.make()) for name, tensor in tensors.items())


def lazy_tensors(config: Any, params: Tree, fetch: Callable[[str], Tensor] | None = None) -> dict[str, LazyTensor]:
    """{name on disk: what it will be}, in the order of the spec. Errors as of `export`."""
    flat = tree.flatten(params)
    _check(config, flat, meta=fetch is not None)
    values = (lambda _: flat) if fetch is None else _Fetched(fetch)
    tensors = {name: _outgoing(parts, flat, values) for name, parts in by_name(stored_leaves(config)).items()}
    return tensors | {copy: tensors[name] for copy, name in duplicate_names(config).items()}


class _Fetched:
    """The leaves that one tensor on disk is made of, with what the one before it has left of them."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        self.fetch = fetch
        self.held: dict[str, Tensor] = {}

    def __call__(self, parts: list[Piece]) -> dict[str, Tensor]:
        paths = dict.fromkeys(part.path for part in parts)
        self.held = {path: self.held[path] for path in paths if path in self.held}
        for path in paths:
            if path not in self.held:
                self.held[path] = self.fetch(path)
        return self.held


def _outgoing(
    parts: list[Piece], flat: dict[str, Tensor], values: Callable[[list[Piece]], dict[str, Tensor]]
) -> LazyTensor:
    """A tensor of the file; parts of one are joined when it is written, not before."""

    def make() -> Tensor:
        here = values(parts)
        return join((part.stored, part.value(here).detach()) for part in parts)

    return LazyTensor(flat[parts[0].path].dtype, parts[0].disk_shape, make)


def _check(config: Any, flat: dict[str, Any], *, meta: bool) -> None:
    parameters = stored_leaves(config)
    leaves = {parameter.path: parameter.leaf for parameter in parameters}
    faults = [f"{path}: missing; expected {list(leaf.shape)}" for path, leaf in leaves.items() if path not in flat]
    for path, value in flat.items():
        if path not in leaves:
            faults.append(f"{path}: unexpected")
        elif not isinstance(value, Tensor):
            faults.append(f"{path}: a {type(value).__name__}, not a tensor")
        elif value.shape != leaves[path].shape:
            faults.append(f"{path}: expected {list(leaves[path].shape)}, found {list(value.shape)}")
        elif dtype_class(value.dtype) != dtype_class(leaves[path].dtype) or value.dtype not in NAMES:
            faults.append(f"{path}: expected a {dtype_class(leaves[path].dtype)} dtype, found {value.dtype}")
        elif value.is_meta and not meta:
            faults.append(f"{path}: on the meta device, so there is nothing to save")
    for name, parts in by_name(parameters).items():
        dtypes = {value.dtype for part in parts if isinstance(value := flat.get(part.path), Tensor)}
        if len(dtypes) > 1:
            listing = ", ".join(part.path for part in parts)
            faults.append(f"{listing}: must have one dtype, for they are one tensor {name} on disk")
    if faults:
        raise MismatchError(
            f"The params are not those that the config calls for ({len(faults)} differences):{as_lines(faults)}"
        )

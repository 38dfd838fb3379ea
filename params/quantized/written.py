"""The tensors of a file for kept weights: those that were read, with their names, shapes and order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError
from fnmodels.models.common.storage import Single, TensorSlice, disk_name
from fnmodels.tree import Tree
from params.io.safetensors_file import LazyTensor

from .declared import Declaration
from .form import Axis, Part
from .kept import KeptWeight


def by_path(params: Tree) -> dict[str, Any]:
    """{path: leaf}, of which a kept weight is one."""
    return dict(_leaves(params, ""))


def _leaves(node: Tree, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, (KeptWeight, Tensor)):
        yield path, node
    else:
        yield from ((f"{path}.{inner}" if inner else path, leaf) for inner, leaf in tree.flatten(node).items())


def declaration_of(leaves: Mapping[str, Any]) -> Declaration | None:
    """The declaration of the kept weights among leaves; None without any. MismatchError for those of several files."""
    declared = {leaf.origin.declaration for leaf in leaves.values() if isinstance(leaf, KeptWeight) and leaf.origin}
    if len(declared) > 1:
        raise MismatchError("The kept weights are of files that are quantized in different ways; dequantize some.")
    return declared.pop() if declared else None


def expert(weight: KeptWeight, index: int) -> KeptWeight:
    """One expert's weight, of those that have tensors of their own."""
    return replace(weight.unbind()[index], beside=(weight.beside[index],))


def file_tensors(slices: Sequence[tuple[Single, KeptWeight]]) -> dict[str, LazyTensor]:
    """{name: tensor in the file} of one weight, or of several that are rows of one.

    MismatchError where they are not in the same form.
    """
    weight, name = slices[0][1], disk_name(slices[0][0])
    origin, form = weight.origin, weight.form
    if origin is None:
        raise MismatchError(
            f"{name} is kept over a mesh or as a GGUF file has it, and its form is not written then: params.dequantize "
            "makes it plain."
        )
    if any(other.form != form or other.origin != origin for _, other in slices):
        raise MismatchError(f"{name} is one tensor in the file, and its parts are kept in different forms.")
    module, shapes = name.rpartition(".")[0] + ".", dict(origin.shapes)
    stem = name.removesuffix(form.weight) if form.weight else name
    tensors: dict[str, LazyTensor] = {}
    for index, (part, row_axes, _) in enumerate(form.parts()):
        full = stem + part.ending
        shape = shapes.get(full.removeprefix(module))
        if weight.parts[index] is None or shape is None:  # a number in the description
            continue
        stored = [(single, kept.parts[index]) for single, kept in slices]
        tensors[full] = LazyTensor(weight.parts[index].dtype, shape, _Joined(part, row_axes, stored, shape))
    for inner, tensor in zip(origin.beside, weight.beside[0], strict=True):
        tensors[module + inner] = LazyTensor(tensor.dtype, tuple(tensor.shape), tensor.clone)
    return tensors


class _Joined:
    """Makes a part in the file from those of the weights that are its rows."""

    def __init__(
        self, part: Part, axes: tuple[Axis, ...], stored: list[tuple[Single, Tensor]], shape: tuple[int, ...]
    ) -> None:
        self.part, self.axes, self.stored, self.shape = part, axes, stored, shape

    def __call__(self) -> Tensor:
        (first, tensor), *others = self.stored
        if not others:
            return tensor.reshape(self.shape)
        if any(axis.elements == 0 for axis in self.axes):
            if any(not torch.equal(tensor, other) for _, other in others):
                raise MismatchError(
                    f"{disk_name(first)}: its rows have one scale in the file, and different ones here."
                )
            return tensor.reshape(self.shape)
        pieces = sorted(
            ((single, t) for single, t in self.stored if isinstance(single, TensorSlice)), key=lambda p: p[0].start
        )
        turned = [t.mT if self.part.inputs_first else t for _, t in pieces]
        rows = torch.cat([t.unflatten(-2, (pieces[0][0].groups, -1)) for t in turned], -2).flatten(-3, -2)
        return (rows.mT if self.part.inputs_first else rows).reshape(self.shape)

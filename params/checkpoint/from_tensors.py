"""Params from tensors under Hugging Face names that are in memory: the inverse of `export`."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.storage import extract_parameter
from fnmodels.tree import Tree

from .shard_index import as_lines
from .tensor_map import (
    Piece,
    by_name,
    dtype_class,
    is_leftover,
    missing_prefix,
    published_names,
    stored_leaves,
    tied_names,
)
from .value_checks import refuse_unknown_experts


def from_tensors(config: DecoderConfig, tensors: Iterable[tuple[str, Tensor]]) -> Tree:
    """The parameters from pairs of names on disk and tensors, the inverse of `export`.

    A model of transformers in memory: `revert_weight_conversion(model, model.state_dict()).items()`, which
    transformers.core_model_loading has; without it where the names alone are others, as in most vision-language models.

    Args:
        config: The model's config.
        tensors: (name on disk, tensor). Tied heads and duplicates may be there or not, and must equal their original.

    Returns:
        The tree. A leaf that is one tensor, or rows of a fused one, is a detached view of it, not a copy; stacked
        experts are copied.

    Raises:
        MismatchError: It lists every tensor that is missing, unexpected, repeated, or of another shape or kind of
            dtype, or every one that names an expert which the model has not.
    """
    by_disk_name: dict[str, Tensor] = {}
    faults: list[str] = []
    for name, tensor in tensors:
        if name in by_disk_name:
            faults.append(f"{name}: given twice")
        by_disk_name[name] = tensor.detach()
    parameters = stored_leaves(config)
    prefix = missing_prefix(parameters, by_disk_name)
    parameters, tied = stored_leaves(config, prefix), tied_names(config, prefix)
    expected = by_name(parameters)
    by_disk_name = dict(
        zip(published_names(config, {*expected, *tied}, by_disk_name, prefix), by_disk_name.values(), strict=True)
    )
    for name, pieces in expected.items():
        faults += _faults(name, pieces[0], by_disk_name) if name in by_disk_name else [f"{name}: missing"]
    unexpected = [name for name in by_disk_name if name not in expected and name not in tied]
    unexpected = [name for name in unexpected if not is_leftover(config, prefix + name)]
    faults += [f"{name}: unexpected, {list(by_disk_name[name].shape)}" for name in unexpected]
    for name, original in tied.items():
        if name in by_disk_name and original in by_disk_name and not _same(by_disk_name[name], by_disk_name[original]):
            faults.append(f"{name}: differs from {original}, but by the config they are one tensor")
    if faults:
        hint = (
            " (A model of transformers may have other names in memory than in files, and experts in one tensor: "
            "transformers.core_model_loading.revert_weight_conversion(model, model.state_dict()) has those of files.)"
        )
        raise MismatchError(
            f"The tensors are not those that the config calls for ({len(faults)} differences):{as_lines(faults)}"
            + (hint if unexpected and expected.keys() - by_disk_name.keys() else "")
        )
    flat = {leaf.path: extract_parameter(leaf.stored, by_disk_name) for leaf in parameters}
    refuse_unknown_experts("The tensors", parameters, flat)
    return tree.unflatten(flat)


def _faults(name: str, piece: Piece, found: dict[str, Tensor]) -> list[str]:
    tensor, expected = found[name], piece.dtype_class
    faults = []
    if tuple(tensor.shape) != piece.disk_shape:
        faults.append(f"{name}: expected {list(piece.disk_shape)}, found {list(tensor.shape)}")
    if dtype_class(tensor.dtype) != expected:
        faults.append(f"{name}: expected a {expected} dtype, found {tensor.dtype}")
    return faults


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, without reading them where they are one."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

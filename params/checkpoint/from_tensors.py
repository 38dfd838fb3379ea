"""Params from tensors under Hugging Face names that are in memory: the inverse of `export`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.storage import disk_names, extract_parameter
from fnmodels.tree import Tree

from .module_names import module_names
from .shard_index import as_lines
from .tensor_map import (
    Piece,
    StoredLeaf,
    by_name,
    dtype_class,
    is_leftover,
    missing_prefix,
    published_names,
    stored_leaves,
    tied_names,
    unread_part,
    untied_config,
)
from .value_checks import is_as_stated, refuse_wrong_numbers


def from_tensors(config: DecoderConfig, tensors: Iterable[tuple[str, Tensor]]) -> Tree:
    """The parameters from pairs of names on disk and tensors, the inverse of `export`.

    A model of transformers in memory: `model.state_dict().items()`, with experts that are stacked there and rows in
    the order that its modules have. Where it holds what is not read (LongCat-Flash, Inkling 2), or names are those of
    another release, transformers.core_model_loading has `revert_weight_conversion(model, model.state_dict()).items()`,
    the tensors of files.

    Args:
        config: The model's config.
        tensors: (name on disk or in memory, tensor). Tied heads and duplicates may be there or not, and must equal
            their original.

    Returns:
        The tree. A leaf that is one tensor, or rows of a fused one, is a detached view of it, not a copy; stacked
        experts are copied.

    Raises:
        MismatchError: It lists every tensor that is missing, unexpected, repeated, or of another shape or kind of
            dtype, or every table of numbers, such as those of experts, with one that the model has not.
        ValueError: An argument is a dict, or both are in the other order.
    """
    if isinstance(config, Mapping) or isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
        kinds = f"a {type(config).__name__} and a {type(tensors).__name__}"
        raise ValueError(f"The arguments are {kinds}; they must be a Config and pairs: state_dict.items().")
    given: dict[str, Tensor] = {}
    twice: list[str] = []
    for name, tensor in tensors:
        if name in given:
            twice.append(f"{name}: given twice")
        given[name] = tensor.detach()
    form = _of_files(config, given)
    if faults := _differences(config, form):
        in_memory = _of_memory(config, given)
        others = _differences(config, in_memory)
        form, faults = (in_memory, others) if len(others) < len(faults) else (form, faults)
    if faults := twice + faults:
        hint = (
            " (A model of transformers may have other names in memory than in files, and experts in one tensor: "
            "transformers.core_model_loading.revert_weight_conversion(model, model.state_dict()) has those of files.)"
        )
        renamed = any(fault.endswith(": missing") for fault in faults) and any(": unexpected" in f for f in faults)
        raise MismatchError(
            f"The tensors are not those that the config calls for ({len(faults)} differences):{as_lines(faults)}"
            + (hint if renamed else "")
        )
    flat = {leaf.path: extract_parameter(leaf.stored, form.tensors) for leaf in form.parameters}
    refuse_wrong_numbers("The tensors", form.parameters, flat)
    return tree.unflatten(flat)


@dataclass(frozen=True)
class _Form:
    """Tensors by one way of naming them: that of files, or that of a model of transformers in memory.

    parameters: with their places there. tensors: by these names. tied: {name of a redundant one: its original}.
    prefix: what files name before them, see `missing_prefix`.
    """

    parameters: tuple[StoredLeaf, ...]
    tensors: dict[str, Tensor]
    tied: dict[str, str]
    prefix: str = ""


def _of_files(config: DecoderConfig, given: dict[str, Tensor]) -> _Form:
    prefix = missing_prefix(stored_leaves(config), given)
    parameters = stored_leaves(config, prefix)
    tied = tied_names(config, prefix) | _tied_in_memory(config)
    names = published_names(config, {*by_name(parameters), *tied}, given, prefix)
    return _Form(parameters, dict(zip(names, given.values(), strict=True)), tied, prefix)


def _of_memory(config: DecoderConfig, given: dict[str, Tensor]) -> _Form:
    names = module_names(config)
    prefix = missing_prefix(stored_leaves(config, "", names), given)
    return _Form(stored_leaves(config, prefix, names), given, tied_names(config) | _tied_in_memory(config), prefix)


def _differences(config: DecoderConfig, form: _Form) -> list[str]:
    """What is missing, of another shape, unexpected, or differs from what it repeats."""
    found, expected, faults = form.tensors, by_name(form.parameters), list[str]()
    for name, pieces in expected.items():
        faults += _faults(name, pieces[0], found) if name in found else [f"{name}: missing"]
    unexpected = [name for name in found if name not in expected and name not in form.tied]
    for name in unexpected:
        part = unread_part(config, form.prefix + name)
        if part is not None:
            faults.append(f"{name}: of the part {part!r}, which is not read; leave it out")
        elif not is_leftover(config, form.prefix + name):
            faults.append(f"{name}: unexpected, {list(found[name].shape)}")
        elif not is_as_stated(config, form.prefix + name, found[name]):
            faults.append(f"{name}: does not hold the values that follow from the config")
    for name, original in form.tied.items():
        if name in found and original in found and not _same(found[name], found[original]):
            faults.append(f"{name}: differs from {original}, but by the config they are one tensor")
    return faults


def _tied_in_memory(config: DecoderConfig) -> dict[str, str]:
    """{name of a tied head in memory: that of the embedding}; {} where the config does not tie them."""
    untied, at = untied_config(config)
    names = module_names(untied) if untied != config else {}
    if not names.keys() >= {f"{at}lm_head", f"{at}embed_tokens"}:
        return {}
    (head,), (embedding,) = (disk_names(names[f"{at}{name}"]) for name in ("lm_head", "embed_tokens"))
    return {head: embedding}


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

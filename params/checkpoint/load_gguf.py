"""Loading a GGUF file as (config, params): tensors dequantized to plain leaves, or linear weights kept in blocks."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import CheckpointError, MismatchError, memory_for
from fnmodels.models.common.registry import config_class, family_reading
from fnmodels.models.common.storage import Stack, TensorSlice, disk_names, extract_parameter
from fnmodels.tree import Tree
from params.gguf.architectures import architecture_of, config_values
from params.gguf.blocks import block_form, block_of, check_installed
from params.gguf.header import GgufFile
from params.gguf.parts import open_gguf
from params.gguf.tensors import Stored, blocks_of, kind_in_blocks, shape_of, stored_tensors, value_of
from params.initialize import leaf_dtype
from params.quantized.kept import KeptWeight, may_stay

from .from_tensors import from_tensors
from .shard_index import as_lines
from .tensor_map import StoredLeaf, by_name, drop_optional, stored_leaves


def is_gguf(path: Path) -> bool:
    """Whether the name is that of a GGUF file, which need not exist."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def load_gguf(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    check_finite: bool,
    keep_quantized: bool = False,
) -> tuple[Any, Tree]:
    """(config, params) of a GGUF file. Arguments as of `load_pretrained`; dtype None is fp32, which is exact."""
    check_installed()
    with ExitStack() as stack, memory_for(path):
        return read_gguf(open_gguf(path, stack), dtype, device, check_finite, keep_quantized)


def read_gguf(
    file: GgufFile,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    check_finite: bool = False,
    keep_quantized: bool = False,
) -> tuple[Any, Tree]:
    """`load_gguf` of a file whose header is checked."""
    try:
        config, stored = described(file)
        leaves = stored_leaves(config)
        kept = {leaf.path: kind for leaf in leaves if (kind := _kind_kept(leaf, file, stored)) and keep_quantized}
        blocks = {name for leaf in leaves if leaf.path in kept for name in disk_names(leaf.stored)}
        params = from_tensors(config, _tensors(file, config, stored, blocks, dtype, device, check_finite))
        flat = tree.flatten(params)
        for leaf in leaves:
            if leaf.path in kept:
                rows = {name: blocks_of(file, stored[name]) for name in disk_names(leaf.stored)}
                codes = extract_parameter(leaf.stored, rows).contiguous().to(device or "cpu")
                target = torch.float32 if dtype is None else leaf_dtype(leaf.leaf, dtype)
                flat[leaf.path] = KeptWeight((codes,), (), block_form(kept[leaf.path]), leaf.leaf.shape, target)
        return config, tree.unflatten(flat)
    except CheckpointError as error:
        if str(file.path) in str(error):  # it names the file already
            raise
        raise type(error)(f"{file.path}: {error}") from None


def described(file: GgufFile) -> tuple[Any, dict[str, Stored]]:
    """(config, the file's tensors by their Hugging Face names). MismatchError where they are not the config's."""
    values = config_values(file)
    config = config_class(family_reading(values, None)).from_hf(values)
    stored = stored_tensors(file, architecture_of(file), values)
    config, _ = drop_optional(config, (), stored)
    from_tensors(
        config,
        ((name, torch.empty(shape_of(file, stored_name), device="meta")) for name, stored_name in stored.items()),
    )
    return config, stored


def _kind_kept(leaf: StoredLeaf, file: GgufFile, stored: Mapping[str, Stored]) -> int | None:
    """The ggml type of a leaf that may stay in its blocks; None for others, of floating point too."""
    if not may_stay(leaf.path, leaf.leaf.shape) or any(name not in stored for name in disk_names(leaf.stored)):
        return None  # a tied head
    singles = leaf.stored.tensors if isinstance(leaf.stored, Stack) else (leaf.stored,)
    slices = [single for single in singles if isinstance(single, TensorSlice)]
    kinds = {kind_in_blocks(file, stored[name]) for name in disk_names(leaf.stored)}
    if len(kinds) > 1 or any(single.transposed or single.columns or single.ones or single.batched for single in slices):
        return None
    (kind,) = kinds
    return kind if kind is not None and block_of(kind)[0] > 1 else None


def _tensors(
    file: GgufFile,
    config: Any,
    stored: Mapping[str, Stored],
    kept: Collection[str],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    check_finite: bool,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the dtype and on the device asked for, those that are kept without values.

    MismatchError: one has a NaN or an infinity.
    """
    leaves = {name: pieces[0].leaf for name, pieces in by_name(stored_leaves(config)).items()}
    faults = []
    for name, source in stored.items():
        is_read = check_finite or name not in kept
        tensor = value_of(file, source) if is_read else torch.empty(shape_of(file, source), device="meta")
        target = torch.float32 if dtype is None else leaf_dtype(leaves[name], dtype)
        cast = tensor.to("meta" if name in kept else device or "cpu", target)
        if is_read and check_finite and not tensor.to(target).isfinite().all():
            faults.append(name)
        yield name, cast
    if faults:
        raise MismatchError(f"check_finite found NaN or infinities ({len(faults)} tensors):{as_lines(faults)}")

"""Loading a GGUF file as (config, params): every tensor dequantized to a plain leaf."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import CheckpointError, MismatchError, memory_for
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.registry import config_class, family_reading
from fnmodels.tree import Tree
from params.gguf.architectures import config_values, named_tensors
from params.gguf.blocks import check_installed
from params.gguf.header import GgufFile, open_gguf
from params.initialize import leaf_dtype

from .from_tensors import from_tensors
from .shard_index import as_lines
from .tensor_map import by_name, stored_leaves


def is_gguf(path: Path) -> bool:
    """Whether the name is that of a GGUF file, which need not exist."""
    return path.suffix == ".gguf" and not path.is_dir()


def load_gguf(
    path: Path, dtype: torch.dtype | None, device: torch.device | str | None, check_finite: bool
) -> tuple[Any, Tree]:
    """(config, params) of a GGUF file. Arguments as of `load_pretrained`; dtype None is fp32, which is exact."""
    check_installed()
    with ExitStack() as stack, memory_for(path):
        return read_gguf(open_gguf(path, stack), dtype, device, check_finite)


def read_gguf(
    file: GgufFile,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    check_finite: bool = False,
) -> tuple[Any, Tree]:
    """`load_gguf` of a file whose header is checked."""
    values = config_values(file)
    try:
        config = config_class(family_reading(values, None)).from_hf(values)
        from_tensors(config, named_tensors(file, values, meta=True))
        return config, from_tensors(config, _tensors(file, config, values, dtype, device, check_finite))
    except CheckpointError as error:
        raise type(error)(f"{file.path}: {error}") from None


def _tensors(
    file: GgufFile,
    config: Any,
    values: ConfigJson,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    check_finite: bool,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the dtype and on the device asked for. MismatchError: one has a NaN or an infinity."""
    leaves = {name: pieces[0].leaf for name, pieces in by_name(stored_leaves(config)).items()}
    faults = []
    for name, tensor in named_tensors(file, values, meta=False):
        cast = tensor.to(device or "cpu", torch.float32 if dtype is None else leaf_dtype(leaves[name], dtype))
        if check_finite and not cast.isfinite().all():
            faults.append(name)
        yield name, cast
    if faults:
        raise MismatchError(f"check_finite found NaN or infinities ({len(faults)} tensors):{as_lines(faults)}")

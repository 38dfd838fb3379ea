"""Export of parameters under Hugging Face names and layouts, one tensor at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import MismatchError
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.storage import join
from fnmodels.tree import Tree
from params.io.safetensors_file import NAMES, LazyTensor
from params.quantized.kept import KeptWeight, dequantize
from params.quantized.written import by_path, expert, file_tensors

from .shard_index import as_lines
from .tensor_map import Piece, by_name, dtype_class, duplicate_names, stored_leaves


def export(
    config: DecoderConfig, params: Tree, fetch: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint under its name on disk: the inverse of `load_pretrained`, such as for an inference
    engine.

    A leaf that is one tensor on disk is detached, not copied; fused or transposed tensors are made one at a time, as
    the iterator reaches them. A tied head appears once, duplicates that a family's files hold (`hf_copies`) appear
    unless its trait `copies_saved` is False. A weight kept as a file stores it is the tensors of that file, unless
    others that are rows of one tensor with it are plain.

    Args:
        config: The model's config.
        params: The tree of parameters; with `fetch`, meta tensors with shapes and dtypes.
        fetch: path -> leaf, for sharded leaves. It is called in the order of the spec, when a tensor needs the leaf,
            and its result is kept while the next tensor needs it too. None: the leaves of `params`.

    Returns:
        An iterator of (name on disk, tensor).

    Raises:
        MismatchError: It names every leaf that does not fit `config`, before the first tensor is yielded.
    """
    tensors = lazy_tensors(config, params, fetch)
    return ((name, tensor.make()) for name, tensor in tensors.items())


def lazy_tensors(
    config: DecoderConfig, params: Tree, fetch: Callable[[str], Tensor] | None = None
) -> dict[str, LazyTensor]:
    """{name on disk: tensor, made when it is written}, in the order of the spec. Errors as in `export`."""
    flat = by_path(params)
    _check(config, flat, meta=fetch is not None)
    values = (lambda _: flat) if fetch is None else _Fetched(fetch)
    tensors: dict[str, LazyTensor] = {}
    for name, pieces in by_name(stored_leaves(config)).items():
        kept = [piece for piece in pieces if isinstance(flat[piece.path], KeptWeight)]
        if kept and len(kept) == len(pieces):
            tensors |= file_tensors([(piece.stored, _kept(piece, flat)) for piece in pieces])
        else:  # of which those that are kept become plain
            tensors[name] = _lazy_tensor(pieces, flat, _dequantized(flat) if kept else values)
    duplicates = duplicate_names(config) if traits_of(family_of(config)).copies_saved else {}
    copies = {copy: name for copy, name in duplicates.items() if name in tensors}
    return tensors | {copy: tensors[name] for copy, name in copies.items()}


def _dequantized(flat: dict[str, Any]) -> Callable[[list[Piece]], dict[str, Tensor]]:
    return lambda pieces: {piece.path: dequantize(flat[piece.path]) for piece in pieces}


def _kept(piece: Piece, flat: dict[str, Any]) -> KeptWeight:
    weight: KeptWeight = flat[piece.path]
    return expert(weight, piece.index) if isinstance(piece.index, int) else weight  # tables of rows are never kept


class _Fetched:
    """Fetches the leaves of one tensor on disk, reusing those that the tensor before it needed too."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        self.fetch = fetch
        self.held: dict[str, Tensor] = {}

    def __call__(self, pieces: list[Piece]) -> dict[str, Tensor]:
        paths = dict.fromkeys(piece.path for piece in pieces)
        self.held = {path: self.held[path] for path in paths if path in self.held}
        for path in paths:
            if path not in self.held:
                self.held[path] = self.fetch(path)
        return self.held


def _lazy_tensor(
    pieces: list[Piece], flat: dict[str, Tensor], values: Callable[[list[Piece]], dict[str, Tensor]]
) -> LazyTensor:
    """One tensor of the file; its pieces are joined only when it is written."""

    def make() -> Tensor:
        here = values(pieces)
        return join((piece.stored, piece.value(here).detach()) for piece in pieces).to(dtype)

    dtype = torch.int64 if pieces[0].dtype_class == "integer" else flat[pieces[0].path].dtype
    return LazyTensor(dtype, pieces[0].disk_shape, make)


def _above(path: str) -> list[str]:
    """The paths of the nodes that a leaf is in."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _check(config: DecoderConfig, flat: dict[str, Any], *, meta: bool) -> None:
    parameters = stored_leaves(config)
    leaves = {parameter.path: parameter.leaf for parameter in parameters}
    inner = {path: next((leaf for leaf in _above(path) if leaf in leaves), "") for path in flat.keys() - leaves.keys()}
    nodes = {leaf for leaf in inner.values() if leaf}
    faults = [f"{path}: missing; expected {list(leaf.shape)}" for path, leaf in leaves.items() if path not in flat]
    faults = [fault for fault in faults if fault.partition(":")[0] not in nodes]
    faults += [f"{path}: has an adapter or is replaced; params.lora.merge makes it plain" for path in sorted(nodes)]
    for path, value in flat.items():
        if inner.get(path):
            continue
        if path not in leaves:
            faults.append(f"{path}: unexpected")
        elif isinstance(value, KeptWeight):
            if value.shape != leaves[path].shape:
                faults.append(f"{path}: expected {list(leaves[path].shape)}, found {list(value.shape)}")
        elif not isinstance(value, Tensor):
            faults.append(f"{path}: a {type(value).__name__}, not a tensor")
        elif value.shape != leaves[path].shape:
            faults.append(f"{path}: expected {list(leaves[path].shape)}, found {list(value.shape)}")
        elif dtype_class(value.dtype) != dtype_class(leaves[path].dtype) or value.dtype not in NAMES:
            faults.append(f"{path}: expected a {dtype_class(leaves[path].dtype)} dtype, found {value.dtype}")
        elif value.is_meta and not meta:
            faults.append(f"{path}: on the meta device, so there is nothing to save")
    for name, pieces in by_name(parameters).items():
        dtypes = {value.dtype for piece in pieces if isinstance(value := flat.get(piece.path), Tensor)}
        if len(dtypes) > 1:
            listing = ", ".join(piece.path for piece in pieces)
            faults.append(f"{listing}: must have one dtype, for they are one tensor {name} on disk")
    if faults:
        raise MismatchError(
            f"The params are not those that the config calls for ({len(faults)} differences):{as_lines(faults)}"
        )

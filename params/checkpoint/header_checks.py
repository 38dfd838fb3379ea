"""The checks of a checkpoint folder that need config.json and the headers of its files, but no tensor's values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, MismatchError, UnsupportedError
from fnmodels.models.common.bookkeeping import QUANTIZATION
from fnmodels.models.common.config_json import ConfigJson, IgnoreFields
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.storage import disk_names
from params.compressed_ids import has_tokenizer, map_paths
from params.io.safetensors_file import TensorEntry, TensorFile, cast_buffer
from params.quantized.methods import read_quantization
from params.quantized.weight import Found, QuantizedWeight, is_zero_bias, pair

from . import tensor_map, wrapped_text
from .config import part_of, read_config, with_head, with_lm_head
from .shard_index import as_lines, open_folder
from .tensor_map import Piece, StoredLeaf, dtype_class


@dataclass(frozen=True)
class CheckedFolder:
    """A checkpoint folder that has passed all checks except those of the tensors' values.

    found: {name on disk: (its file, its entry)}. leftovers: names in it that are no parameter. tied: {name of a
    redundant tensor: name of the tensor it must equal}. prefix: the first component that the names on disk omit.
    unread: {beginning of names: how many tensors} of the other parts of a model of which only the text is read.
    of_tokenizer: paths of the tables of compressed token ids that the files lack; they are made of tokenizer.json.
    """

    config: DecoderConfig
    files: tuple[TensorFile, ...]
    parameters: tuple[StoredLeaf, ...]
    found: Found
    leftovers: tuple[str, ...]
    tied: dict[str, str]
    prefix: str
    unread: dict[str, int] = field(default_factory=dict)
    of_tokenizer: frozenset[str] = frozenset()


def check_folder(
    folder: Path,
    stack: ExitStack,
    drop: Collection[str] = (),
    family: Any = None,
    head: str | None = None,
    part: str | None = None,
    ignore_fields: Collection[str] = (),
) -> CheckedFolder:
    """The checks of `load_pretrained`, without reading a tensor; `stack` closes the files. Errors as there."""
    declared, values = read_config(folder, family, part, ignore_fields)
    opened = open_folder(folder, stack, traits_of(family_of(declared)).weights)
    files = tuple({file.path: file for file, _ in opened.values()}.values())
    buffer = cast_buffer()
    with IgnoreFields(frozenset(ignore_fields)).asked():
        located, others, where = _paired(folder, opened, values, buffer), dict[str, int](), ""
    if family is None and part == "text" and wrapped_text.text_values(values) is not None:
        located, others, where = wrapped_text.text_tensors(folder, declared, located)
        declared = wrapped_text.tied_by_files(declared, values, bool(_head_names(declared) & located.keys()))
    complete = with_lm_head(declared)
    if complete is not declared and _head_names(complete) & located.keys():  # an older file, whose class has no head
        declared = complete
    config = declared if head is None else with_head(declared, head)
    parameters = tensor_map.stored_leaves(config)
    prefix = tensor_map.missing_prefix(parameters, located)
    smaller, dropped = tensor_map.drop_optional(config, drop, located, prefix)
    if prefix or smaller != config:
        config, parameters = smaller, tensor_map.stored_leaves(smaller, prefix)
    parameters = tensor_map.with_stacked_experts(parameters, located)
    located = {name: value for name, value in located.items() if name not in dropped}
    tied = tensor_map.tied_names(config, prefix)
    expected = tensor_map.by_name(parameters)
    published = tensor_map.published_names(config, {*expected, *tied}, located, prefix)
    located = dict(zip(published, located.values(), strict=True))
    unread = tensor_map.names_of_head(complete, config, located)
    leftovers = tuple(
        name
        for name in located
        if name not in expected
        and (
            tensor_map.is_leftover(config, prefix + name)
            or tensor_map.unread_part(config, prefix + name)
            or name in unread
            or is_zero_bias(located, name, buffer)
        )
    )
    known = {name: value for name, value in located.items() if name not in leftovers}
    lacking = _lacking_maps(config, parameters, known)
    note = f"\nThese are the names of a text model alone; in the files they begin with {where}" if where else ""
    if lacking and has_tokenizer(folder):
        expected = {name: pieces for name, pieces in expected.items() if pieces[0].path not in lacking}
    elif lacking:
        note += f"\n{folder / 'tokenizer.json'} is missing, of which compressed ids of tokens are made"
    _compare(folder, expected, tied, known, lambda names: tensor_map.why_wrong(config, names) + note)
    checked = CheckedFolder(config, files, parameters, located, leftovers, tied, prefix, others, lacking)
    return _only(part_of(config, part, folder), part, checked)


def _paired(
    folder: Path, opened: dict[str, tuple[TensorFile, TensorEntry]], values: ConfigJson, buffer: Tensor
) -> Found:
    """`opened` with the tensors of each quantized weight as one; it may have none: dequantized models often keep the
    quantization_config."""
    inner = wrapped_text.text_values(values) or {}
    try:
        quantization = read_quantization({**{n: inner[n] for n in QUANTIZATION if n in inner}, **values}, folder)
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"{folder}: {error}") from None
    if quantization is None:
        return {**opened}
    paired, faults = pair(opened, quantization, buffer)
    if faults:
        raise MismatchError(
            f"{folder}: {len(faults)} tensors are not as {quantization.method} has them:{as_lines(faults)}"
        )
    return paired


def _head_names(config: Any) -> set[str]:
    """The names on disk of a head that is not tied."""
    leaves = tensor_map.stored_leaves(config)
    return {name for leaf in leaves if leaf.path in ("lm_head", "text.lm_head") for name in disk_names(leaf.stored)}


def _lacking_maps(config: DecoderConfig, parameters: Iterable[StoredLeaf], known: Found) -> frozenset[str]:
    """The paths of tables of compressed token ids of which the files have no tensor."""
    paths = map_paths(config)
    return frozenset(
        leaf.path for leaf in parameters if leaf.path in paths and not known.keys() & {*disk_names(leaf.stored)}
    )


def _only(config: Any, part: str | None, checked: CheckedFolder) -> CheckedFolder:
    """The folder with the parameters of the part whose Config this is."""
    if config is checked.config:
        return checked
    chosen = [parameter for parameter in checked.parameters if parameter.path.startswith(f"{part}.")]
    inner = tuple(replace(parameter, path=parameter.path.removeprefix(f"{part}.")) for parameter in chosen)
    return replace(checked, config=config, parameters=inner)


def _compare(
    folder: Path,
    expected: dict[str, list[Piece]],
    tied: dict[str, str],
    located: Found,
    why: Callable[[Iterable[str]], str],
) -> None:
    """MismatchError with every difference between the expected tensors and those in the headers.

    why: what else to say, given the names of tensors with another shape.
    """
    faults, unexpected = [], []
    dtypes: dict[str, tuple[str, torch.dtype]] = {}  # by path, for leaves stacked from several tensors
    for name, (piece, *_) in expected.items():
        if name not in located:
            faults.append(f"{name}: missing; expected {list(piece.disk_shape)}")
            continue
        file, entry = located[name]
        faults += _faults(name, piece, file, entry)
        if piece.index is not None:
            other, dtype = dtypes.setdefault(piece.path, (name, entry.dtype))
            if entry.dtype != dtype:
                faults.append(f"{name}: {_name(entry.dtype)}, but {other}, which it is stacked with, is {_name(dtype)}")
    for name, (file, entry) in located.items():
        if name in tied:
            faults += _faults(name, expected[tied[name]][0], file, entry)
        elif name not in expected:
            unexpected.append(f"{name!r} in {file.path.name}: unexpected, {list(entry.shape)} of {_name(entry.dtype)}")
    if faults or unexpected:
        reshaped = (
            n for n, (piece, *_) in expected.items() if n in located and located[n][1].shape != piece.disk_shape
        )
        raise MismatchError(
            f"{folder}: the tensors are not those that config.json calls for "
            f"({len(faults) + len(unexpected)} differences):{as_lines(faults)}{as_lines(unexpected)}{why(reshaped)}"
        )


def _faults(name: str, piece: Piece, file: TensorFile, entry: TensorEntry | QuantizedWeight) -> list[str]:
    faults = []
    if entry.shape != piece.disk_shape:
        faults.append(f"{name} in {file.path.name}: expected {list(piece.disk_shape)}, found {list(entry.shape)}")
    expected = piece.dtype_class
    if dtype_class(entry.dtype) != expected:
        faults.append(f"{name} in {file.path.name}: expected a {expected} dtype, found {_name(entry.dtype)}")
    return faults


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

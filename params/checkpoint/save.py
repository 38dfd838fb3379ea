"""Saving (config, params) as a Hugging Face checkpoint folder: config.json and safetensors, byte-deterministic."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import MismatchError
from fnmodels.files import write_new
from fnmodels.models.common.config_json import ConfigJson, strict_json
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.models.common.registry import family_of, to_hf
from fnmodels.tree import Tree
from params.io.safetensors_file import LazyTensor, write_tensors
from params.quantized.declared import Declaration
from params.quantized.kept import KeptWeight
from params.quantized.written import by_path, declaration_of

from .export import lazy_tensors
from .shard_index import SHARDS_LIMIT, as_lines, index_name, make_index, single_name
from .transaction import MODEL, saving


def save_pretrained(
    path: str | os.PathLike[str], config: DecoderConfig, params: Tree, *, max_shard_size: int | str = "5GB"
) -> None:
    """Writes config.json and model.safetensors, replacing an older model there; the folder is a Hugging Face
    checkpoint.

    Dtypes are kept, weights kept as a file stores them are written in that form, and other files in the folder are not
    touched. fnmodels_manifest.json records the checksums for `verify`. The files of a diffusion model are named as by
    diffusers.

    Everything is first written and flushed to a folder `.saving-*` inside `path`; until then the old files stay valid.
    A kill, Ctrl-C or error during the renames that follow leaves a folder without config.json, which cannot be loaded,
    never a mix of two models: `recover` or the next save finishes the renames. Where the config is equal and the model
    is a single file, it leaves the old model or the new one. Parameters mapped from this same folder stay valid:
    renaming keeps the old files alive while they are mapped.

    Args:
        path: The folder, made if needed.
        config: The model's config.
        params: The tree of parameters, plain tensors or kept quantized weights.
        max_shard_size: Bytes, or a string such as "5GB"; a larger model is split into several files with an index.

    Raises:
        MismatchError: It names every leaf that is missing, unexpected or mis-shaped by the spec of `config`.
        OSError: The disk is full.
        BlockingIOError: Another save into the folder is under way.
        TypeError: The arguments are in another order.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"save_pretrained takes the folder, the config and the params, in this order: the first is a "
            f"{type(path).__name__}, not a path."
        )
    write_model(Path(path), config, params, max_shard_size)


def write_model(
    folder: Path,
    config: DecoderConfig,
    params: Tree,
    max_shard_size: int | str = "5GB",
    beside: Callable[[Path], object] = lambda temporary: None,
) -> None:
    """`save_pretrained`. beside: writes further files of the same save into the folder that it is given."""
    flat = by_path(params)
    tensors = lazy_tensors(config, params)
    _check_plain(flat)
    declaration = declaration_of(flat)
    text = config_text(config, _main_dtype(flat), declaration)
    stem = traits_of(family_of(config)).weights
    shards = _shards(tensors, _bytes(max_shard_size), stem)
    with saving(folder, MODEL) as temporary:
        for file, names in shards.items():
            write_tensors(temporary / file, {name: tensors[name] for name in names})
        if len(shards) > 1:
            sizes = {file: {name: tensors[name].nbytes for name in names} for file, names in shards.items()}
            write_new(temporary / index_name(stem), _json(make_index(sizes)))
        write_new(temporary / "config.json", text)
        if declaration is not None and declaration.file:
            write_new(temporary / declaration.file, _json(json.loads(declaration.text)))
        beside(temporary)


def config_text(config: DecoderConfig, dtype: torch.dtype, declaration: Declaration | None = None) -> str:
    """The text of config.json; dtype: that of most elements of the model. declaration: how weights are quantized."""
    values = to_hf(config)
    named = {} if "_class_name" in values else {"dtype": str(dtype).removeprefix("torch.")}  # unknown to diffusers
    values = values | named
    if declaration is not None and declaration.keys:
        *parts, last = declaration.keys
        inner = values
        for key in parts:
            inner = inner.setdefault(key, {})
        inner |= {**json.loads(declaration.beside), last: json.loads(declaration.text)}
    return _json(values)


def _check_plain(flat: dict[str, Any]) -> None:
    """MismatchError names every leaf that is not a plain dense tensor."""
    faults = []
    for path, value in flat.items():
        if isinstance(value, KeptWeight):
            continue
        if type(value) not in (Tensor, torch.nn.Parameter):
            faults.append(
                f"{path}: a {type(value).__name__}; only plain tensors can be saved (`full_tensor` makes one)"
            )
        elif value.layout != torch.strided:
            faults.append(f"{path}: {value.layout}; only dense tensors can be saved, as `to_dense` gives")
    if faults:
        raise MismatchError(f"The params cannot be saved as they are ({len(faults)} leaves):{as_lines(faults)}")


def _main_dtype(flat: dict[str, Any]) -> torch.dtype:
    """The dtype for config.json: that of most floating-point elements."""
    sizes: Counter[torch.dtype] = Counter()
    for value in flat.values():
        if value.dtype.is_floating_point:
            sizes[value.dtype] += math.prod(value.shape)
    return max(sizes, key=lambda dtype: (sizes[dtype], str(dtype)))


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+) ?([KMGT]?B|)", str(size).upper())
    number = int(match[1]) * 1000 ** "BKMGT".index((match[2] or "B")[0]) if match else 0
    if number < 1:
        raise ValueError(f'max_shard_size must be a positive number of bytes or a text as "5GB", not {size!r}.')
    return number


def _shards(tensors: dict[str, LazyTensor], limit: int, stem: str) -> dict[str, list[str]]:
    """{file: tensor names}, in the order of the spec; a tensor larger than the limit gets a file of its own."""
    groups: list[list[str]] = []
    size: float = math.inf
    for name, tensor in tensors.items():
        if size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {single_name(stem): groups[0]}
    if len(groups) > SHARDS_LIMIT:
        raise ValueError(
            f"max_shard_size={limit} makes {len(groups):,} files of this model; at most {SHARDS_LIMIT:,} can be read."
        )
    return {f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def _json(values: ConfigJson) -> str:
    return json.dumps(strict_json(values), indent=2, sort_keys=True, allow_nan=False) + "\n"

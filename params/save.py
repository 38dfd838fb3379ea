"""From (config, params) to a Hugging Face checkpoint folder: config.json and safetensors, the same bytes every time."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import FormatError
from fnmodels.tree import Tree
from params.export import outgoing
from params.files import sync
from params.format import Outgoing, write_tensors
from params.index import INDEX, SINGLE, make_index
from params.manifest import MANIFEST, changed, read_manifest, write_manifest
from params.saving import STAGING, exclusive, staged, told

_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


def save_pretrained(
    path: str | os.PathLike[str], config: Any, params: Tree, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write config.json and model.safetensors into the folder `path` (made if needed), replacing an older model there.

    max_shard_size: bytes, or a text as "5GB"; a larger model goes into several files with an index. dtypes are kept;
    other files of the folder are not touched. Beside them fnmodels_manifest.json says what `verify` holds them against.
    MismatchError names every leaf that is missing, unexpected or mis-shaped by the spec of `config`.

    Everything is written and flushed to a folder `.saving-*` inside first, and the old files stay valid until then: an
    OSError says so where the disk is full, and BlockingIOError that another save into the folder is under way. A kill
    during the renames that follow leaves a folder without config.json, which nothing loads, never a mix: `recover`
    finishes them. Where a single file of an equal config is replaced, it leaves the old model or the new one.
    Parameters that were mapped from this very folder stay good, for renaming keeps the old files alive as long as they
    are mapped.
    """
    tensors = outgoing(config, params)
    text = config_text(config, _main_dtype(tree.flatten(params)))
    shards = _shards(tensors, _bytes(max_shard_size))

    folder = Path(path)
    with staged(folder) as temporary:
        with told(folder, "The model was not saved", "what the folder held before is as it was"):
            for file, names in shards.items():
                write_tensors(temporary / file, {name: tensors[name] for name in names})
            if len(shards) > 1:
                sizes = {file: {name: tensors[name].nbytes for name in names} for file, names in shards.items()}
                _write(temporary / INDEX, _json(make_index(sizes)))
            _write(temporary / "config.json", text)
            write_manifest(temporary)
        _replace(folder, temporary)


def config_text(config: Any, dtype: torch.dtype) -> str:
    """config.json as it is written for a model most of whose numbers have this dtype."""
    return _json(config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")})


def recover(path: str | os.PathLike[str]) -> bool:
    """Finish a save into the folder `path` that was cut short while it moved its files; True if there was one.

    A save that was cut short earlier, while it wrote them, left the older model as it was: False, and nothing is done.
    """
    folder = Path(path)
    with exclusive(folder):
        for temporary in folder.glob(f"{STAGING}*"):
            if not (temporary / MANIFEST).exists():  # made when all else is complete, moved last
                continue
            for name, record in read_manifest(temporary).items():
                place = temporary / name if (temporary / name).exists() else folder / name
                if fault := changed(place, record):
                    raise FormatError(f"{temporary} cannot be finished: {fault}.")
            _replace(folder, temporary)
            shutil.rmtree(temporary)
            return True
    return False


def _replace(folder: Path, temporary: Path) -> None:
    """Move the new files into place. config.json goes first and comes last: without it nothing loads the folder.

    The manifest is away while what it speaks of changes: a model without one is a model that cannot be verified, one
    with another's would be called damaged. May be called again after a kill: what was moved stays.
    """
    new = {*read_manifest(temporary), MANIFEST}
    waiting = {name for name in new if (temporary / name).exists()}
    old = {path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name)}
    around = [MANIFEST, "config.json"]
    if old <= {SINGLE} and SINGLE in new and _same(folder / "config.json", temporary / "config.json"):
        around = [MANIFEST]  # the model changes by a single rename
    for name in (*(name for name in around if name in waiting), *sorted(old - new)):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    for name in sorted(waiting - {MANIFEST, "config.json"}):
        os.replace(temporary / name, folder / name)
    sync(folder)
    for name in reversed(around):
        if name in waiting:
            os.replace(temporary / name, folder / name)
    sync(folder)


def _same(one: Path, two: Path) -> bool:
    return one.exists() and two.exists() and one.read_bytes() == two.read_bytes()


def _main_dtype(flat: dict[str, Tensor]) -> torch.dtype:
    """What config.json calls the model's dtype: that of most floating-point numbers in it."""
    sizes: Counter[torch.dtype] = Counter()
    for value in flat.values():
        if value.dtype.is_floating_point:
            sizes[value.dtype] += value.numel()
    return max(sizes, key=lambda dtype: (sizes[dtype], str(dtype)))


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+) ?([KMGT]?B|)", str(size).upper())
    number = int(match[1]) * 1000 ** "BKMGT".index((match[2] or "B")[0]) if match else 0
    if number < 1:
        raise ValueError(f'max_shard_size must be a positive number of bytes or a text as "5GB", not {size!r}.')
    return number


def _shards(tensors: dict[str, Outgoing], limit: int) -> dict[str, list[str]]:
    """{file: names}, in the order of the spec; a tensor larger than the limit gets a file of its own."""
    groups: list[list[str]] = []
    size: float = math.inf
    for name, tensor in tensors.items():
        if size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)

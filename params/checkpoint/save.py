"""From (config, params) to a Hugging Face checkpoint folder: config.json and safetensors, the same bytes every time."""

from __future__ import annotations

import errno
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
from fnmodels.errors import FormatError, MismatchError
from fnmodels.tree import Tree
from params.io.files import sync
from params.io.safetensors_file import LazyTensor, write_tensors
from params.io.staging import (
    describe_os_error,
    folder_lock,
    leftovers,
    remove_leftovers,
    removed_on_failure,
    reserved_staging_path,
)

from .export import lazy_tensors
from .manifest import MANIFEST, file_fault, read_manifest, write_manifest
from .shard_index import INDEX, SHARDS_LIMIT, SINGLE, as_lines, make_index

_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


def save_pretrained(
    path: str | os.PathLike[str], config: Any, params: Tree, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write config.json and model.safetensors into the folder `path` (made if needed), replacing an older model there.

    max_shard_size: bytes, or a text as "5GB"; a larger model goes into several files with an index. dtypes are kept;
    other files of the folder are not touched. Beside them fnmodels_manifest.json says what `verify` holds them against.
    MismatchError names every leaf that is missing, unexpected or mis-shaped by the spec of `config`.

    Everything is written and flushed to a folder `.saving-*` inside first, and the old files stay valid until then: an
    OSError says so where the disk is full, and BlockingIOError that another save into the folder is under way. A kill,
    Ctrl-C or an error during the renames that follow leaves a folder without config.json, which nothing loads, never a
    mix: `recover` finishes them, and so does the next save before anything else. Where a single file of an equal config
    is replaced, it leaves the old model or the new one.
    Parameters that were mapped from this very folder stay good, for renaming keeps the old files alive as long as they
    are mapped.
    """
    tensors = lazy_tensors(config, params)
    _check_plain(tree.flatten(params))
    text = config_text(config, _main_dtype(tree.flatten(params)))
    shards = _shards(tensors, _bytes(max_shard_size))

    folder = Path(path)
    with reserved_staging_path(folder, _tidy) as temporary:
        kept = "what the folder held before is as it was"
        with removed_on_failure(temporary), describe_os_error(folder, "The model was not saved", kept):
            _check_places(folder)
            for file, names in shards.items():
                write_tensors(temporary / file, {name: tensors[name] for name in names})
            if len(shards) > 1:
                sizes = {file: {name: tensors[name].nbytes for name in names} for file, names in shards.items()}
                _write(temporary / INDEX, _json(make_index(sizes)))
            _write(temporary / "config.json", text)
            write_manifest(temporary)
        # From here on it is removed only when all is in place: a part of the model may be nowhere else.
        _put(folder, temporary)


def config_text(config: Any, dtype: torch.dtype) -> str:
    """config.json as it is written for a model most of whose numbers have this dtype."""
    return _json(config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")})


def recover(path: str | os.PathLike[str]) -> bool:
    """Finish a save into the folder `path` that was cut short while it moved its files; True if there was one.

    A save that was cut short earlier, while it wrote them, left the older model as it was: False, and nothing is done.
    """
    folder = Path(path)
    with folder_lock(folder) as alone:
        finished = _finish(folder)
        if finished and alone:
            remove_leftovers(folder)
    return finished


def _finish(folder: Path) -> bool:
    """Put the newest complete leftover into place, if there is one. FormatError: there are, but all are damaged."""
    complete = [path for path in leftovers(folder) if (path / MANIFEST).exists()]  # made when all else is, moved last
    faults = []
    for temporary in sorted(complete, key=lambda path: (path / MANIFEST).stat().st_mtime_ns, reverse=True):
        if fault := _fault(folder, temporary):
            faults.append(f"{temporary} cannot be finished: {fault}. Remove it where it is not wanted.")
            continue
        _check_places(folder)
        _put(folder, temporary)
        return True
    if faults:
        raise FormatError(faults[0])
    return False


def _fault(folder: Path, temporary: Path) -> str | None:
    """What of a complete leftover is neither in it nor, because it was moved already, in the folder."""
    for name, record in read_manifest(temporary).items():
        place = temporary / name if (temporary / name).exists() else folder / name
        fault = file_fault(place, record) if place.is_file() else f"{name} is in neither of the folders"
        if fault:
            return fault
    return None


def _tidy(folder: Path) -> None:
    """Remove what is incomplete. What `recover` could finish stays until a later model is in place; where the old model
    was being taken away already, it is finished now, for it is all there is.
    """
    if not os.path.lexists(folder / "config.json") and _finish(folder):
        remove_leftovers(folder)
    for leftover in leftovers(folder):
        if not (leftover / MANIFEST).exists():
            shutil.rmtree(leftover)


def _put(folder: Path, temporary: Path) -> None:
    """Replace the old model by the complete one in `temporary`, which stays where that fails."""
    kept = f"it is complete in {temporary.name}: params.recover finishes it once that is mended"
    with describe_os_error(folder, "The new model could not be moved into place", kept):
        _replace(folder, temporary)
    shutil.rmtree(temporary)


def _check_places(folder: Path) -> None:
    """IsADirectoryError where a rename, or the removal of an older file, could only fail half-way."""
    for path in sorted(folder.iterdir()):
        ours = path.name in ("config.json", MANIFEST) or _WEIGHTS.fullmatch(path.name)
        if ours and path.is_dir() and not path.is_symlink():
            text = f"a folder stands at {path.name}, where a file of the model belongs: move it away"
            raise IsADirectoryError(errno.EISDIR, text, str(path))


def _check_plain(flat: dict[str, Tensor]) -> None:
    """MismatchError names every leaf whose numbers do not lie in memory one by one, as in a file."""
    faults = []
    for path, value in flat.items():
        if type(value) not in (Tensor, torch.nn.Parameter):
            faults.append(
                f"{path}: a {type(value).__name__}; only plain tensors can be saved (`full_tensor` makes one)"
            )
        elif value.layout != torch.strided:
            faults.append(f"{path}: {value.layout}; only dense tensors can be saved, as `to_dense` gives")
    if faults:
        raise MismatchError(f"The params cannot be saved as they are ({len(faults)} leaves):{as_lines(faults)}")


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
    return one.is_file() and two.is_file() and one.read_bytes() == two.read_bytes()  # a pipe would never end


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


def _shards(tensors: dict[str, LazyTensor], limit: int) -> dict[str, list[str]]:
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
    if len(groups) > SHARDS_LIMIT:
        raise ValueError(
            f"max_shard_size={limit} makes {len(groups):,} files of this model; at most {SHARDS_LIMIT:,} can be read."
        )
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)

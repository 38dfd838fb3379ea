"""Saving (config, params) as a Hugging Face checkpoint folder: config.json and safetensors, byte-deterministic."""

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
from fnmodels.files import sync
from fnmodels.models.common.config_json import strict_json
from fnmodels.models.common.registry import DecoderConfig, family_of, may_have, to_hf
from fnmodels.tree import Tree
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
from .shard_index import SHARDS_LIMIT, STEMS, as_lines, index_name, make_index, single_name

_WEIGHTS = re.compile(rf"({'|'.join(STEMS)})(-\d{{5,}}-of-\d{{5,}})?\.safetensors(\.index\.json)?")


def save_pretrained(
    path: str | os.PathLike[str], config: DecoderConfig, params: Tree, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write config.json and model.safetensors into the folder `path` (made if needed), replacing an older model there.

    The files of a diffusion model are named as by diffusers, see `load_pretrained`.

    max_shard_size: bytes, or a string such as "5GB"; a larger model is split into several files with an index. dtypes
    are kept, and other files in the folder are not touched. fnmodels_manifest.json records the checksums for `verify`.
    MismatchError names every leaf that is missing, unexpected or mis-shaped by the spec of `config`.

    Everything is first written and flushed to a folder `.saving-*` inside `path`; until then the old files stay valid:
    OSError if the disk is full, BlockingIOError if another save into the folder is under way. A kill, Ctrl-C or error
    during the renames that follow leaves a folder without config.json, which cannot be loaded, never a mix of two
    models: `recover` or the next save finishes the renames. Where the config is equal and the model is a single file,
    it leaves the old model or the new one.
    Parameters mapped from this same folder stay valid: renaming keeps the old files alive while they are mapped.
    """
    tensors = lazy_tensors(config, params)
    _check_plain(tree.flatten(params))
    text = config_text(config, _main_dtype(tree.flatten(params)))
    stem = may_have(family_of(config), "WEIGHTS")
    shards = _shards(tensors, _bytes(max_shard_size), stem)

    folder = Path(path)
    with reserved_staging_path(folder, _tidy) as temporary:
        kept = "what the folder held before is as it was"
        with removed_on_failure(temporary), describe_os_error(folder, "The model was not saved", kept):
            _check_no_folders(folder)
            for file, names in shards.items():
                write_tensors(temporary / file, {name: tensors[name] for name in names})
            if len(shards) > 1:
                sizes = {file: {name: tensors[name].nbytes for name in names} for file, names in shards.items()}
                _write(temporary / index_name(stem), _json(make_index(sizes)))
            _write(temporary / "config.json", text)
            write_manifest(temporary)
        # From here on it is removed only when all files are moved: some may exist only there.
        _move_into_place(folder, temporary)


def config_text(config: DecoderConfig, dtype: torch.dtype) -> str:
    """The text of config.json; dtype: that of most elements of the model."""
    values = to_hf(config)
    named = {} if "_class_name" in values else {"dtype": str(dtype).removeprefix("torch.")}  # unknown to diffusers
    return _json(values | named)


def recover(path: str | os.PathLike[str]) -> bool:
    """Finish a save into the folder `path` that was interrupted while it moved its files; True if there was one.

    A save that was interrupted earlier, while it wrote them, left the older model unchanged: returns False.
    """
    folder = Path(path)
    with folder_lock(folder) as alone:
        finished = _finish(folder)
        if finished and alone:
            remove_leftovers(folder)
    return finished


def _finish(folder: Path) -> bool:
    """Move the newest complete leftover into place; False if there is none. FormatError: all leftovers are damaged."""
    # the manifest is written and moved last
    complete = [path for path in leftovers(folder) if (path / MANIFEST).exists()]
    faults = []
    for temporary in sorted(complete, key=lambda path: (path / MANIFEST).stat().st_mtime_ns, reverse=True):
        if fault := _fault(folder, temporary):
            faults.append(f"{temporary} cannot be finished: {fault}. Remove it where it is not wanted.")
            continue
        _check_no_folders(folder)
        _move_into_place(folder, temporary)
        return True
    if faults:
        raise FormatError(faults[0])
    return False


def _fault(folder: Path, temporary: Path) -> str | None:
    """The first fault of a leftover: a file that is missing or damaged, there and in the folder; None if complete."""
    for name, record in read_manifest(temporary).items():
        place = temporary / name if (temporary / name).exists() else folder / name
        fault = file_fault(place, record) if place.is_file() else f"{name} is in neither of the folders"
        if fault:
            return fault
    return None


def _tidy(folder: Path) -> None:
    """Remove incomplete leftovers. One that `recover` could finish stays until a newer model is in place; where the old
    model's config.json is gone already, it is finished now, because it is the only complete model.
    """
    if not os.path.lexists(folder / "config.json") and _finish(folder):
        remove_leftovers(folder)
    for leftover in leftovers(folder):
        if not (leftover / MANIFEST).exists():
            shutil.rmtree(leftover)


def _move_into_place(folder: Path, temporary: Path) -> None:
    """Replace the old model by the complete one in `temporary`, which is kept if that fails."""
    kept = f"it is complete in {temporary.name}: params.recover finishes it once that is mended"
    with describe_os_error(folder, "The new model could not be moved into place", kept):
        _replace(folder, temporary)
    shutil.rmtree(temporary)


def _check_no_folders(folder: Path) -> None:
    """IsADirectoryError if a folder has the name of a file of the model: the renames would fail half-way."""
    for path in sorted(folder.iterdir()):
        ours = path.name in ("config.json", MANIFEST) or _WEIGHTS.fullmatch(path.name)
        if ours and path.is_dir() and not path.is_symlink():
            text = f"a folder stands at {path.name}, where a file of the model belongs: move it away"
            raise IsADirectoryError(errno.EISDIR, text, str(path))


def _check_plain(flat: dict[str, Tensor]) -> None:
    """MismatchError names every leaf that is not a plain dense tensor."""
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
    """Move the new files into place. config.json is removed first and moved last: without it nothing loads the folder.

    The manifest is absent while the files change: a model without one cannot be verified, but with another model's it
    would be reported as damaged. May be called again after a kill: files that were moved stay.
    """
    new = {*read_manifest(temporary), MANIFEST}
    waiting = {name for name in new if (temporary / name).exists()}
    old = {path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name)}
    bracketing = [MANIFEST, "config.json"]
    singles = {single_name(stem) for stem in STEMS} & new
    if singles and old <= singles and _same(folder / "config.json", temporary / "config.json"):
        bracketing = [MANIFEST]  # the model changes by a single rename
    for name in (*(name for name in bracketing if name in waiting), *sorted(old - new)):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    for name in sorted(waiting - {MANIFEST, "config.json"}):
        os.replace(temporary / name, folder / name)
    sync(folder)
    for name in reversed(bracketing):
        if name in waiting:
            os.replace(temporary / name, folder / name)
    sync(folder)


def _same(one: Path, two: Path) -> bool:
    return one.is_file() and two.is_file() and one.read_bytes() == two.read_bytes()  # reading a pipe would block


def _main_dtype(flat: dict[str, Tensor]) -> torch.dtype:
    """The dtype for config.json: that of most floating-point elements."""
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


def _json(values: dict[str, Any]) -> str:
    return json.dumps(strict_json(values), indent=2, sort_keys=True, allow_nan=False) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)

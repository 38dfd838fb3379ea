"""The map from tensor names to the safetensors files of a checkpoint folder: one file, or shards with an index."""

import errno
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fnmodels.errors import IndexFileError, UnsupportedError
from params.io.files import plain_file, read_json
from params.io.safetensors_file import TensorEntry, TensorFile, open_tensor_files

STEMS = ("model", "diffusion_pytorch_model")  # of files of tensors: in transformers, in diffusers

SHARDS_LIMIT = 10_000  # files; the largest published models have 200
_SHOWN, _WIDE = 20, 400  # differences listed in a message, characters of each


def as_lines(lines: Iterable[str]) -> str:
    """`lines` indented for an error message, at most _SHOWN of them and each at most _WIDE characters."""
    lines = [line.replace("\n", "\\n") for line in lines]  # a name in a file does not begin a line
    lines = [line if len(line) <= _WIDE else line[:_WIDE] + "..." for line in lines]
    more = [f"... and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
    return "".join(f"\n  {line}" for line in lines[:_SHOWN] + more)


def single_name(stem: str) -> str:
    """The name of the file that has all tensors."""
    return f"{stem}.safetensors"


def index_name(stem: str) -> str:
    """The name of the index of shards."""
    return f"{stem}.safetensors.index.json"


def stem_in(folder: Path) -> str:
    """The one of STEMS that files in the folder have, the first one by default."""
    found = (stem for stem in STEMS if any(os.path.lexists(folder / name(stem)) for name in (single_name, index_name)))
    return next(found, STEMS[0])


def open_folder(folder: Path, stack: ExitStack, stem: str = "model") -> dict[str, tuple[TensorFile, TensorEntry]]:
    """{tensor name: (its file, its entry)} with every header checked; `stack` closes the files.

    stem: the beginning of the files' names, the trait `weights` of the family.
    IndexFileError where index and files disagree, FileNotFoundError for missing files, UnsupportedError for pickles.
    """
    whole, listed = single_name(stem), index_name(stem)
    single, index = os.path.lexists(folder / whole), os.path.lexists(folder / listed)
    if index:
        weight_map = _weight_map(folder / listed)
        shards = sorted(set(weight_map.values()))
        if single and shards != [whole]:
            raise IndexFileError(
                f"{folder} has both {whole} and an {listed} that names other files: one is left from another save."
            )
    elif single:
        shards = [whole]
    else:
        raise _no_weights(folder, whole, listed)
    _check_strays(folder, stem, listed if index else whole, shards)
    paths, missing = [], []
    for name in shards:
        try:
            paths.append(plain_file(folder, name))
        except FileNotFoundError:
            if not index:
                raise
            missing.append(name)
    if missing:
        text = f"{len(missing)} of {len(shards)} files with tensors are not there:{as_lines(missing)}\nFolder"
        raise FileNotFoundError(errno.ENOENT, text, str(folder))
    files = open_tensor_files(paths, stack)
    if index:
        _check_index(folder / listed, weight_map, files)
    return {name: (file, entry) for file in files for name, entry in file.entries.items()}


def _check_strays(folder: Path, stem: str, named: str, shards: Iterable[str]) -> None:
    # Shards of two saves would be ambiguous. Files with other names are ignored: adapters, other formats.
    shard = re.compile(rf"{stem}-\d+-of-\d+\.safetensors")
    strays = sorted({name for name in os.listdir(folder) if shard.fullmatch(name)}.difference(shards))
    if strays:
        raise IndexFileError(
            f"{folder} has {len(strays):,} shards that {named} does not name, perhaps left from another save:"
            f"{as_lines(map(repr, strays))}"
        )


def _weight_map(path: Path) -> dict[str, str]:
    content: Any = read_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise IndexFileError(f"{path} must have a 'weight_map' from the names of tensors to those of files.")
    if not weight_map:
        raise IndexFileError(f"{path}: the 'weight_map' is empty.")
    shards = set(weight_map.values())
    if len(shards) > SHARDS_LIMIT:
        raise IndexFileError(f"{path} names {len(shards):,} files; at most {SHARDS_LIMIT:,} are read.")
    for name in shards:
        if not name.endswith(".safetensors"):
            raise IndexFileError(f"{path} names the file {name!r}; only .safetensors files are read.")
    return weight_map


def _check_index(path: Path, weight_map: dict[str, str], files: list[TensorFile]) -> None:
    # The index's total_size is not compared: published ones count tied or dropped tensors in different ways.
    held = {file.path.name: file.entries for file in files}
    faults = [f"{name!r}: not in {shard}" for name, shard in weight_map.items() if name not in held[shard]]
    for shard, entries in held.items():
        for name in entries:
            if name not in weight_map:
                faults.append(f"{name!r}: in {shard}, but not in the index")
            elif weight_map[name] != shard:
                faults.append(f"{name!r}: in {shard}, but the index says {weight_map[name]}")
    if faults:
        raise IndexFileError(f"{path} and the shards disagree ({len(faults)} differences):{as_lines(faults)}")


def _no_weights(folder: Path, whole: str, listed: str) -> Exception:
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return FileNotFoundError(
            errno.ENOENT,
            f"There is neither {whole} nor {listed}, though there is {shards[0]}, in the folder",
            str(folder),
        )
    if pickled:
        return UnsupportedError(
            f"{folder} has only pickled weights ({pickled[0]}), and unpickling runs whatever code is in them: "
            "this is never done here. Save the model as safetensors where you trust the file."
        )
    return FileNotFoundError(errno.ENOENT, f"There is neither {whole} nor {listed} in the folder", str(folder))


def make_index(shards: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The content of the index file, from {file: {tensor: bytes}}."""
    weight_map = {name: shard for shard, sizes in shards.items() for name in sizes}
    total = sum(size for sizes in shards.values() for size in sizes.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}

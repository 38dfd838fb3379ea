"""A model in one GGUF file, or in several that llama-gguf-split cut: `NAME-00001-of-00003.gguf` and so on.

The first has the metadata; each has the number of its part (from 0), of all parts and of all tensors.
"""

import dataclasses
import os
import re
from contextlib import ExitStack
from pathlib import Path

from fnmodels.errors import FormatError
from params.io.safetensors_file import OpenFiles

from .header import GgufFile, GgufTensor, read_header

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def open_gguf(path: Path, stack: ExitStack) -> GgufFile:
    """Open a model by its file, or by that of any of its parts, and check the headers; no tensor is read.

    Args:
        path: of the file.
        stack: closes the files.

    Raises:
        FormatError: what is wrong with a file, or parts do not belong together.
        FileNotFoundError: parts that are missing.
        UnsupportedError: a version or a type of tensor that is not read.
        UserError: the gguf package is not installed.
    """
    handles = OpenFiles()
    stack.callback(handles.close)
    file = read_header(path, handles)
    count = file.metadata.get(_COUNT, 1)
    if count in (0, 1):
        return file
    paths = _paths(path, count)
    if missing := [one.name for one in paths if not os.path.lexists(one)]:
        rest = f" and {len(missing) - 5:,} more" if len(missing) > 5 else ""
        raise FileNotFoundError(
            f"{path} is one of {count:,} files of a model, of which {', '.join(missing[:5])}{rest} are missing "
            "beside it."
        )
    parts = [file if one == path else read_header(one, handles) for one in paths]
    return _joined(path, parts)


def part_paths(path: Path) -> list[Path]:
    """The files of the model that a file is of, by its name; the file alone where the name has no number."""
    match = _NAME.fullmatch(path.name)
    paths = _paths(path, int(match[3])) if match else [path]
    return paths if all(map(os.path.lexists, paths)) else [path]


def _paths(path: Path, count: int) -> list[Path]:
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count or not 1 <= int(match[2]) <= count:
        raise FormatError(
            f"{path} is one of {count} files of a model, which must be named NAME-00001-of-{count:05}.gguf, "
            f"NAME-00002-of-{count:05}.gguf and so on."
        )
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{match[4]}") for number in range(1, count + 1)]


def _joined(path: Path, parts: list[GgufFile]) -> GgufFile:
    """The metadata of the first part with the tensors of all."""
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        for key, expected in ((_NUMBER, number), (_COUNT, len(parts))):
            if part.metadata.get(key) != expected:
                value = part.metadata.get(key)
                raise FormatError(f"{part.path}: {key!r} is {value!r}, but must be {expected} in a file of this name.")
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise FormatError(f"{part.path}: the tensor {twice[0]!r} is in a file before it too.")
        tensors |= part.tensors
    total = parts[0].metadata.get(_TENSORS, len(tensors))
    if total != len(tensors):
        raise FormatError(f"{path}: its files have {len(tensors):,} tensors, but {_TENSORS!r} is {total!r}.")
    return dataclasses.replace(parts[0], tensors=tensors)

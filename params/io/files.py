"""Names that come from a file or belong to a folder of a stranger, and strict JSON.

One rule for each such name: it is bare, and a regular file of this folder has it (`plain_file`). Files are opened and
written by `fnmodels.files`.
"""

import errno
import json
import os
import stat
from collections import Counter
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from fnmodels.errors import FormatError, UnsafePathError
from fnmodels.files import check_folder, read_bytes

JSON_LIMIT = 50_000_000  # bytes; the largest published index has about 15 MB
DEPTH_LIMIT = 32  # of nesting; configurations have 4
LINE_DEPTH_LIMIT = 100  # of a record, which may have schemas of tools
TOO_DEEP = "it is nested too deeply"


def plain_file(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`, which must be an existing regular file inside it.

    UnsafePathError: `name` is no bare file name, or the file is a pipe or device (reading one could hang), or a link
    that leads out of the folder. Links into the `blobs` of a Hugging Face cache, its snapshots' form, are allowed.
    FileNotFoundError, IsADirectoryError: there is no such file.
    """
    check_bare(folder, name)
    path = folder / name
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        text = f"The checkpoint folder has no {name}"
        if path.is_symlink():
            text = f"{name} is a link to {os.readlink(path)!r}, which is not there"
        raise FileNotFoundError(errno.ENOENT, text, str(path)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "A folder stands where a file belongs", str(path))
    if not stat.S_ISREG(mode):
        raise UnsafePathError(f"{path} is not a regular file.")
    if path.is_symlink():
        target, here = path.resolve(), folder.resolve()
        cached = target.parent.name == "blobs" and target.parents[1] / "snapshots" in here.parents
        if target.parent != here and not cached:
            raise UnsafePathError(f"{path} is a link to {target}, outside of the checkpoint folder.")
    return path


def check_bare(folder: Path, name: str) -> None:
    """UnsafePathError unless `name` is the bare name of something in `folder`."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise UnsafePathError(f"{folder}: {name!r} is not the bare name of a file in this folder.")


def inner_folder(folder: Path, relative: str) -> Path:
    """The folder at `relative`, a path from a file: bare names joined by "/", or "" or "." for `folder` itself.

    UnsafePathError: it leads out of `folder`, or through a link. It need not exist.
    """
    path = folder
    for name in PurePosixPath(relative).parts:
        check_bare(folder, name)
        path = path / name
        check_folder(path)
    return path


def inner_file(folder: Path, relative: str) -> Path:
    """`plain_file` for a path from a file that may lead into folders inside of `folder`, such as "images/1.png"."""
    path = PurePosixPath(relative)
    return plain_file(inner_folder(folder, str(path.parent)), path.name)


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The content of a JSON file, which `plain_file` checks.

    FormatError: not JSON, a duplicate key, nested too deeply, or over `limit` bytes.
    """
    return parse_json(read_bytes(plain_file(path.parent, path.name), limit, follow=True), str(path))


def parse_json(data: bytes | bytearray, where: str) -> Any:
    """The value of JSON text in UTF-8. FormatError as in `read_json`; its message begins with `where`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
        deep = is_deep(value)
    except RecursionError:
        deep = True
    except ValueError as error:  # not UTF-8, not JSON, a key twice, a number of thousands of digits
        raise FormatError(f"{where} is not valid JSON: {error}.") from None
    if deep:
        raise FormatError(f"{where} is not valid: its JSON is nested too deeply.")
    return value


def parse_line(line: str | bytes) -> Any:
    """The value of a line of JSON, in which a record may nest deeper than a configuration. ValueError says why not."""
    try:
        value = json.loads(line)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_deep(value, LINE_DEPTH_LIMIT):
        raise ValueError(TOO_DEEP)
    return value


def is_deep(value: Any, limit: int = DEPTH_LIMIT) -> bool:
    """Whether objects and lists nest deeper: what could just be parsed may not be compared, printed or sent."""
    level, depth = [value], 0
    while level and depth <= limit:
        objects = chain.from_iterable(inner.values() for inner in level if type(inner) is dict)  # no subclass: parsed
        lists = chain.from_iterable(inner for inner in level if type(inner) is list)
        level, depth = [*objects, *lists], depth + 1
    return any(type(inner) in (dict, list) for inner in level)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two equal keys they use, so a check of one says nothing about the other.
    built = dict(pairs)
    if len(built) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0][:80]!r} is there twice")
    return built

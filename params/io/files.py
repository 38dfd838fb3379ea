"""The plain files of a checkpoint folder: which may be opened, JSON without surprises, flushing to the disk."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fnmodels.errors import FormatError, UnsafePathError

WRITING = ".writing-"  # begins the names of unfinished files
JSON_LIMIT = 50_000_000  # bytes; the largest published index has about 15 MB
DEPTH_LIMIT = 32  # of nesting; configurations have 4


def plain_file(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`, an existing regular file that is really there.

    UnsafePathError: the name is not a bare one, a link leads out of the folder, or it is a pipe or device (reading one
    could hang). Links into the `blobs` of a Hugging Face cache are what its snapshots consist of, and pass.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise UnsafePathError(f"{folder}: {name!r} is not the bare name of a file in this folder.")
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


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The content of a small JSON file; FormatError if it is not JSON, names a key twice or is absurdly large."""
    size = path.stat().st_size
    if size > limit:
        raise FormatError(f"{path} has {size:,} bytes; no such file has more than {limit:,}.")
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes | bytearray, where: str) -> Any:
    """`where` begins the message of the FormatError."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise FormatError(f"{where} is not valid: its JSON is nested too deeply.") from None
    except ValueError as error:  # not UTF-8, not JSON, a key twice, a number of thousands of digits
        raise FormatError(f"{where} is not valid JSON: {error}.") from None
    # What was just shallow enough to be parsed may be too deep to be compared, or shown in a message.
    level, depth = [value], 0
    while level:
        if depth > DEPTH_LIMIT:
            raise FormatError(f"{where} is not valid: its JSON is nested too deeply.")
        level, depth = [inner for outer in level for inner in _inside(outer)], depth + 1
    return value


def _inside(value: Any) -> list[Any]:
    """The lists and objects in a list or an object."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, (dict, list))]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two equal keys they take, so that a check of one says nothing about the other.
    built = dict(pairs)
    if len(built) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0][:80]!r} is there twice")
    return built


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_into_place(temporary: Path, path: Path) -> None:
    """Replace `path` by the finished file `temporary` (same file system), so that no reader ever sees half of it."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write(temporary)` make the file, then rename it to `path`. A failed or killed write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=WRITING) as folder:
        temporary = Path(folder) / path.name
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask has it; safetensors' writer leaves files to the owner alone
        write(temporary)
        temporary.chmod(mode)
        move_into_place(temporary, path)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

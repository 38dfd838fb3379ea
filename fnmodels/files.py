"""The one way to open and replace files that others may have made: regular files alone, and nothing through a link.

Every file that the three packages read or write by its name is opened here, or by a library that is handed a name which
was checked here first; tests/damage knows each reader and writer. A pipe or a device could hang, a link could lead to
a private file, which would be published or overwritten.

The system itself refuses a link when a file is opened, on Linux and macOS. Elsewhere, where O_NOFOLLOW and O_NONBLOCK
are missing, the path is looked at before it is opened: a process that changes the folder meanwhile goes unnoticed.
"""

import errno
import io
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .errors import FormatError, UnsafePathError

WRITING = ".writing-"  # prefix of the names of unfinished files
_ABANDONED = 60.0  # seconds: a process that has just made its folder has not locked it yet
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """The descriptor of a regular file; never waits for a pipe.

    Args:
        path: the file.
        flags: of `os.open`; O_TRUNC is applied only once the file is known to be regular.
        follow: whether `path` may be a link: the caller named the file, or `params.io.files.plain_file` checked it.

    Raises:
        UnsafePathError: a link, a pipe, a device or a socket is at `path`.
        IsADirectoryError: a folder is.
    """
    if not follow and not _NO_LINK and os.path.islink(path):
        raise _is_link(path)
    try:
        handle = os.open(path, flags & ~os.O_TRUNC | _FLAGS | (0 if follow else _NO_LINK), 0o666)
    except OSError as error:
        if not follow and os.path.islink(path):
            raise _is_link(path) from None
        if error.errno in (errno.ENXIO, errno.EOPNOTSUPP, errno.ENODEV):  # a pipe without a reader, a socket
            raise UnsafePathError(f"{path} is not a regular file.") from None
        raise
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "A folder stands where a file belongs", str(path))
        if not stat.S_ISREG(mode):
            raise UnsafePathError(f"{path} is not a regular file.")
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _is_link(path: str | os.PathLike[str]) -> UnsafePathError:
    return UnsafePathError(
        f"{path} is a link, and nothing is read or written through links: put the file itself there."
    )


def read_bytes(path: str | os.PathLike[str], limit: int | None = None, *, follow: bool = False) -> bytes:
    """The content of a regular file. FormatError: it has more than `limit` bytes; others as in `open_regular`."""
    with io.FileIO(open_regular(path, follow=follow)) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise FormatError(f"{path} has {size:,} bytes; no such file has more than {limit:,}.")
        return file.readall()


def read_text(path: str | os.PathLike[str], limit: int | None = None, *, follow: bool = False) -> str:
    """`read_bytes` as UTF-8, with the line ends of the system as newlines. FormatError: it is no UTF-8."""
    try:
        text = read_bytes(path, limit, follow=follow).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text: {error}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def open_append(path: str | os.PathLike[str]) -> TextIO:
    """A file of text to write at the end of, made if needed. Errors as in `open_regular`."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8")


def make_folder(path: Path) -> None:
    """Makes the folder and those above it. UnsafePathError: a link is at `path`: what is written would be elsewhere."""
    path.mkdir(parents=True, exist_ok=True)
    check_folder(path)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/fnmodels, by default ~/.cache/fnmodels. RuntimeError without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fnmodels"


def check_folder(path: Path) -> None:
    """UnsafePathError where a link is at `path`, and NotADirectoryError where a file is; nothing there is fine."""
    if path.is_symlink():
        raise UnsafePathError(f"{path} is a link, and nothing is read or written through links: make it a folder.")
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "A file stands where a folder belongs", str(path))


def check_file(path: Path) -> None:
    """UnsafePathError where no regular file is at `path`, for a library that opens it by its name; nothing is fine."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise UnsafePathError(f"{path} is a link or no regular file: move it away.")


def private_folder(path: Path) -> None:
    """Makes the folder, which this user alone may read: mode 0700, set where an older release left it wider."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid"):
        found = path.stat()
        if found.st_mode & 0o077 and found.st_uid == os.getuid():
            path.chmod(0o700)


def remove_tree(path: Path) -> None:
    """Removes a folder with its content, a file, or a link but not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync a file, or the entries of a folder."""
    handle = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(source: Path, path: Path) -> None:
    """Renames the regular file `source` to `path`, where a file or a link may be; the link is replaced, not followed.

    UnsafePathError: `source` is not a regular file. IsADirectoryError: a folder is at `path`.
    """
    if not stat.S_ISREG(source.lstat().st_mode):
        raise UnsafePathError(f"{source} is not a regular file.")
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, "A folder stands where a file belongs", str(path))
    os.replace(source, path)


def move_into_place(temporary: Path, path: Path) -> None:
    """Atomically replace `path` by the finished file `temporary` (on the same file system), and flush both."""
    sync(temporary)
    replace_file(temporary, path)
    sync(path.parent)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write(temporary)` write a file, then rename it to `path`. A failed or killed write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=WRITING) as folder, _locked(Path(folder)):
        temporary = Path(folder) / path.name
        temporary.touch()
        mode = temporary.stat().st_mode  # the mode that the umask gives; safetensors' writer would leave 0600
        write(temporary)
        temporary.chmod(mode)
        move_into_place(temporary, path)


def remove_abandoned(folder: Path) -> None:
    """Removes what killed processes left of `write_atomic` in a folder that processes share: unlocked for a minute."""
    for path in folder.glob(f"{WRITING}*"):
        if path.is_dir() and not path.is_symlink() and time.time() - path.stat().st_mtime > _ABANDONED:
            with _locked(path) as alone:
                if alone:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Locks the folder for as long as the block and this process last; False where that is not possible."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY | _FLAGS)
    except (ImportError, OSError):  # of other systems
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """`write_atomic` of a text in UTF-8."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_new(path: Path, text: str) -> None:
    """A new file of text in UTF-8, flushed to disk, in a folder that is not published yet."""
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, path: Path, limit: int | None = None) -> None:
    """`write_atomic` of the bytes of `source`, which `plain_file` has checked. Errors as in `read_bytes`."""
    data = read_bytes(source, limit, follow=True)
    write_atomic(path, lambda temporary: temporary.write_bytes(data))

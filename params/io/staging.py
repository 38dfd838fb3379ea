"""Crash-safe saving into a folder: write to a staging folder, flush, then rename, under an exclusive file lock."""

import errno
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fnmodels.files import open_regular, sync

STAGING = ".saving-"  # prefix of the names of staging folders
LOCK = ".saving.lock"
_NAME = re.compile(re.escape(STAGING) + r"(\d{8,12})-[0-9a-f]{16}")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """A new staging folder inside `folder` (made if needed), to be filled and renamed, itself or its files.

    It is removed at the end, also on failure. Errors as in `reserved_staging_path`.
    """
    with reserved_staging_path(folder, remove_leftovers) as temporary, removed_on_failure(temporary):
        yield temporary
        shutil.rmtree(temporary, ignore_errors=True)  # it is gone already if it was renamed itself


@contextmanager
def reserved_staging_path(
    folder: Path, before: Callable[[Path], object], after: Callable[[Path], object] | None = None
) -> Iterator[Path]:
    """The path for a new staging folder inside `folder` (made if needed), under the folder's lock.

    Its name holds a number above those of all leftovers, so that their order does not depend on a clock.

    Args:
        folder: the folder that is saved into.
        before: removes leftovers of killed saves first.
        after: removes those that `before` kept, once the block has succeeded; None: as `before`.

    Raises:
        BlockingIOError: another process is saving into `folder`.
        UnsafePathError: the lock's name is that of a link or of no regular file.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    with folder_lock(folder) as alone:
        if alone:
            before(folder)
        number = 1 + max((_number(path) for path in leftovers(folder)), default=0)
        yield folder / f"{STAGING}{number:08d}-{secrets.token_hex(8)}"
        if alone:
            (after or before)(folder)


@contextmanager
def removed_on_failure(temporary: Path) -> Iterator[None]:
    """Create the folder, and remove it with its content if the block fails."""
    temporary.mkdir()  # not tempfile: its folders have mode 0700 whatever the umask
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove the staging folders of interrupted saves. Call it only under the folder's lock."""
    for leftover in leftovers(folder):
        shutil.rmtree(leftover)


def leftovers(folder: Path) -> list[Path]:
    """The staging folders of interrupted saves, the newest first; files and links of such names are not of a save."""
    named = [folder / name for name in os.listdir(folder) if name.startswith(STAGING)]
    found = [path for path in named if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: (_number(path), path.name), reverse=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Hold the exclusive lock of saves into `folder`; BlockingIOError if another process holds it.

    The system releases it when the process ends. Yields False, with a warning, on a file system without locks: that is
    no reason to lose what is to be saved.
    """
    import fcntl  # missing on some systems where checkpoints can be read

    path = folder / LOCK
    while True:
        handle = open_regular(path, os.O_RDWR | os.O_CREAT)
        alone = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                if not isinstance(error, BlockingIOError):
                    raise
                text = "Another save into this folder is under way: wait for it, or save elsewhere"
                raise BlockingIOError(error.errno, text, str(folder)) from None
            warnings.warn(
                f"{folder} is on a file system without locks ({error.strerror}): a second process that saves there at "
                "the same time would go unnoticed.",
                stacklevel=5,
            )
            alone = False
        if not alone or _is_at(handle, path):
            break
        os.close(handle)  # the process that held it removed the file meanwhile: another file is the lock now
    try:
        yield alone
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            if alone:
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked child may hold the handle too
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


@contextmanager
def describe_os_error(folder: Path, failure: str, state: str) -> Iterator[None]:
    """Turn an OSError into one sentence: `failure` (what was not saved), the reason, `state` (what is unchanged)."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{failure} ({error.strerror or error}); {state}", str(folder)) from error

"""Crash-safe saving into a folder: write to a staging folder, flush, then rename, under an exclusive file lock."""

import errno
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fnmodels.files import sync

STAGING = ".saving-"  # prefix of the names of staging folders
LOCK = ".saving.lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """A new staging folder inside `folder` (made if needed), to be filled and renamed, itself or its files.

    It is removed at the end, also on failure. Errors as in `reserved_staging_path`.
    """
    with reserved_staging_path(folder) as temporary, removed_on_failure(temporary):
        yield temporary
        shutil.rmtree(temporary, ignore_errors=True)  # it is gone already if it was renamed itself


@contextmanager
def reserved_staging_path(folder: Path, cleanup: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """The path for a new staging folder inside `folder` (made if needed), under the folder's lock.

    BlockingIOError: another process is saving into `folder`. Leftovers of killed saves are removed first, by `cleanup`
    where it is given, and whatever that keeps is removed after the block has succeeded.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    with folder_lock(folder) as alone:
        if alone:
            (cleanup or remove_leftovers)(folder)
        yield folder / f"{STAGING}{secrets.token_hex(8)}"
        if alone:
            remove_leftovers(folder)


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
    """The staging folders of interrupted saves; files and links of such names were not made by a save."""
    return [path for path in sorted(folder.glob(f"{STAGING}*")) if path.is_dir() and not path.is_symlink()]


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Hold the exclusive lock of saves into `folder`; BlockingIOError if another process holds it.

    The system releases it when the process ends. Yields False, with a warning, on a file system without locks: that is
    no reason to lose what is to be saved.
    """
    import fcntl  # missing on some systems where checkpoints can be read

    path = folder / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
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
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def describe_os_error(folder: Path, failure: str, state: str) -> Iterator[None]:
    """Turn an OSError into one sentence: `failure` (what was not saved), the reason, `state` (what is unchanged)."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{failure} ({error.strerror or error}); {state}", str(folder)) from error

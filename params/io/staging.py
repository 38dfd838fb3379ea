"""Saving so that no kill, full disk or second process leaves a mix: written aside, flushed, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .files import sync

STAGING = ".saving-"  # begins the names of folders that are being written
LOCK = ".saving.lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder` (made if needed) to be filled and renamed as a whole, or from; no failure leaves it.

    Errors as of `reserved_staging_path`.
    """
    with reserved_staging_path(folder) as temporary, removed_on_failure(temporary):
        yield temporary
        shutil.rmtree(temporary, ignore_errors=True)  # gone where it was renamed as a whole


@contextmanager
def reserved_staging_path(folder: Path, tidy: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """The path of a folder to be made inside `folder` (itself made if needed), while every other saver is kept out.

    BlockingIOError: another saver is at work in `folder`. What a killed one left behind is removed: at once, or where
    `tidy` spares it, when the block has succeeded.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    with folder_lock(folder) as alone:
        if alone:
            (tidy or remove_leftovers)(folder)
        yield folder / f"{STAGING}{secrets.token_hex(8)}"
        if alone:
            remove_leftovers(folder)


@contextmanager
def removed_on_failure(temporary: Path) -> Iterator[None]:
    """Make the folder. Where the block fails, nothing is left of it."""
    temporary.mkdir()  # unlike tempfile's folders, which are closed to everybody else, as the umask has it
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what savers that were cut short have left. Only while no other can be at work."""
    for leftover in leftovers(folder):
        shutil.rmtree(leftover)


def leftovers(folder: Path) -> list[Path]:
    """What savers that were cut short have left. They make folders only: a file, or a link, is somebody else's."""
    return [path for path in sorted(folder.glob(f"{STAGING}*")) if path.is_dir() and not path.is_symlink()]


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Keep every other saver out of `folder`; BlockingIOError where one is inside. The lock goes with the process.

    Yields False, with a warning, where the file system knows no locks: no reason to lose what is to be saved.
    """
    import fcntl  # not on every system where checkpoints can be read

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
        os.close(handle)  # the one who had it removed the file meanwhile: another file is the lock now
    try:
        yield alone
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            if alone:
                fcntl.flock(handle, fcntl.LOCK_UN)  # not by closing alone: a forked child may hold the handle too
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def describe_os_error(folder: Path, lost: str, kept: str) -> Iterator[None]:
    """An error of the operating system becomes one sentence: what was not saved, why, and what is as it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{lost} ({error.strerror or error}); {kept}", str(folder)) from error

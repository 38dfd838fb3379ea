"""Runs an action in a forked process that ends, or whose calls fail, at a chosen change of the file system."""

import errno
import os
import resource
import shutil
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

CHANGES = ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "fsync", "ftruncate", "link", "symlink")
CUT, DONE, RAISED = 9, 0, 3  # exit codes of the child


def exit_before(change: int, action: Callable[[], object]) -> bool:
    """Whether `action` was through before its change number `change`, from 0, at which its process ends."""
    return _forked(partial(with_changes, change, partial(os._exit, CUT), action))[0] == DONE


def fail_at(change: int, action: Callable[[], object]) -> tuple[bool, str]:
    """(whether `action` was through before, its error); from that change on, the disk is full."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    code, text = _forked(partial(with_changes, change, full, action))
    return code == DONE, text


def with_file_size(limit: int, action: Callable[[], object]) -> tuple[bool, str]:
    """(whether `action` was through, its error) with files of `limit` bytes at most."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            action()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    code, text = _forked(limited)
    return code == DONE, text


def with_changes(change: int, then: Callable[[], object], action: Callable[[], object]) -> None:
    """Calls `action`, and `then` before its change number `change` and those after it; for a process that ends then."""
    left = change

    def counted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 and (left == -1 or name not in ("unlink", "remove", "rmdir")):  # a full disk can be tidied
                then()
            return call(*args, **options)

        return wrapped

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name), name))
    action()


def _forked(action: Callable[[], object]) -> tuple[int, str]:
    """(exit code, error as "type: message") of the action in a child."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child computes in one alone
        child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            action()
        except OSError as error:
            os.write(writer, f"{type(error).__name__}: {error.strerror}".encode()[:4000])
            os._exit(RAISED)
        except ValueError as error:  # CheckpointError, UserError
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:4000])
            os._exit(RAISED)
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(DONE)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (CUT, DONE, RAISED), f"exit code {code}: {text}"
    return code, text


def copied(folder: Path, to: Path) -> Path:
    """A copy of the folder; nothing where there is none."""
    if folder.exists():
        shutil.copytree(folder, to, symlinks=True)
    else:
        to.mkdir()
    return to

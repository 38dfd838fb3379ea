"""Runs an action whose process ends, or whose calls fail, at a chosen change of the file system."""

import contextlib
import errno
import os
import re
import resource
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

CHANGES = ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "fsync", "ftruncate", "link", "symlink")
CUT, DONE = 9, 0  # exit codes of the child
_RANDOM = re.compile(r"(?<=-)[0-9a-f]{16}|(?<=\.writing-)\w+")  # in the names of unfinished files

State = tuple[tuple[str, int, bytes], ...]


def state_of(folder: Path) -> State:
    """All that a reader could find in the folder, but for the random parts of names: (name, mode, content)."""
    found = []
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found.append((_RANDOM.sub("*", str(path.relative_to(folder))), mode, content))
    return tuple(sorted(found))


def cuts_of(folder: Path, to: Path, action: Callable[[], object]) -> list[tuple[State, Path]]:
    """(state, a copy) of the folder before each change that `action` makes, and at its end; a state is copied once.

    They are what a process leaves that ends there: `exit_before` tells, which takes a process for each.
    """
    found: list[tuple[State, Path]] = []
    copies: dict[State, Path] = {}

    def note() -> None:
        state = state_of(folder)
        if state not in copies:
            copies[state] = copied(folder, to / f"cut-{len(found)}")
        found.append((state, copies[state]))

    with each_change(lambda number, name: note()):
        action()
    note()
    return found


def exit_before(change: int, action: Callable[[], object]) -> bool:
    """Whether `action` was through before its change number `change`, from 0, at which its process ends."""
    return _forked(lambda: end_before(change, action)) == DONE


def end_before(change: int, action: Callable[[], object]) -> None:
    """Calls `action`; this process ends before its change number `change`, from 0, with the exit code `CUT`."""

    def end(number: int, name: str) -> None:
        if number == change:
            os._exit(CUT)

    with each_change(end):
        action()


def fail_at(change: int, action: Callable[[], object]) -> tuple[bool, str]:
    """(whether `action` was through before, its error); from that change on, the disk is full, but can be tidied."""

    def full(number: int, name: str) -> None:
        if number == change or (number > change and name not in ("unlink", "remove", "rmdir")):
            raise OSError(errno.ENOSPC, "No space left on device")

    with each_change(full):
        return _tried(action)


def with_file_size(limit: int, action: Callable[[], object]) -> tuple[bool, str]:
    """(whether `action` was through, its error) with files of `limit` bytes at most."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        return _tried(action)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _tried(action: Callable[[], object]) -> tuple[bool, str]:
    try:
        action()
    except OSError as error:
        return False, f"{type(error).__name__}: {error.strerror}"
    except ValueError as error:  # CheckpointError, UserError
        return False, f"{type(error).__name__}: {error}"
    return True, ""


@contextlib.contextmanager
def each_change(before: Callable[[int, str], None]) -> Iterator[None]:
    """Calls `before(number, name)` before each change of the file system, from 0, but for those of `before` itself."""
    calls = {name: getattr(os, name) for name in CHANGES}
    number, inside = -1, False

    def noted(name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal number, inside
            if not inside:
                number, inside = number + 1, True
                try:
                    before(number, name)
                finally:
                    inside = False
            return calls[name](*args, **options)

        return wrapped

    for name in CHANGES:
        setattr(os, name, noted(name))
    try:
        yield
    finally:
        for name, call in calls.items():
            setattr(os, name, call)


def _forked(action: Callable[[], object]) -> int:
    """The exit code of the action in a child."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child computes in one alone
        child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            action()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(DONE)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (CUT, DONE), f"exit code {code}: {text}"
    return code


def copied(folder: Path, to: Path) -> Path:
    """A copy of the folder; nothing where there is none."""
    if folder.exists():
        shutil.copytree(folder, to, symlinks=True)
    else:
        to.mkdir()
    return to

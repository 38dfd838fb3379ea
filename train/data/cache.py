"""What is slow to make and depends on nothing but its key: one complete file each, outside every run folder."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from fnmodels.errors import UserError
from params.io.files import write_atomic

T = TypeVar("T")


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fnmodels"


def cached(name: str, write: Callable[[Path], object], read: Callable[[Path], T]) -> T:
    """Read the cached file `name`, after writing it where it is missing or damaged.

    Two runs that make the same file at once both rename a complete one into place: the last wins, and both are right.
    """
    path = folder() / name
    try:
        if path.exists():
            return read(path)
    except Exception:  # whatever the format's reader says about a damaged file, the answer is to make it again
        path.unlink(missing_ok=True)
    try:
        write_atomic(path, write)
    except (OSError, SafetensorError) as error:  # the format's own writer has no OSError of a full disk
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"the cache folder {path.parent} cannot be written ({why}): set XDG_CACHE_HOME to one that can"
        ) from error
    return read(path)

"""The on-disk cache of derived files (tokenizers, token ids): one complete file per key, shared by all runs."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from fnmodels.errors import UserError
from fnmodels.files import write_atomic

T = TypeVar("T")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/fnmodels, by default ~/.cache/fnmodels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fnmodels"


def cached(name: str, write: Callable[[Path], object], read: Callable[[Path], T]) -> T:
    """Reads the cached file `name`, after writing it where it is missing or damaged.

    Two runs that write the same file at once both rename a complete one into place, so either is valid. UserError
    where the cache folder cannot be written.
    """
    path = cache_folder() / name
    try:
        if path.exists():
            return read(path)
    except Exception:  # readers raise all kinds of exceptions for a damaged file; it is written again
        path.unlink(missing_ok=True)
    try:
        write_atomic(path, write)
    except (OSError, SafetensorError) as error:  # safetensors' writer reports a full disk as its own error, no OSError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"the cache folder {path.parent} cannot be written ({reason}): set XDG_CACHE_HOME to one that can"
        ) from error
    return read(path)

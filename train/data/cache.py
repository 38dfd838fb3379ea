"""The on-disk cache of derived files (tokenizers, token ids, rates): one complete file per key, shared by all runs.

Only this user may read the folder: token ids are the texts of the data.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from fnmodels.errors import UserError
from fnmodels.files import (
    WRITING,
    cache_folder,
    check_file,
    private_folder,
    remove_abandoned,
    remove_tree,
    write_atomic,
)

T = TypeVar("T")
# {kind: what its files hold}; the names of files begin with the kind
KINDS = {
    "tokens": "token ids of texts",
    "chats": "token ids of conversations",
    "shard": "lengths of documents in shards of token ids",
    "tokenizer": "tokenizers of new models",
    "products": "measured rates of matrix products",
    "step": "compiled steps of decoding",
}
_NAME = re.compile(rf"({'|'.join(KINDS)})-[0-9a-f]+\.(safetensors|json|pt2)")


@dataclass(frozen=True)
class Cached:
    """A cached file. used: seconds since the epoch, of its last reading where the file system records that."""

    path: Path
    kind: str
    size: int
    used: float


def cached(name: str, write: Callable[[Path], object], read: Callable[[Path], T]) -> T:
    """Reads the cached file `name`, after writing it where it is missing or damaged.

    Two runs that write the same file at once both rename a complete one into place, so either is valid. UserError
    where the cache folder cannot be written.
    """
    path = cache_folder() / name
    try:
        if os.path.lexists(path):
            check_file(path)
            return read(path)
    except Exception:  # readers raise all kinds of exceptions for a damaged file; it is written again
        remove_tree(path)
    try:
        private_folder(path.parent)
        remove_abandoned(path.parent)
        write_atomic(path, write)
    except (OSError, SafetensorError) as error:  # safetensors' writer reports a full disk as its own error, no OSError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"the cache folder {path.parent} cannot be written ({reason}): set XDG_CACHE_HOME to one that can"
        ) from error
    return read(path)


def cached_files() -> list[Cached]:
    """All cached files, by kind and name; what stands beside them in the folder is of others."""
    folder, found = cache_folder(), []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (match := _NAME.fullmatch(path.name)) and not path.is_symlink() and path.is_file():
            state = path.stat()
            found.append(Cached(path, match[1], state.st_size, max(state.st_atime, state.st_mtime)))
    return found


def clear() -> list[Cached]:
    """Removes all cached files, which it returns, and what killed writers left. Runs that read them keep them."""
    found = cached_files()
    for file in found:
        file.path.unlink(missing_ok=True)
    if cache_folder().is_dir():
        remove_abandoned(cache_folder())
    return found


def unfinished() -> list[Path]:
    """Folders of files that are being written, or were when their process was killed."""
    return sorted(path for path in cache_folder().glob(f"{WRITING}*") if path.is_dir() and not path.is_symlink())

"""The files of a streamed source: local ones, and those behind a URL (`s3://bucket/notes`), which fsspec reads."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fnmodels.errors import UserError
from fnmodels.files import open_regular
from train.command_line import check_installed
from train.data.corpus import files_of
from train.data.sources import is_url


@dataclass(frozen=True)
class StreamFile:
    """A file of a source.

    Attributes:
        name: Its path below the source's folder.
        path: Where it is, for the file system.
        size: In bytes.
        system: fsspec's file system; None: the local one.
    """

    name: str
    path: str
    size: int
    system: Any = None

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix.lower()

    def open(self) -> IO[bytes]:
        """The file, to be read from any place. OSError where it cannot be opened."""
        if self.system is None:
            return os.fdopen(open_regular(self.path, follow=True), "rb")
        opened: IO[bytes] = self.system.open(self.path, "rb")
        return opened


def stream_files(data: str, *, without: Path | None = None) -> tuple[StreamFile, ...]:
    """The files of a path or a URL in the order of their names, without hidden and empty ones.

    Args:
        data: A file or a folder, as a path or a URL.
        without: A local folder whose files are left out.

    Returns:
        The files.

    Raises:
        UserError: There is none, or the file system cannot be read.
    """
    files = _remote_files(data) if is_url(data) else _local_files(Path(data), without)
    files = [file for file in files if file.size]
    if not files:
        raise UserError(f"--data {data}: there is no file with text")
    if token_ids := [file.name for file in files if file.suffix == ".npy"]:
        raise UserError(f"--data {data}: {token_ids[0]} holds token ids, which need no stream: leave --stream out")
    return tuple(files)


def _local_files(data: Path, without: Path | None) -> list[StreamFile]:
    root, paths, _ = files_of(data, without)
    return [
        StreamFile(path.relative_to(root).as_posix(), str(path), path.stat().st_size)
        for path in paths
        if path.is_file()
    ]


def _remote_files(url: str) -> list[StreamFile]:
    system, root = file_system(url)
    try:
        found = system.find(root, detail=True)
    except Exception as error:  # each file system raises its own
        raise UserError(f"--data {url}: it cannot be read: {error or type(error).__name__}") from error
    files = []
    for path in sorted(found):
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        if not any(piece.startswith(".") for piece in name.split("/")):
            files.append(StreamFile(name, path, int(found[path].get("size") or 0), system))
    return files


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path there.

    Raises:
        UserError: fsspec or the package of the protocol is missing, or the URL joins several file systems.
    """
    check_installed(("fsspec",))
    from fsspec.core import url_to_fs

    if "::" in url:
        raise UserError(f"{url}: a URL that joins several file systems (::) is not read")
    try:
        system, path = url_to_fs(url)
    except Exception as error:  # an unknown protocol is a ValueError, a missing package an ImportError, the rest theirs
        raise UserError(f"{url}: its file system cannot be opened: {error or type(error).__name__}") from error
    return system, str(path)

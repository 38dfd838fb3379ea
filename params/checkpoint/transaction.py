"""One save into a folder: all files are written aside, recorded in a manifest, then moved into place.

A kind of save has one file without which nothing loads the others: it is removed first and moved last, so that a
folder holds the older files, the newer ones, or nothing that can be loaded, never a mix. `recover` finishes a save that
was killed meanwhile.
"""

import errno
import functools
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fnmodels.errors import CheckpointError, FormatError
from fnmodels.files import make_folder, read_bytes, replace_file, sync
from params.io.files import inner_folder
from params.io.staging import (
    describe_os_error,
    folder_lock,
    leftovers,
    remove_leftovers,
    removed_on_failure,
    reserved_staging_path,
)

from .manifest import ADAPTER_MANIFEST, MANIFEST, file_fault, files_below, read_manifest, write_manifest
from .shard_index import STEMS


@dataclass(frozen=True)
class Kind:
    """A kind of save.

    Attributes:
        what: names it in messages, with its verb.
        manifest: the name of its manifest, in staging folders too, where it says of what kind a leftover is.
        key: the file without which nothing is loaded.
        weights: files of tensors, of which a save removes those of older ones.
    """

    what: tuple[str, str]
    manifest: str
    key: str
    weights: re.Pattern[str]


_WEIGHTS = re.compile(rf"({'|'.join(STEMS)})(-\d{{5,}}-of-\d{{5,}})?\.safetensors(\.index\.json)?")
MODEL = Kind(("model", "was"), MANIFEST, "config.json", _WEIGHTS)
ADAPTERS = Kind(
    ("adapters", "were"), ADAPTER_MANIFEST, "adapter_config.json", re.compile(r"adapter_model\.safetensors")
)
KINDS = (MODEL, ADAPTERS)


@contextmanager
def saving(folder: Path, kind: Kind) -> Iterator[Path]:
    """Yields a new folder for all files of the save, which replace older ones in `folder` (made if needed) at the end.

    Files in folders inside of it go to folders of the same names. OSError: the disk is full or broken; BlockingIOError:
    another save into `folder` is under way; UnsafePathError: a link is where one of its folders belongs.
    """
    kept = "what the folder held before is as it was"
    before, after = functools.partial(_tidy, kind=kind), functools.partial(_remove_older, kind=kind)
    with reserved_staging_path(folder, before, after) as temporary:
        with removed_on_failure(temporary), describe_os_error(folder, f"The {' '.join(kind.what)} not saved", kept):
            _check_places(folder, kind, ())
            yield temporary
            if inner := [name for name in files_below(temporary) if "/" in name]:
                _check_places(folder, kind, inner)
                for path in {(temporary / name).parent for name in inner}:
                    sync(path)
            write_manifest(temporary, kind.manifest)
        # From here on it is removed only when all files are moved: some may exist only there.
        _move_into_place(folder, temporary, kind)


def recover(path: str | os.PathLike[str]) -> bool:
    """Finishes a save of a model, an embedder or adapters that was interrupted while it moved its files.

    A save that was interrupted earlier, while it wrote them, left the older files unchanged.

    Args:
        path: The folder that was saved into.

    Returns:
        Whether there was such a save.

    Raises:
        FormatError: What it left is damaged, or has a name that leads elsewhere.
    """
    folder = Path(path)
    with folder_lock(folder) as alone:
        finished = [_finish(folder, kind) for kind in KINDS]
        if any(finished) and alone:
            remove_leftovers(folder)
    return any(finished)


def _finish(folder: Path, kind: Kind) -> bool:
    """Move the newest complete leftover into place; False if there is none. FormatError: all leftovers are damaged."""
    faults = []
    for temporary in _complete(folder, kind):
        if fault := _fault(folder, temporary, kind):
            faults.append(f"{temporary} cannot be finished: {fault.rstrip('.')}. Remove it where it is not wanted.")
            continue
        _move_into_place(folder, temporary, kind)
        return True
    if faults:
        raise FormatError(faults[0])
    return False


def _complete(folder: Path, kind: Kind) -> list[Path]:
    """The leftovers of a kind whose files are all written: the manifest is written and moved last. The newest first."""
    return [path for path in leftovers(folder) if os.path.lexists(path / kind.manifest)]


def _fault(folder: Path, temporary: Path, kind: Kind) -> str | None:
    """The first fault of a leftover: a file that is missing or damaged, there and in the folder; None if complete."""
    try:
        records = read_manifest(temporary, kind.manifest)
        _check_places(folder, kind, records)
        for name, record in records.items():
            place = next((root / name for root in (temporary, folder) if os.path.lexists(root / name)), None)
            if place is None:
                return f"{name} is in neither of the folders"
            if not _is_regular(place):
                return f"{name} is not a regular file"
            if fault := file_fault(place, record):
                return fault
    except CheckpointError as error:
        return str(error)
    return None if kind.key in records else f"its manifest has no {kind.key}"


def _is_regular(path: Path) -> bool:
    return os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode)


def _tidy(folder: Path, kind: Kind) -> None:
    """Remove incomplete leftovers. One that `recover` could finish stays until a newer save is in place; where the file
    without which nothing is loaded is gone already, it is finished now, because nothing else is complete.
    """
    if not os.path.lexists(folder / kind.key) and _finish(folder, kind):
        _remove_older(folder, kind)
    for leftover in leftovers(folder):
        if not any(os.path.lexists(leftover / known.manifest) for known in KINDS):
            shutil.rmtree(leftover)


def _remove_older(folder: Path, kind: Kind) -> None:
    """Remove the complete leftovers of a kind, of which a newer one is in place."""
    for leftover in _complete(folder, kind):
        shutil.rmtree(leftover)


def _move_into_place(folder: Path, temporary: Path, kind: Kind) -> None:
    """Replace the old files by the complete ones in `temporary`, which is kept if that fails."""
    kept = f"it is complete in {temporary.name}: params.recover finishes it once that is mended"
    with describe_os_error(folder, f"The new {kind.what[0]} could not be moved into place", kept):
        _replace(folder, temporary, kind)
    shutil.rmtree(temporary)


def _check_places(folder: Path, kind: Kind, names: Iterable[str]) -> None:
    """IsADirectoryError if a folder has the name of a file of the save, and UnsafePathError if a link has the name of
    one of its folders: the renames would fail half-way, or replace files elsewhere.
    """
    weights = (path.name for path in folder.iterdir() if kind.weights.fullmatch(path.name))
    for name in sorted({*names, kind.key, kind.manifest, *weights}):
        above, _, last = name.rpartition("/")
        path = (inner_folder(folder, above) if above else folder) / last
        if path.is_dir() and not path.is_symlink():
            text = f"a folder stands at {name}, where a file of this save belongs: move it away"
            raise IsADirectoryError(errno.EISDIR, text, str(path))


def _replace(folder: Path, temporary: Path, kind: Kind) -> None:
    """Move the new files into place. The key is removed first and moved last: without it nothing loads the folder.

    The manifest is absent while the files change: a folder without one cannot be verified, but with another save's it
    would be reported as damaged. May be called again after a kill: files that were moved stay.
    """
    new = {*read_manifest(temporary, kind.manifest), kind.manifest}
    waiting = {name for name in new if os.path.lexists(temporary / name)}
    old = {path.name for path in folder.iterdir() if kind.weights.fullmatch(path.name)}
    weights = {name for name in new if kind.weights.fullmatch(name)}
    folders = {folder / name.rpartition("/")[0] for name in waiting if "/" in name}
    bracketing = [kind.manifest, kind.key]
    if len(weights) == 1 and old <= weights:
        others = waiting - weights - {kind.manifest}
        if _is_regular(folder / kind.key) and all(_same(folder / name, temporary / name) for name in others):
            bracketing = [kind.manifest]  # one file changes, by a single rename
            waiting -= others
    for path in sorted(folders):
        make_folder(path)
    for name in (*(name for name in bracketing if name in waiting), *sorted(old - new)):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    for name in sorted(waiting - {kind.manifest, kind.key}):
        replace_file(temporary / name, folder / name)
    for path in (*sorted(folders), folder):
        sync(path)
    for name in reversed(bracketing):
        if name in waiting:
            replace_file(temporary / name, folder / name)
    sync(folder)


def _same(one: Path, two: Path) -> bool:
    return _is_regular(one) and _is_regular(two) and read_bytes(one) == read_bytes(two)

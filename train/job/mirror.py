"""A copy of a run behind a URL (`--mirror s3://bucket/runs/a`): uploaded in the background, each saved step complete or
not there.

The file that lists a step's files with their digests is uploaded last and removed first, so that a step without it is
none. A machine that takes over downloads the newest step whose digests agree.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError, printable
from fnmodels.files import check_folder, remove_tree
from params.checkpoint.manifest import MANIFEST
from train.checkpoint import saved_steps
from train.data.stream.files import file_system

from . import run_folder

_PARTIAL = ".saving-mirrored"  # a step that is being downloaded


class Mirror:
    """The copy of one run folder, made by one thread."""

    def __init__(self, url: str, run: Path) -> None:
        """UserError where there is no such file system."""
        self._url, self._run = url, run
        self._system, self._root = file_system(url)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._running: Future[None] | None = None
        self._seen: list[int] = []

    def look(self) -> None:
        """Starts an upload where there are new saved steps and none is running; says where one failed."""
        if self._running is not None:
            if not self._running.done():
                return
            if error := self._running.exception():
                print(f"--mirror {self._url}: an upload failed and is repeated: {printable(str(error))}", flush=True)
                self._seen = []
            self._running = None
        found = saved_steps.steps(self._run / run_folder.STEPS)
        if found != self._seen:
            self._seen = found
            self._running = self._pool.submit(self.upload)

    def upload(self, *, models: bool = False) -> None:
        """Makes the copy like the folder. models: the weights of the last step as a model too."""
        for path in sorted(self._run.iterdir()):
            if path.is_file() and not path.is_symlink() and (models or _is_small(path)):
                self._put(path, path.name)
        there = complete_steps(self._system, self._root)
        here = saved_steps.steps(self._run / run_folder.STEPS)
        for step in here:
            if step not in there:
                self._put_step(step)
        for step in there:
            if step not in here:
                place = f"{self._root}/{_step(step)}"
                self._system.rm(f"{place}/{MANIFEST}")
                self._system.rm(place, recursive=True)

    def finish(self) -> None:
        """Waits for the upload of all that there is. UserError where it fails."""
        self._pool.shutdown()
        try:
            self.upload(models=True)
        except Exception as error:  # each file system raises its own
            raise UserError(f"--mirror {self._url}: the upload failed, {self._run} is complete: {error}") from error

    def _put_step(self, step: int) -> None:
        folder = self._run / _step(step)
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
        for path in [*files, folder / MANIFEST]:
            self._put(path, f"{_step(step)}/{path.name}")

    def _put(self, path: Path, name: str) -> None:
        place = f"{self._root}/{name}"
        self._system.makedirs(place.rpartition("/")[0], exist_ok=True)
        self._system.put_file(str(path), place)


@contextmanager
def mirrored(url: str | None, run: Path) -> Iterator[Mirror | None]:
    """The mirror of a run while it trains; None without a URL. At its end, also where it is stopped, it is complete."""
    mirror = None if url is None else Mirror(url, run)
    yield mirror
    if mirror is not None:
        mirror.finish()


def complete_steps(system: Any, root: str) -> list[int]:
    """The steps that are complete behind a URL."""
    place = f"{root}/{run_folder.STEPS}"
    if not system.exists(place):
        return []
    names = (str(path).rstrip("/").rpartition("/")[2] for path in system.ls(place, detail=False))
    steps = (int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit())
    return sorted(step for step in steps if system.exists(f"{root}/{_step(step)}/{MANIFEST}"))


def restore(url: str, run: Path) -> None:
    """Downloads the newest intact step that is newer than those of the run folder, and what it needs beside it.

    UserError where the URL cannot be read.
    """
    system, root = file_system(url)
    local = saved_steps.newest(run / run_folder.STEPS)[0]
    try:
        for step in reversed(complete_steps(system, root)):
            if local is not None and step <= local.step:
                return
            if _downloaded(system, root, run, step):
                print(f"restored step {step} from {url}", flush=True)
                return
    except OSError as error:
        raise UserError(f"--mirror {url}: it cannot be read: {error}") from error


def _downloaded(system: Any, root: str, run: Path, step: int) -> bool:
    """Downloads a step and the small files of the run; False where its digests do not agree."""
    steps = run / run_folder.STEPS
    check_folder(steps)
    remove_tree(steps / _PARTIAL)
    (steps / _PARTIAL).mkdir(parents=True)
    for path in system.ls(f"{root}/{_step(step)}", detail=False):
        name = str(path).rpartition("/")[2]
        system.get_file(path, str(steps / _PARTIAL / name))
    remove_tree(run / _step(step))
    (steps / _PARTIAL).rename(run / _step(step))
    found = saved_steps.newest(steps)[0]
    if found is None or found.step != step:
        remove_tree(run / _step(step))
        return False
    for entry in system.ls(root, detail=True):
        name = Path(str(entry["name"])).name
        if entry["type"] == "file" and _is_small(run / name):
            remove_tree(run / name)
            system.get_file(entry["name"], str(run / name))
    return True


def _is_small(path: Path) -> bool:
    """Whether a file of the run folder is copied with every step: a step has the weights of the model beside it."""
    return path.suffix != ".safetensors" and path.name not in (MANIFEST, run_folder.LOCK)


def _step(step: int) -> str:
    return f"{run_folder.STEPS}/step-{step:08d}"

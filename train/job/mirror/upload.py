"""The copy of a run folder, which a thread uploads."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fnmodels.errors import UserError, printable
from params.checkpoint.manifest import MANIFEST
from train.checkpoint import saved_steps
from train.job import run_folder

from .places import complete_steps, is_small, opened, step_place


class Mirror:
    """The copy of one run folder, made by one thread."""

    def __init__(self, url: str, run: Path) -> None:
        """UserError where there is no such file system."""
        self._url, self._run = url, run
        self._system, self._root = opened(url)
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
            if path.is_file() and not path.is_symlink() and (models or is_small(path)):
                self._put(path, path.name)
        there = complete_steps(self._system, self._root)
        here = saved_steps.steps(self._run / run_folder.STEPS)
        for step in here:
            if step not in there:
                self._put_step(step)
        for step in there:
            if step not in here:
                place = f"{self._root}/{step_place(step)}"
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
        folder = self._run / step_place(step)
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
        for path in [*files, folder / MANIFEST]:
            self._put(path, f"{step_place(step)}/{path.name}")

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

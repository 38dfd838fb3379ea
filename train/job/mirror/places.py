"""The files of a copy of a run, and the steps that are complete in it."""

from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from params.checkpoint.manifest import MANIFEST
from train.data.stream.files import file_system
from train.job import run_folder

_PROBE = ".fnmodels-probe"  # a file that is written and removed again


def check_writable(url: str) -> None:
    """UserError where the package of the URL's protocol is missing, or nothing can be written there."""
    system, root = opened(url)
    try:
        system.makedirs(root, exist_ok=True)
        system.pipe_file(f"{root}/{_PROBE}", b"fnmodels")
        system.rm_file(f"{root}/{_PROBE}")
    except Exception as error:  # each file system raises its own
        raise UserError(f"--mirror {url}: nothing can be written there: {error or type(error).__name__}") from error


def opened(url: str) -> tuple[Any, str]:
    """`file_system` of --mirror."""
    try:
        return file_system(url)
    except UserError as error:
        raise UserError(f"--mirror {error}") from error


def complete_steps(system: Any, root: str) -> list[int]:
    """The steps that are complete behind a URL."""
    place = f"{root}/{run_folder.STEPS}"
    if not system.exists(place):
        return []
    names = (str(path).rstrip("/").rpartition("/")[2] for path in system.ls(place, detail=False))
    steps = (int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit())
    return sorted(step for step in steps if system.exists(f"{root}/{step_place(step)}/{MANIFEST}"))


def is_small(path: Path) -> bool:
    """Whether a file of the run folder is copied with every step: a step has the weights of the model beside it."""
    return path.suffix != ".safetensors" and path.name not in (MANIFEST, run_folder.LOCK)


def step_place(step: int) -> str:
    """The folder of a saved step, from that of the run."""
    return f"{run_folder.STEPS}/step-{step:08d}"

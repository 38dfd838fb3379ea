"""The newest step of a copy, for a machine that takes over."""

from pathlib import Path
from typing import Any

from fnmodels.errors import CheckpointError, UserError
from fnmodels.files import check_folder, remove_tree
from train.checkpoint import saved_steps
from train.job import run_folder

from .places import complete_steps, is_small, opened, step_place

_PARTIAL = ".saving-mirrored"  # a step that is being downloaded


def restore(url: str, run: Path) -> None:
    """Downloads the newest intact step that is newer than those of the run folder, and what it needs beside it.

    UserError where the URL cannot be read.
    """
    system, root = opened(url)
    local = saved_steps.newest(run / run_folder.STEPS)[0]
    try:
        for step in reversed(complete_steps(system, root)):
            if local is not None and step <= local.step:
                return
            if _downloaded(system, root, run, step):
                print(f"restored step {step} from {url}", flush=True)
                return
    except (UserError, CheckpointError):
        raise
    except Exception as error:  # each file system raises its own
        raise UserError(f"--mirror {url}: it cannot be read: {error or type(error).__name__}") from error


def _downloaded(system: Any, root: str, run: Path, step: int) -> bool:
    """Downloads a step and the small files of the run; False where its digests do not agree."""
    steps = run / run_folder.STEPS
    check_folder(steps)
    remove_tree(steps / _PARTIAL)
    (steps / _PARTIAL).mkdir(parents=True)
    for path in system.ls(f"{root}/{step_place(step)}", detail=False):
        name = str(path).rpartition("/")[2]
        system.get_file(path, str(steps / _PARTIAL / name))
    remove_tree(run / step_place(step))
    (steps / _PARTIAL).rename(run / step_place(step))
    found = saved_steps.newest(steps)[0]
    if found is None or found.step != step:
        remove_tree(run / step_place(step))
        return False
    for entry in system.ls(root, detail=True):
        name = Path(str(entry["name"])).name
        if entry["type"] == "file" and is_small(run / name):
            remove_tree(run / name)
            system.get_file(entry["name"], str(run / name))
    return True

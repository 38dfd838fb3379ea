"""The run folder: who may write to it, what lies in it, and how a stopped run finds its way back.

    config.json, model.safetensors, tokenizer.json, ...   a Hugging Face checkpoint of the last saved step
    ema/                                                  another one, of the average of the weights (--ema)
    steps/step-00000100/, ...                             everything that a resumed run needs, see
    train/checkpoint/saved_steps.py
    run.json                                              what decides its numbers
    settings.toml                                         all that it was told, for --config
    metrics.jsonl, tensorboard/, loss.png, summary.json   what became of it
    samples.jsonl, trace.json                             its speech on the way and a profile, where asked for
    skipped.txt                                           what of the text could not be learnt from, a line each
    speed.jsonl                                           what each step cost: the clock's part, never the same twice

A saved step holds the parameters too, although the checkpoint beside it has them already: it is one rename that saves
it, so that no kill, whenever it comes, pairs the parameters of one step with the optimizer of another.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from params.io.files import WRITING, write_text
from train.command_line import suggestion

LOCK = ".lock"
RUN = "run.json"
SETTINGS = "settings.toml"
EMA = "ema"
STEPS = "steps"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
SPEED = "speed.jsonl"
SAMPLES = "samples.jsonl"
TRACE = "trace.json"
SKIPPED = "skipped.txt"
BOARD = "tensorboard"
PICTURE = "loss.png"
CHECKPOINT = ("config.json", "model.safetensors", "tokenizer.json", STEPS)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep every other process out. The lock goes with the process, however it ends.

    What raises before anything was written leaves neither a folder nor a lock that was not there before.
    """
    lock = folder / LOCK
    try:
        absent, locked_before = [path for path in (folder, *folder.parents) if not path.exists()], lock.exists()
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(lock, "a")  # noqa: SIM115 - closed below; its closing gives the lock back
    except OSError as error:
        raise UserError(f"--run {folder}: the folder cannot be made or written ({error.strerror})") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle.fileno()), os.stat(lock)):
                raise FileNotFoundError("another process has just removed it")
        except OSError as error:
            raise UserError(f"--run {folder}: the folder is in use by another process") from error
        for leftover in folder.glob(f"{WRITING}*"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover)
        try:
            yield
        except BaseException:
            if not locked_before and {path.name for path in folder.iterdir()} <= {LOCK}:
                lock.unlink(missing_ok=True)
                with suppress(OSError):  # somebody else has put something there
                    for path in absent:
                        path.rmdir()
            raise


def begun_by(folder: Path, start: str) -> bool:
    """Whether the last one that was let into the folder was of this `start`."""
    return (folder / LOCK).read_text(encoding="utf-8") == start


def let_in(folder: Path, start: str) -> None:
    """The lock says by which start of processes the folder was taken."""
    (folder / LOCK).write_text(start, encoding="utf-8")


def refuse_absent(folder: Path) -> None:
    """To resume wants a folder, if an empty one: a name that was mistyped must not begin a run of hours."""
    if not folder.exists():
        beside = [str(path) for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise UserError(
            f"--run {folder}: there is no such folder, so that --resume has no run to go on with: leave it out to "
            f"begin one{suggestion(str(folder), beside)}"
        )


def refuse_to_mix(folder: Path, *, resume: bool) -> None:
    """A new run wants an empty folder; a resumed one must not overwrite a checkpoint that no run of ours made."""
    names = {path.name for path in folder.iterdir()} - {LOCK}
    if not names:
        return
    if not resume:
        raise UserError(f"--run {folder}: the folder is not empty: add --resume to go on with its run, or name another")
    if RUN not in names and not names.isdisjoint(CHECKPOINT):
        raise UserError(f"--run {folder}: the folder holds files that no run wrote (there is no {RUN}): name another")


def read_json(path: Path) -> dict[str, Any] | None:
    """None when there is no such file, or nothing in it that could be meant."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")

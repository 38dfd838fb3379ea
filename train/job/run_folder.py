"""The run folder: its lock, its files, and the checks before a run starts or resumes in it.

    config.json, model.safetensors, tokenizer.json, ...   a Hugging Face checkpoint of the last saved step
    ema/                                                  a second checkpoint, of the averaged weights (--ema)
    steps/step-00000100/, ...                             all that a resumed run needs (train.checkpoint.saved_steps)
    run.json                                              the settings and hashes that determine its results
    settings.toml                                         all of its settings, for --config
    metrics.jsonl, tensorboard/, loss.png, summary.json   its metrics and results
    tracked.json, mlflow.db, mlruns/, wandb/              --track: the id there, and local files of the tracker
    README.md                                             its model card, with the Hub's front matter
    samples.jsonl, trace.json                             --sample-every's continuations and --profile's trace
    failure.txt                                           the traceback of an exception in the user's own code
    skipped.txt                                           files and records that could not be used, one per line
    speed.jsonl                                           time and memory of each step, which are not reproducible

A saved step contains the parameters although the checkpoint beside it does too: one rename publishes it, so that a kill
at any time cannot pair the parameters of one step with the optimizer state of another.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import (
    WRITING,
    check_file,
    check_folder,
    open_append,
    open_regular,
    read_bytes,
    read_text,
    remove_tree,
    write_text,
)
from params.io.files import JSON_LIMIT, parse_json
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
FAILURE = "failure.txt"
TENSORBOARD = "tensorboard"
TENSORBOARD_HELDOUT = "tensorboard/heldout"
TRACKED = "tracked.json"
PICTURE = "loss.png"
CARD = "README.md"
MLFLOW = "mlflow.db"
FOLDERS = (EMA, STEPS, TENSORBOARD, TENSORBOARD_HELDOUT, "mlruns", "wandb")
CHECKPOINT = ("config.json", "model.safetensors", "tokenizer.json")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates the folder and locks it against other processes; the lock ends with the process, even if it is killed.

    An exception before anything else was written removes the folder and the lock again if they are new. UserError where
    the folder cannot be written or is locked; UnsafePathError if a link has the name of its lock or of a folder.
    """
    lock = folder / LOCK
    try:
        absent, locked_before = [path for path in (folder, *folder.parents) if not path.exists()], os.path.lexists(lock)
        folder.mkdir(parents=True, exist_ok=True)
        handle = open_append(lock)  # closed below, which releases the lock
    except OSError as error:
        raise UserError(f"--run {folder}: the folder cannot be created or written ({error.strerror})") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle.fileno()), os.lstat(lock)):
                raise FileNotFoundError("another process has just removed it")
        except OSError as error:
            raise UserError(f"--run {folder}: the folder is in use by another process") from error
        for name in FOLDERS:  # a link there would let the run write elsewhere
            check_folder(folder / name)
        for name in (MLFLOW, f"{MLFLOW}-journal", f"{MLFLOW}-wal", f"{MLFLOW}-shm"):  # the database opens them itself
            check_file(folder / name)
        for place in (folder, folder / EMA):
            for leftover in place.glob(f"{WRITING}*"):  # of a run that was killed while writing
                remove_tree(leftover)
        try:
            yield
        except BaseException:
            if not locked_before and {path.name for path in folder.iterdir()} <= {LOCK}:
                lock.unlink(missing_ok=True)
                with suppress(OSError):  # another process has put a file there
                    for path in absent:
                        path.rmdir()
            raise


def acquired_by(folder: Path, start: str) -> bool:
    """Whether the folder was last acquired by the launch `start`."""
    return read_text(folder / LOCK) == start


def acquire(folder: Path, start: str) -> None:
    """Records in the lock file which launch of processes uses the folder."""
    with os.fdopen(open_regular(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(start)


def check_exists(folder: Path) -> None:
    """UserError where the folder to resume in does not exist: a mistyped name must not start a new run."""
    if not folder.exists():
        beside = [str(path) for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise UserError(
            f"--run {folder}: there is no such folder, so --resume has no run to continue: leave it out to "
            f"start one{suggestion(str(folder), beside)}"
        )


def check_contents(folder: Path, *, resume: bool) -> None:
    """UserError where a new run's folder is not empty, or a resumed one's holds a checkpoint that no run wrote."""
    names = {path.name for path in folder.iterdir()} - {LOCK, FAILURE}
    if not names:
        return
    if not resume:
        raise UserError(f"--run {folder}: the folder is not empty: add --resume to continue its run, or name another")
    # Runs of single examples once had no run.json, but saved steps and metrics.
    strange = not names.isdisjoint(CHECKPOINT) or (STEPS in names and METRICS not in names)
    if RUN not in names and strange:
        raise UserError(f"--run {folder}: the folder holds files that no run wrote (there is no {RUN}): name another")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file, or no valid object in it."""
    try:
        value = parse_json(read_bytes(path, JSON_LIMIT), str(path))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")

"""The run folder: who may write to it, what lies in it, and how a stopped run finds its way back.

    config.json, model.safetensors, tokenizer.json, ...   a Hugging Face checkpoint of the last saved step
    state.safetensors                                     everything that a resumed run needs, parameters included
    run.json                                              the choices that must agree on resume
    metrics.jsonl, tensorboard/, loss.png, summary.json   what became of it

The training state is ONE file which holds the parameters too, although the checkpoint beside it has them already: one
rename replaces it, so that no kill, whenever it comes, pairs the parameters of one step with the optimizer of another.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import params as P
from fnmodels import tree
from train.errors import UserError
from train.files import WRITING, move_into_place, write_atomic, write_text
from train.state import State

LOCK = ".lock"
RUN = "run.json"
STATE = "state.safetensors"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
PICTURE = "loss.png"
CHECKPOINT = ("config.json", "model.safetensors", "tokenizer.json")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep every other process out. The lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / LOCK, "a")  # noqa: SIM115 - closed below; its closing gives the lock back
    except OSError as error:
        raise UserError(f"--run {folder}: the folder cannot be made or written ({error.strerror})") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--run {folder}: the folder is in use by another process") from error
        for leftover in folder.glob(f"{WRITING}*"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover)
        yield


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


def save_state(path: Path, state: State, progress: dict[str, Any]) -> None:
    """State and `progress` (JSON) in one file. One metadata entry: the order of several is not determined."""
    tensors = {name: leaf.detach().contiguous() for name, leaf in tree.flatten(state).items()}
    metadata = {"progress": json.dumps(progress, sort_keys=True)}
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata))


def saved_progress(path: Path) -> dict[str, Any] | None:
    """What was saved beside the state, or None when there is no complete state file."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["progress"])
    except (OSError, SafetensorError, TypeError, KeyError, ValueError):
        return None


def load_state(path: Path, state: State) -> None:
    """Fill the tensors of a fresh state of the same structure. UserError where the file holds another structure."""
    expected = tree.flatten(state)
    with safe_open(path, framework="pt") as file, torch.no_grad():
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
        if found != {name: tuple(leaf.shape) for name, leaf in expected.items()}:
            raise UserError(f"{path} holds the state of another model or optimizer")
        for name, leaf in expected.items():
            leaf.copy_(file.get_tensor(name))


def save_checkpoint(folder: Path, config: Any, params: Any) -> None:
    """config.json and model.safetensors, each replaced whole."""
    with TemporaryDirectory(dir=folder, prefix=WRITING) as temporary:
        P.save_pretrained(temporary, config, params)
        for path in sorted(Path(temporary).iterdir()):
            move_into_place(path, folder / path.name)

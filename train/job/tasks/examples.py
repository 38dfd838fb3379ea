"""Parts that tasks on single examples share: the files of a run, its curves, summary, card and evaluation."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fnmodels import tree
from fnmodels.errors import UserError
from fnmodels.files import write_text
from fnmodels.tree import Tree
from params.checkpoint.manifest import digest
from train.job import report, run_folder
from train.job.heldout import SumOf, mean_loss
from train.job.mesh_flags import MeshSetup
from train.job.metrics_log import Row, six_digits, step_metrics
from train.job.pictures import RunRows
from train.job.settings import fixed_settings, to_toml
from train.job.task import Json
from train.optim.base import with_paths

from .settings import ExampleSettings

_READ = (".safetensors", ".json", ".txt", ".model")  # files of --init that may be read: weights, configs, tokenizers


def begin(path: Path, settings: ExampleSettings, recorded: Json | None, pictures: Sequence[Path] = ()) -> Json:
    """The identity of a run: its settings, and the bytes of its data and of the folder of its initial model.

    It is written into the run folder, with the settings. pictures: files that the data name. recorded: of the run that
    is resumed. UserError where its files were others.
    """
    heldout = [] if settings.heldout is None else [Path(settings.heldout)]
    init = [] if settings.init is None else [f for f in Path(settings.init).rglob("*") if f.suffix in _READ]
    identity: Json = {"settings": fixed_settings(settings), "init": fingerprint(init)}
    identity["data"] = fingerprint([Path(str(settings.data)), *pictures])
    if heldout:
        identity["heldout"] = fingerprint(heldout)
    for name in ("data", "init", "heldout"):
        if recorded is not None and recorded.get(name) != identity.get(name):
            raise UserError(f"--{name} is not that with which the run in {path} began, and its results depend on it")
    run_folder.write_json(path / run_folder.RUN, identity)
    write_text(path / run_folder.SETTINGS, to_toml(settings))
    return identity


def fingerprint(paths: Sequence[Path]) -> str:
    """A hash of the names and bytes of files, and of those in folders."""
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()}
    known = sorted((file.name, digest(file)) for file in files)
    return hashlib.blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()


def check_files(settings: ExampleSettings) -> None:
    """UserError where --data is missing, or a file that is named does not exist."""
    if settings.data is None:
        raise UserError("--data is needed: the examples to train on")
    for name in ("data", "init", "heldout"):
        value = getattr(settings, name)
        if value is not None and not os.path.exists(value):
            raise UserError(f"--{name} {value}: there is no such file or folder")


def shards_of(load: Callable[[], Tree], plan: Tree | None) -> Tree:
    """The parameters that `load` reads, or for a plan this rank's shards of them."""
    if plan is None:
        return load()
    full = tree.flatten(load())
    return with_paths(lambda path, sharding: sharding.distribute(full[path][sharding.local_box()].clone()), plan)


def generator_of(seed: int, step: int) -> torch.Generator:
    """The generator of a step's random draws. Those of held-out batches have negative numbers."""
    key = hashlib.blake2b(repr((seed, step)).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little"))


def rows_of(mesh_setup: MeshSetup, settings: ExampleSettings) -> int:
    """The rows that a batch must have at least, so that ranks and microbatches can share them."""
    mesh = mesh_setup.mesh
    return mesh.rows * (mesh_setup.microbatches if mesh.pp > 1 else settings.accumulate)


def columns(settings: ExampleSettings, examples: int, steps: int, measured: Mapping[str, Any]) -> Row:
    """The columns of metrics.jsonl: epochs over the examples, and what the step measured."""
    return {"epochs": {"0": six_digits(steps * settings.batch / examples)}} | step_metrics(measured, None)


def evaluated(loss: SumOf, batches: Iterable[Any]) -> Row:
    """The columns of an evaluation; empty without held-out batches."""
    known = list(batches)
    return {"heldout_loss": mean_loss(loss, known)} if known else {}


def chunks(count: int, size: int) -> Iterator[range]:
    """range(count) in pieces of `size`."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def summary_of(settings: ExampleSettings, evaluation: Row, model: Path) -> Json:
    """summary.json, which is complete with the name of the model's folder."""
    return {"steps": settings.steps, "ema": settings.ema, "model": model.name} | evaluation


def is_complete(summary: Json | None) -> bool:
    """Whether summary.json is complete and valid: it has no checksum."""
    return isinstance((summary or {}).get("model"), str)


def report_result(summary: Json, path: Path) -> None:
    """The last lines of a run."""
    if "heldout_loss" in summary:
        print(f"held out: loss {summary['heldout_loss']:.4f}")
    print(f"curves: {path / run_folder.PICTURE}\nmodel: {path / Path(summary['model']).name}")


def draw(path: Path, rows: list[Row], costs: list[Row]) -> None:
    report.draw_runs(path / run_folder.PICTURE, {path.name: RunRows(rows, costs)}, unit="")


def results(summary: Json | None) -> dict[str, str]:
    """The rows of the model card."""
    if summary is None:
        return {}
    held = summary.get("heldout_loss")
    return {"held-out loss": "not measured" if held is None else f"{held:.4f}"}

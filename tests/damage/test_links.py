"""Nothing is written through a link: each file and folder of each writer is planted as one that leads elsewhere."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

import params as P
from fnmodels.errors import UserError
from params.checkpoint.manifest import MANIFEST, write_manifest
from params.io.staging import LOCK
from train.data import pictures
from train.eval import pretrained
from train.job import metrics_log, run_folder
from train.job.trackers import TensorBoard

from .writers import PARAMS, SMALL, WRITERS, Writer

REFUSALS = (P.CheckpointError, UserError, OSError)


def _log(folder: Path, number: int) -> None:
    with run_folder.locked(folder):
        run_folder.acquire(folder, "start")
        log = metrics_log.MetricsLog(folder, [TensorBoard(folder, 0)])
        try:
            log.write({"step": number, "loss": 1.0}, {"step": number, "seconds": 1.0})
            log.sample(number, "text")
            log.sync()
        finally:
            log.close()


def _companions(folder: Path, number: int) -> None:
    source = folder.parent / "source"
    source.mkdir(exist_ok=True)
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (source / name).write_text("{}")
    pretrained.copy_companions(source, folder)


def _grid(folder: Path, number: int) -> None:
    pictures.write_grid(folder / "samples.png", [[torch.zeros(3, 4, 4)]])


MORE = (
    Writer("the logs of a run", _log, lambda folder: None),
    Writer("companions of a model", _companions, lambda folder: None),
    Writer("a grid of pictures", _grid, lambda folder: None),
)
# names that a writer removes or locks, and that are not there when it is done
PASSING: dict[str, tuple[str, ...]] = {
    "a model": (LOCK, "model.safetensors.index.json", "model-00001-of-00002.safetensors"),
    "adapters": (LOCK,),
    "an embedder": (LOCK,),
    "a step": (LOCK,),
    "the logs of a run": ("wandb", "mlruns", "mlflow.db", "ema", "steps"),
}


def planted() -> list[tuple[Writer, str]]:
    """(writer, name) of each file and folder that a writer makes, found by letting it write."""
    found: list[tuple[Writer, str]] = []
    for writer in (*WRITERS, *MORE):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "it"
            folder.mkdir()
            writer.write(folder, 1)
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        names = [name for name in names if not name.startswith("tensorboard/") and name != "fnmodels"]
        found += [(writer, name) for name in (*names, *PASSING.get(writer.name, ()))]
    return found


def state(folder: Path) -> dict[str, bytes]:
    """Every file below, with its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
@pytest.mark.parametrize(("writer", "name"), [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in planted()])
def test_a_writer_changes_nothing_behind_a_link(writer: Writer, name: str, kind: str, tmp_path: Path) -> None:
    private, folder = tmp_path / "private", tmp_path / "it"
    (private / "folder").mkdir(parents=True)
    (private / "file").write_text("private")
    (private / "folder" / "config.json").write_text("private")
    before = state(private)
    path = folder / name
    path.parent.mkdir(parents=True)
    path.symlink_to(private / kind)
    message = ""
    try:
        writer.write(folder, 1)
    except REFUSALS as error:
        message = str(error)
    assert message == "" or Path(name).name in message or str(folder) in message
    assert state(private) == before
    assert sorted(os.listdir(private)) == ["file", "folder"] and os.listdir(private / "folder") == ["config.json"]


@pytest.mark.parametrize(
    "name", ["../private/file", "/private/file", "a/../../private/file", "link/file", "..", "a\\b", ""]
)
def test_a_manifest_of_a_stranger_replaces_nothing_elsewhere(name: str, tmp_path: Path) -> None:
    """A leftover whose manifest and files are all right, but for the name of one that leads out."""
    private, folder = tmp_path / "private", tmp_path / "it"
    private.mkdir()
    (private / "file").write_text("private")
    left = folder / ".saving-00000001-0123456789abcdef"
    P.save_pretrained(left, SMALL, PARAMS)
    (left / MANIFEST).unlink()
    (left / "evil").write_text("evil")
    write_manifest(left)
    text = (left / MANIFEST).read_text().replace('"evil"', f'"{name}"'.replace("\\", "\\\\"))
    (left / MANIFEST).write_text(text)
    (left / "link").symlink_to(private)
    (folder / "link").symlink_to(private)
    with pytest.raises(P.CheckpointError, match="cannot be finished"):
        P.recover(folder)
    with pytest.raises(P.CheckpointError, match="cannot be finished"):
        P.save_pretrained(folder, SMALL, PARAMS)
    assert state(private) == {"file": b"private"} and sorted(os.listdir(tmp_path)) == ["it", "private"]


@pytest.mark.parametrize("name", [*run_folder.FOLDERS, ".lock", "mlflow.db", "mlflow.db-journal", "mlflow.db-wal"])
def test_a_run_does_not_start_where_a_link_is_in_the_place_of_its_folders(name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(P.UnsafePathError, match=f"{name} is a link"), run_folder.locked(tmp_path / "run"):
        pass
    assert os.listdir(tmp_path / "elsewhere") == [] and set(os.listdir(tmp_path / "run")) <= {
        Path(name).parts[0],
        ".lock",
    }


def test_a_run_folder_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    _log(tmp_path / "run", 1)
    assert "metrics.jsonl" in os.listdir(tmp_path / "elsewhere")

"""--track: a run and its continuation in a real local store of MLflow, and in real offline files of W&B."""

import json
import shutil
import time
from pathlib import Path

import pytest

from fnmodels.errors import UserError
from params.checkpoint.manifest import write_manifest
from train.cli import main
from train.job import run_folder
from train.job.metrics_log import MetricsLog, read_rows
from train.job.settings import Settings, from_json, to_toml
from train.job.trackers import WandB, _tracked, trackers

ROWS = [{"step": step, "loss": 5.25 - step / 7, "epochs": {"0": step / 10}} for step in (1, 2, 3)]


def log(path: Path, track: str, rows: list[dict], after: int) -> None:
    """Logs the rows and a sample as one start of a run does."""
    found = trackers(path, after=after, track=track, settings={"seed": 3, "optimizer": "adamw"})
    written = MetricsLog(path, found)
    for row in rows:
        written.write(row, {"step": row["step"], "seconds": 0.5})
    written.sample(rows[-1]["step"], f"def f{rows[-1]['step']}")
    written.sync()
    written.close()


def test_mlflow_has_every_step_of_a_run_and_its_continuation_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tiny")
    log(tmp_path, "mlflow", ROWS[:2], after=0)
    log(tmp_path, "mlflow", ROWS[2:], after=2)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params == {"seed": "3", "optimizer": "adamw"}
    for name, values in {"loss": [row["loss"] for row in ROWS], "epochs/0": [0.1, 0.2, 0.3]}.items():
        history = client.get_metric_history(found.info.run_id, name)
        assert {metric.step: metric.value for metric in history} == dict(enumerate(values, 1))
        assert len(history) == 3
    assert [file.path for file in client.list_artifacts(found.info.run_id, "sample")] == [
        "sample/2.txt",
        "sample/3.txt",
    ]


def test_wandb_has_every_step_in_its_offline_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(tmp_path, "wandb", ROWS[:2], after=0)
    log(tmp_path, "wandb", ROWS[2:], after=2)
    identity = run_folder.read_json(tmp_path / run_folder.TRACKED)["wandb"]
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2  # of the start and of the continuation, under one id
    last, until = json.dumps(ROWS[-1]["loss"]).encode(), time.monotonic() + 60
    while last not in files[1].read_bytes() and time.monotonic() < until:
        time.sleep(0.1)  # wandb's own process writes, and its end does not wait for the disk on a busy machine
    first, second = (file.read_bytes() for file in files)
    for row in ROWS:
        assert (json.dumps(row["loss"]).encode() in first) is (row["step"] < 3)
        assert (json.dumps(row["loss"]).encode() in second) is (row["step"] == 3)
    assert b"def f2" in first and b"adamw" in first and b"def f3" in second


def test_the_main_job_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.db'}")
    text, path = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    tiny = Settings(**sizes, row_length=32, steps=2, eval_rows=2, sample_tokens=2)
    assert main(["--run", str(path), "--data", str(text), "--track", "mlflow"], defaults=tiny) == 0
    client, identity = MlflowClient(), run_folder.read_json(path / run_folder.TRACKED)["mlflow"]
    history = client.get_metric_history(identity, "heldout_loss")
    rows = read_rows(path / run_folder.METRICS)
    assert {m.step: m.value for m in history} == {row["step"]: row["heldout_loss"] for row in rows}
    assert client.get_run(identity).data.params["hidden_size"] == "16"


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("train.command_line.find_spec", lambda name: None if name == "wandb" else name)
    assert main(["--run", str(tmp_path / "run"), "--track", "wandb"]) != 0
    assert 'wandb must be installed for this: pip install "fnmodels[wandb]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["settings.toml", "run.json", "progress.json", "config"])
def test_resume_of_a_run_whose_files_name_a_tracker_starts_none(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger's folder, perhaps: what it says about trackers is refused, or left alone with a line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text, path = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    tiny = Settings(**sizes, row_length=32, steps=2, eval_rows=2, sample_tokens=2)
    assert main(["--run", str(path), "--data", str(text)], defaults=tiny) == 0
    (path / run_folder.SUMMARY).unlink()
    (path / run_folder.TRACKED).write_text(json.dumps({"wandb": "abc"}))
    started: list[object] = []
    monkeypatch.setattr("train.job.trackers.WandB", lambda *_: started.append(1))
    monkeypatch.setattr("train.command_line.find_spec", lambda name: name)
    flags: list[str] = []
    if place == "settings.toml":
        with (path / run_folder.SETTINGS).open("a") as file:
            file.write('track = "wandb"\n')
        said = f"{path / run_folder.SETTINGS}: track is not read from a file"
    elif place == "config":
        (tmp_path / "own.toml").write_text('track = "wandb"\n')
        flags, said = (
            ["--config", str(tmp_path / "own.toml")],
            f"{tmp_path / 'own.toml'}: track is not read from a file",
        )
    elif place == "run.json":
        recorded = json.loads((path / run_folder.RUN).read_text())
        recorded["settings"]["track"] = "wandb"
        (path / run_folder.RUN).write_text(json.dumps(recorded))
        shutil.rmtree(path / run_folder.STEPS)
        said = ""
    else:
        (step,) = (path / run_folder.STEPS).glob("step-*")
        progress = json.loads((step / "progress.json").read_text())
        progress["progress"]["run"]["settings"]["track"] = "wandb"
        (step / "progress.json").write_text(json.dumps(progress))
        (step / "fnmodels_manifest.json").unlink()
        write_manifest(step)
        said = "is of a version with other settings (track)"
    capsys.readouterr()
    code = main(["--run", str(path), "--resume", *flags], defaults=tiny)
    out, error = capsys.readouterr()
    assert code == (2 if said else 0) and said in error and not started
    assert said or "not tracked from here on: give --track wandb again to continue there" in out


def test_a_tracked_id_or_a_settings_file_of_strangers_is_refused(tmp_path: Path) -> None:
    for identity in ("../a", "a" * 65, 3, ["a"], "a\nb", ""):
        (tmp_path / run_folder.TRACKED).write_text(json.dumps({"mlflow": identity}))
        with pytest.raises(UserError, match="no id of a run"):
            _tracked(tmp_path, "mlflow")
    pytest.importorskip("wandb")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:1\n")
    with pytest.raises(UserError, match="W&B would read it"):
        WandB(tmp_path, {})


def test_track_is_written_as_no_setting() -> None:
    assert "\n# track =\n" in to_toml(Settings(track="wandb"))
    assert from_json({"track": "wandb", "steps": 3}) == {"steps": 3}

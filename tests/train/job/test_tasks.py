"""The tasks beside language modeling in the one loop: averages, held-out data, signals, and steps saved before."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import params as P
from fnmodels import clip, tree
from tests.train.commands.test_documents import CONFIG, LABELS, PAIRS, SIZES, WORDS, folder_of, lines
from tests.train.commands.test_flow import SIZES as FLOW_SIZES
from tests.train.commands.test_flow import tensors
from tests.train.job.test_run import stop_after
from train.checkpoint import saved_steps
from train.commands import documents, flow
from train.job.tasks.encoder import in_rows, packed

KINDS = ("pairs", "labels", "masked", "captions", "flow")
FLAGS = ("--batch", "4", "--steps", "4", "--save-every", "2", "--learning-rate", "3e-3")


def clip_folder(folder: Path) -> Path:
    vision = SIZES | {"image_size": 12, "patch_size": 6, "initializer_range": 0.1}
    text = SIZES | {"vocab_size": len(WORDS), "max_position_embeddings": 8, "bos_token_id": 2, "eos_token_id": 3}
    values = {"model_type": "clip", "projection_dim": 20, "vision_config": vision, "text_config": text}
    return folder_of(folder, clip.Config.from_hf(values))


def command_of(kind: str, folder: Path) -> list[str]:
    """The flags of a run of this kind beside those of all, after writing its data and initial model."""
    data, init = folder / f"{kind}.jsonl", folder / kind
    if kind == "flow":
        save_file(tensors(), data)
        return ["--data", str(data), *FLOW_SIZES]
    rows: Any = {"pairs": PAIRS, "labels": LABELS, "masked": [{"text": f"w{i} w9 w{i + 7}"} for i in range(6)]}
    if kind == "captions":
        from PIL import Image

        for i in range(6):
            Image.new("RGB", (14 + i, 20), (40 * i, 255 - 40 * i, 90)).save(folder / f"{i}.png")
        rows["captions"] = [{"image": f"{i}.png", "text": f"w{i} w{i + 7}"} for i in range(6)]
        clip_folder(init)
    else:
        folder_of(init, CONFIG if kind != "pairs" else replace(CONFIG, head="none", pooler=0))
    lines(data, rows[kind])
    return ["--data", str(data), "--init", str(init), "--loss", kind]


def train(kind: str, run: Path, flags: list[str], *more: str) -> int:
    main: Callable[..., int] = flow.main if kind == "flow" else documents.main
    return main(["--run", str(run), *flags, *FLAGS, *more])


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def model_of(run: Path) -> dict[str, torch.Tensor]:
    folder = run / ("transformer" if (run / "transformer").is_dir() else "model")
    return tree.flatten(P.load_pretrained(folder)[1])


def files_of(run: Path) -> dict[str, bytes]:
    """The bytes of what a run writes and no clock moves."""
    folders = [run / name for name in ("transformer", "model", "ema", "steps/step-00000004")]
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return {str(file.relative_to(run)): file.read_bytes() for file in (*files, run / "metrics.jsonl")}


@pytest.mark.parametrize("kind", ["masked", "flow"])
def test_task_stopped_by_a_signal_resumes_to_the_same_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*command_of(kind, tmp_path), "--ema", "0.5", "--heldout", str(tmp_path / f"{kind}.jsonl")]
    assert train(kind, tmp_path / "whole", flags, "--profile", "1") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(kind, tmp_path / "parts", flags) == 130
    script = "fnmodels-flow" if kind == "flow" else "fnmodels-documents"
    assert f"{script} --run {tmp_path / 'parts'} --resume" in capsys.readouterr().out
    assert train(kind, tmp_path / "parts", flags, "--resume") == 0
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    assert {name.split("/")[0] for name in files_of(tmp_path / "parts")} >= {"ema", "steps"}
    rows, summary = rows_of(tmp_path / "whole"), json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["heldout_loss"] == rows[-1]["heldout_loss"] > 0 and all("epochs" in row for row in rows)
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "4 of 4 steps" in card and f"{script} --config" in card and str(tmp_path) not in card
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names >= {"loss.png", "speed.jsonl", "tensorboard", "settings.toml", "run.json", "trace.json"}


@pytest.mark.parametrize("kind", ["pairs", "flow"])
def test_steps_that_recorded_flags_alone_are_resumed(kind: str, tmp_path: Path) -> None:
    """Runs of these commands once saved their flags beside the state, and no run.json."""
    flags = command_of(kind, tmp_path)
    assert train(kind, tmp_path / "whole", flags) == 0
    run = tmp_path / "earlier"
    shutil.copytree(tmp_path / "whole" / "steps" / "step-00000002", run / "found")
    recorded = json.loads((run / "found" / "progress.json").read_text())["progress"]["run"]
    of_flags = ("batch", "steps", "seed", "learning_rate", "clip")
    of_flags += (
        ("loss", "length", "temperature")
        if kind == "pairs"
        else ("guidance", "accumulate", "layers", "single_layers", "heads", "head_dim")
    )
    given = {name: recorded["settings"][name] for name in of_flags}
    progress = given | {name: recorded[name] for name in ("data", "init")}
    (run / "steps").mkdir()
    with saved_steps.commit(run / "steps", 2, progress) as folder:
        shutil.copy(run / "found" / saved_steps.STATE, folder)
    shutil.rmtree(run / "found")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n')
    assert train(kind, run, flags, "--resume") == 0
    found, wanted = model_of(run), model_of(tmp_path / "whole")
    assert all(torch.equal(found[path], leaf) for path, leaf in wanted.items())


def test_rows_of_whole_examples_hold_what_one_row_holds() -> None:
    documents = [[[5, 6, 7], [8]], [[9, 10]], [[11], [12], [13, 14]]]
    row, sizes = packed(documents, labels=[0, 0, 1, 2, 2, 2])
    assert in_rows(row, sizes, 1) is row
    for rows in (2, 3, 4):
        batch = in_rows(row, sizes, rows)
        assert len(batch["tokens"]) == rows
        valid = batch["segment_ids"] > 0
        for name in ("tokens", "positions", "labels"):
            assert torch.equal(batch[name][valid], row[name].flatten()), name
        assert (batch["labels"][~valid] == -100).all()
        first = batch["segment_ids"][0][valid[0]]
        assert int(first[0]) == 1 and int(batch["segment_ids"].max()) <= 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--mesh", "fsdp=3"), "--mesh fsdp=3 is of 3 processes"),
        (("--heldout", "nowhere"), "there is no such file or folder"),
        (("--optimizer", "sgd", "--betas", "0.9,0.9"), "is of another optimizer than --optimizer sgd"),
        (("--accumulate", "5"), "--batch is 4"),
    ],
)
def test_settings_of_tasks_that_cannot_be_are_one_sentence(
    flags: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    if "--mesh" in flags:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    assert train("labels", tmp_path / "run", command_of("labels", tmp_path), *flags) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error


def test_labels_of_heldout_examples_must_be_those_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = lines(tmp_path / "held", [{"text": "w1", "label": "strange"}])
    flags = ["--heldout", str(held)]
    assert train("labels", tmp_path / "run", [*command_of("labels", tmp_path), *flags]) == 2
    assert "--heldout has the label 'strange', which no example of --data has" in capsys.readouterr().err

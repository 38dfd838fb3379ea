"""Copies of runs behind URLs: a step is complete or not there, and another machine continues with the same bits."""

import contextlib
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fnmodels.errors import UserError
from params.checkpoint.manifest import MANIFEST
from tests.train.job.test_run import TINY, same, saved, stop_after
from train.cli import main
from train.job import mirror
from train.job.settings import read_toml

FILES = {"run.json": "{}", "metrics.jsonl": "", "model.safetensors": "weights", MANIFEST: "of the model"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    return path


def train(run: Path, *flags: Any) -> int:
    return main(["--run", str(run), *map(str, flags)], defaults=TINY)


def test_a_run_continues_on_another_machine_with_the_same_bits(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, flags = f"file://{tmp_path / 'there'}", ("--data", text, "--save-every", 2)
    assert train(tmp_path / "whole", *flags) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        assert train(tmp_path / "run", *flags, "--mirror", url) == 130
    assert saved(tmp_path / "there") == saved(tmp_path / "run") == [2, 4]
    shutil.rmtree(tmp_path / "run")  # the machine is lost
    partial = tmp_path / "there" / "steps" / "step-00000005"
    shutil.copytree(partial.with_name("step-00000004"), partial)
    (partial / MANIFEST).unlink()  # an upload that was cut short
    assert train(tmp_path / "run", *flags, "--mirror", url, "--resume") == 0
    assert "restored step 4 from file://" in capsys.readouterr().out
    assert same(tmp_path / "whole", tmp_path / "run") == []
    assert same(tmp_path / "whole", tmp_path / "there") == []  # the copy is a complete run folder
    assert saved(tmp_path / "there") == [4, 5, 6]  # of 5 without its manifest nothing is used


def make_run(folder: Path, *steps: int) -> Path:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    for step in steps:
        place = folder / "steps" / f"step-{step:08d}"
        place.mkdir(parents=True)
        for name in ("progress.json", "state.safetensors", MANIFEST):
            (place / name).write_text(f"{name} of {step}")
    return folder


def test_a_step_is_there_only_once_all_of_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    run = make_run(tmp_path / "run", 1, 2)
    copy = mirror.Mirror("memory://copies/a", run)
    real, left = type(memory).put_file, [0]

    def failing(self: Any, path: str, place: str, **options: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the network is down")
        real(self, path, place, **options)

    monkeypatch.setattr(type(memory), "put_file", failing)
    for number in range(12):
        left[0] = number
        with contextlib.suppress(OSError):
            copy.upload()
        for step in mirror.complete_steps(memory, "/copies/a"):
            names = {Path(name).name for name in memory.ls(f"/copies/a/steps/step-{step:08d}", detail=False)}
            assert names == {"progress.json", "state.safetensors", MANIFEST}
    assert mirror.complete_steps(memory, "/copies/a") == [1, 2]
    assert not memory.exists("/copies/a/model.safetensors") and memory.exists("/copies/a/run.json")
    shutil.rmtree(run / "steps" / "step-00000001")  # as --keep removes it
    copy.finish()
    assert mirror.complete_steps(memory, "/copies/a") == [2] and memory.exists("/copies/a/model.safetensors")
    memory.rm("/copies", recursive=True)


def test_uploads_run_in_the_background_and_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = mirror.Mirror("memory://copies/b", make_run(tmp_path / "run", 1))
    free, calls = threading.Event(), list[int]()

    def upload(**options: Any) -> None:
        calls.append(threading.get_ident())
        assert free.wait(10)
        if len(calls) == 1:
            raise OSError("the network is down")

    monkeypatch.setattr(copy, "upload", upload)
    copy.look()
    copy.look()  # returns while the upload hangs
    free.set()
    while copy._running and not copy._running.done():
        pass
    copy.look()
    assert "an upload failed and is repeated: the network is down" in capsys.readouterr().out
    copy.finish()
    assert len(calls) == 3 and calls[0] == calls[1] != threading.get_ident()


def test_a_mirror_is_not_named_by_files_and_its_errors_are_sentences(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text('mirror = "memory://x"\n')
    with pytest.raises(UserError, match="mirror is not read from a file"):
        read_toml(tmp_path / "a.toml")
    assert train(tmp_path / "run", "--data", text, "--mirror", "nothing://x", "--resume") == 2
    assert re.search("nothing://x: its file system cannot be opened", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://bucket/a", "its file system cannot be opened"),
        ("file:///proc/nothing/a", "nothing can be written there: [Errno"),
    ],
)
def test_a_mirror_that_cannot_be_written_is_refused_before_the_text_is_read(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], url: str, said: str
) -> None:
    assert train(tmp_path / "run", "--data", text, "--mirror", url) == 2
    out, err = capsys.readouterr()
    assert f"--mirror {url}: {said}" in err
    assert "reading the text" not in out and not (tmp_path / "run").exists()


def test_a_check_of_a_mirror_leaves_nothing_there(tmp_path: Path) -> None:
    mirror.check_writable(f"file://{tmp_path / 'there'}")
    assert list((tmp_path / "there").iterdir()) == []

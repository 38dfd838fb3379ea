"""The main job on streams: the same run after a stop, and what is refused; over a mesh in test_own_family.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from fnmodels.errors import UserError
from tests.train.job.test_run import TINY, rows, same, stop_after
from train.cli import main
from train.data.sources import absolute_paths, parse_sources
from train.job.settings import read_toml

TEXTS = [f"def f{i}(x):\n    return x + {i} * {i % 7}\n\n" for i in range(1200)]
SOURCE = """
def texts():
    return ({"text": "".join(f"{i} apples and {i % 3} pears, " for _ in range(4))} for i in range(900))
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) for text in TEXTS[400 * number : 400 * (number + 1)]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines[:9] + ["{no"] + lines[9:]))
    return folder


def train(path: Path, *flags: Any) -> int:
    return main(["--run", str(path), *map(str, flags)], defaults=TINY)


def test_a_stopped_stream_continues_with_the_same_bits(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    data = ("--data", f"file://{notes}:3,{tmp_path / 'mine.py'}:texts:1", "--stream", "5", "--prompt", "def ")
    assert train(tmp_path / "whole", *data) == 0
    assert "a stream and 0.0" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        assert train(tmp_path / "run", *data) == 130
    assert train(tmp_path / "run", "--resume") == 2
    assert "mine.py:texts" in capsys.readouterr().err  # code that a folder may not run
    assert train(tmp_path / "run", "--resume", *data) == 0
    assert same(tmp_path / "whole", tmp_path / "run") == []
    progress = json.loads(next((tmp_path / "run" / "steps").glob("step-*6/progress.json")).read_text())
    cursors = [place["cursor"] for place in progress["progress"]["data_position"]]
    assert len(cursors) == 2 and any(place != [0, 0, 0, 0] for place in cursors)
    assert "jsonl, byte" in (tmp_path / "run" / "skipped.txt").read_text()
    assert 0 < rows(tmp_path / "run")[-1]["epochs"]["0"] < 0.2
    assert "# data =" in (tmp_path / "run" / "settings.toml").read_text()


def test_a_broken_record_stops_a_strict_stream(tmp_path: Path, notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--data", notes, "--stream", 1000, "--broken", "stop") == 2
    assert "a record of the stream cannot be read" in capsys.readouterr().err


def test_what_cannot_be_a_stream_is_refused(tmp_path: Path, notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--stream", 8) == 2
    assert "--stream 8 is for text that --data names" in capsys.readouterr().err
    assert train(tmp_path / "run", "--data", "nowhere_at_all:texts") == 2
    assert "there is no module 'nowhere_at_all'" in capsys.readouterr().err
    few = tmp_path / "few.txt"
    few.write_text("few words")
    assert train(tmp_path / "run", "--data", few, "--stream", 8) == 2
    assert "can be read without --stream." in capsys.readouterr().err
    few.with_suffix(".jsonl").write_text('{"txt": "few words"}\n' * 300)
    assert train(tmp_path / "run", "--data", few.with_suffix(".jsonl"), "--stream", 8) == 2
    assert "(few.jsonl, byte 0: no field 'text' or 'messages' among txt)" in capsys.readouterr().err
    (tmp_path / "a.toml").write_text('data = "mine.py:texts"\n')
    with pytest.raises(UserError, match="names code"):
        read_toml(tmp_path / "a.toml")


def test_urls_and_import_paths_of_data_are_recorded_as_they_are(tmp_path: Path) -> None:
    text = "s3://bucket/notes:3,mine.py:texts:0.5,books"
    recorded = absolute_paths(text, tmp_path)
    assert recorded == f"s3://bucket/notes:3,{tmp_path / 'mine.py'}:texts:1/2,{tmp_path / 'books'}"
    names = [str(item) for item, _ in parse_sources(recorded)]
    assert names == ["s3://bucket/notes", f"{tmp_path / 'mine.py'}:texts", str(tmp_path / "books")]

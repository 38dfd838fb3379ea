"""The cache on disk: private, shown by kind, cleared, and without what killed writers left."""

import os
import time
from pathlib import Path

import pytest

import train.cache
from fnmodels.errors import UserError
from fnmodels.files import WRITING
from train.data.cache import KINDS, cached


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fnmodels"


def _cached(name: str, text: str = "made") -> str:
    return cached(name, lambda path: path.write_text(text), lambda path: path.read_text())


def test_a_file_is_made_once_in_a_folder_that_others_cannot_read(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    assert _cached("tokens-0.json") == _cached("tokens-0.json", "again") == "made"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("make", ["link", "pipe", "folder"])
def test_what_is_no_file_is_made_again_and_nothing_is_written_elsewhere(make: str, folder: Path) -> None:
    folder.mkdir()
    (folder.parent / "private").write_text("private")
    {
        "link": lambda path: path.symlink_to("../private"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
    }[make](folder / "tokens-0.json")
    assert _cached("tokens-0.json") == "made"
    assert (folder.parent / "private").read_text() == "private"


def test_what_a_killed_writer_left_is_removed_by_the_next(folder: Path) -> None:
    left = folder / f"{WRITING}left"
    left.mkdir(parents=True)
    os.utime(left, (time.time() - 100, time.time() - 100))
    _cached("tokens-0.json")
    assert [path.name for path in folder.iterdir()] == ["tokens-0.json"]


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(UserError, match=r"fnmodels cannot be written .*: set XDG_CACHE_HOME"):
        _cached("tokens-0.json")


def test_the_command_shows_each_kind_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        _cached(f"{kind}-0a.safetensors", "x" * 1500)
    _cached("tokens-1b.safetensors", "x" * 1500)
    (folder / "mine.txt").write_text("mine")
    (folder / "tokens-2.json").symlink_to("mine.txt")
    for flags, done in (([], "in"), (["--clear"], "removed from")):
        assert train.cache.main(flags) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(KINDS) + 1
        assert lines[0].split()[:4] == ["3", "kB", "2", "files,"] and KINDS["tokens"] in lines[0]
        assert lines[-1] == f"   10.5 kB  7 files {done} {folder}"
    assert sorted(path.name for path in folder.iterdir()) == ["mine.txt", "tokens-2.json"]
    assert train.cache.main([]) == 0
    assert capsys.readouterr().out == f"       0 B  0 files in {folder}\n"

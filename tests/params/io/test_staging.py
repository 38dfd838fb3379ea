"""Staging folders and the lock against concurrent saves."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels import llama
from params.checkpoint.manifest import MANIFEST
from params.io.staging import LOCK, STAGING, describe_os_error, folder_lock, staging_folder
from tests.support.cases import generic_params
from train import checkpoint

SMALL = llama.Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def test_what_a_killed_saver_left_goes_and_what_one_at_work_has_stays(tmp_path: Path) -> None:
    (tmp_path / f"{STAGING}of-a-kill").mkdir()
    with staging_folder(tmp_path) as mine:
        assert [path.name for path in tmp_path.glob(f"{STAGING}*")] == [mine.name]
        with pytest.raises(BlockingIOError, match="Another save into this folder"), staging_folder(tmp_path):
            pass
        assert mine.exists()
    assert list(tmp_path.iterdir()) == []


def test_it_honors_the_umask_and_makes_the_folder(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with staging_folder(tmp_path / "new" / "one") as mine:
            os.rename(mine, tmp_path / "done")
    finally:
        os.umask(old)
    assert (tmp_path / "done").stat().st_mode & 0o777 == 0o750
    assert list((tmp_path / "new" / "one").iterdir()) == []


def test_a_lock_whose_file_was_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder removes the lock file between another's open and lock; a third may hold the new file."""
    real, calls = fcntl.flock, []

    def slow(handle: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with folder_lock(tmp_path) as alone:
        assert alone and (tmp_path / LOCK).exists()
        with pytest.raises(BlockingIOError), folder_lock(tmp_path):
            pass
    assert not (tmp_path / LOCK).exists()


def test_without_locks_it_warns_and_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", absent)
    (tmp_path / f"{STAGING}of-another").mkdir()
    with pytest.warns(UserWarning, match="file system without locks"), staging_folder(tmp_path) as mine:
        assert len(list(tmp_path.glob(f"{STAGING}*"))) == 2 and mine.exists()


def test_other_errors_of_flock_are_raised_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output"), folder_lock(tmp_path):
        pass


def test_a_sentence_of_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, describe_os_error(tmp_path, "Nothing was written", "all is well"):
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path)
    assert caught.value.strerror == "Nothing was written (No space left on device); all is well"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no other way to learn what a handle is of")
@pytest.mark.parametrize("what", ["a step", "a model"])
def test_everything_is_on_disk_before_it_gets_its_name(what: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The order of flushes, for power cuts: files, their folder, the rename, the parent folder."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def flushed(handle: int) -> None:
        events.append(("flush", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(real: Any) -> Any:
        def wrapped(source: Path, target: Path) -> None:
            events.append(("rename", str(source)))
            real(source, target)

        return wrapped

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed(rename))
    monkeypatch.setattr(os, "replace", renamed(replace))
    folder = tmp_path / "new"
    if what == "a step":
        names = [*(path.name for path in checkpoint.save(folder, 1, {"w": torch.ones(3)}).iterdir()), ""]
    else:
        P.save_pretrained(folder, SMALL, generic_params(SMALL), max_shard_size="3KB")
        names = [path.name for path in folder.iterdir()]
    made = events.index(("rename", next(path for _, path in events if path.endswith(f"{MANIFEST}.part"))))
    first = next(i for i, (kind, _) in enumerate(events) if kind == "rename" and i > made)
    temporary = Path(events[made][1]).parent
    before = {path for kind, path in events[:first] if kind == "flush"}
    assert before >= {str(temporary / name).removesuffix("/") for name in names} - {str(temporary / MANIFEST)}
    assert {path for kind, path in events[:made] if kind == "flush"} >= {events[made][1], str(tmp_path)}
    assert events[made + 1] == ("flush", str(temporary)) and events[-1] == ("flush", str(folder))
    assert (what == "a step") == (events[first:] == [("rename", str(temporary)), ("flush", str(folder))])

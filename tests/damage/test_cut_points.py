"""Every kind of save, ended before each change of the file system or on a full disk: old, new or recovered, no mix."""

import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import params as P

from .cuts import copied, exit_before, fail_at, with_file_size
from .writers import WRITERS, Writer, content


def versions(writer: Writer, older: bool, tmp_path: Path) -> tuple[Path, Any, Any, Any]:
    """(a folder with the older version or nothing, its content, that of version 2 over it and of version 3)"""
    base = tmp_path / "base"
    base.mkdir()
    if older:
        writer.write(base, 1)
    old = content(writer, base)
    found = [old]
    for number in (2, 3):
        folder = copied(base, tmp_path / f"version-{number}")
        writer.write(folder, number)
        found.append(content(writer, folder))
    assert found[1] is not None and found[2] is not None and found[1] != found[2] != old != found[1]
    return base, *found


def leftovers(folder: Path) -> list[Path]:
    return [path for pattern in (".saving*", ".writing*", "*.tmp") for path in folder.rglob(pattern)]


def check(writer: Writer, folder: Path, states: tuple[Any, Any, Any], done: bool) -> Any:
    """The content after a cut, with all that must hold then."""
    old, new, newer = states
    now = content(writer, folder)
    assert now in (old, new, None), "a mix"
    assert not done or now == new
    if writer.recovers:
        copy = copied(folder, folder.with_name(f"{folder.name}-recovered"))
        if P.recover(copy):
            assert content(writer, copy) == new and not leftovers(copy)
            P.verify(copy)
        else:
            assert now == content(writer, copy) and (now is not None or old is None)
        assert not P.recover(copy)
    else:
        assert now is not None or old is None or writer.disposable
    writer.write(folder, 3)
    assert content(writer, folder) == newer and not (writer.recovers and leftovers(folder))
    return now


# Over an older version, and anew where a writer's first version is not that of another writer here.
EXITS = [(writer, older) for older in (True, False) for writer in WRITERS if older or not writer.changes]


@pytest.mark.parametrize(
    ("writer", "older"), EXITS, ids=[f"{writer}-{'over an older one' if older else 'anew'}" for writer, older in EXITS]
)
def test_an_exit_before_any_change_leaves_old_new_or_what_recover_finishes(
    writer: Writer, older: bool, tmp_path: Path
) -> None:
    base, *states = versions(writer, older, tmp_path)
    seen = []
    for cut in count():
        folder = copied(base, tmp_path / f"cut-{cut}")
        done = exit_before(cut, lambda folder=folder: writer.write(folder, 2))
        seen.append(check(writer, folder, (states[0], states[1], states[2]), done))
        if done:
            break
    assert cut > 2 and states[1] in seen and states[0] in seen


@pytest.mark.parametrize("writer", [writer for writer in WRITERS if writer.recovers], ids=str)
def test_an_exit_of_recover_is_finished_by_the_next(writer: Writer, tmp_path: Path) -> None:
    base, *states = versions(writer, True, tmp_path)
    for cut in count():
        torn = copied(base, tmp_path / f"cut-{cut}")
        done = exit_before(cut, lambda torn=torn: writer.write(torn, 2))
        if done or content(writer, torn) is None:
            break
    if done:
        return  # a single rename is the whole change
    for again in count():
        folder = copied(torn, tmp_path / f"again-{again}")
        done = exit_before(again, lambda folder=folder: P.recover(folder))
        assert content(writer, folder) in (None, states[1])
        assert P.recover(folder) or content(writer, folder) == states[1]
        assert content(writer, folder) == states[1]
        if done:
            break
    assert again > 2


@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_a_disk_full_from_any_change_on_is_an_error_and_loses_nothing(writer: Writer, tmp_path: Path) -> None:
    base, *states = versions(writer, True, tmp_path)
    for cut in count():
        folder = copied(base, tmp_path / f"cut-{cut}")
        done, error = fail_at(cut, lambda folder=folder: writer.write(folder, 2))
        assert done or "No space left on device" in error
        check(writer, folder, (states[0], states[1], states[2]), done)
        if done:
            break


@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_a_file_that_ends_at_any_of_20_offsets_is_an_error_and_leaves_the_older(writer: Writer, tmp_path: Path) -> None:
    base, *states = versions(writer, True, tmp_path)
    largest = max(path.stat().st_size for path in (tmp_path / "version-2").rglob("*") if path.is_file())
    for part in range(20):
        folder = copied(base, tmp_path / f"part-{part}")
        done, error = with_file_size(largest * part // 20, lambda folder=folder: writer.write(folder, 2))
        assert not done and ("File too large" in error or "cannot be written" in error), error
        assert content(writer, folder) == states[0] or writer.disposable
        assert not leftovers(folder)


@pytest.mark.parametrize("kind", ["adapters of another rank", "a model of another config", "an embedder"])
def test_the_later_of_two_leftovers_is_installed_whatever_the_clock_was(kind: str, tmp_path: Path) -> None:
    writer = next(writer for writer in WRITERS if writer.name == kind)
    _, _, newer = versions(writer, True, tmp_path)[1:]
    folder = tmp_path / "it"
    writer.write(folder, 1)
    for number in (2, 3):  # each ends before its first rename into place
        cuts = iter(count())
        while not list(folder.glob(f".saving-{number - 1:08d}-*/*manifest.json")):
            for left in folder.glob(f".saving-{number - 1:08d}-*"):
                shutil.rmtree(left)
            exit_before(next(cuts), lambda number=number: writer.write(folder, number))
    second = max(folder.glob(".saving-0*"))
    for path in (second, *second.rglob("*")):
        os.utime(path, (1, 1))
    assert P.recover(folder) and content(writer, folder) == newer

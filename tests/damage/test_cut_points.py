"""Every kind of save, ended before each change of the file system or on a full disk: old, new or recovered, no mix."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import params as P

from .cuts import State, copied, cuts_of, exit_before, fail_at, state_of, with_file_size
from .writers import WRITERS, Writer, content


@dataclass
class Versions:
    """Folders of a writer, to be copied, and what tests found in those that a cut left.

    Attributes:
        base: the folder with version 1, or with nothing.
        states: what is read in `base`, after version 2 over it, and after version 3.
        largest: the size of the largest file of version 2.
        checked: {state of a folder: what is read there}; a state that several cuts leave is checked once.
    """

    writer: Writer
    base: Path
    states: tuple[Any, Any, Any]
    largest: int
    checked: dict[State, Any] = field(default_factory=dict)

    def check(self, folder: Path, done: bool, state: State | None = None) -> Any:
        """The content after a cut, with all that must hold then."""
        state = state_of(folder) if state is None else state
        if state not in self.checked:
            self.checked[state] = check(self.writer, folder, self.states)
        assert not done or self.checked[state] == self.states[1]
        return self.checked[state]


Made = Callable[[Writer, bool], Versions]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made(writer, older): its `Versions`, over an older one or anew; made once for all tests."""
    found: dict[tuple[Writer, bool], Versions] = {}

    def of(writer: Writer, older: bool) -> Versions:
        if (writer, older) not in found:
            found[writer, older] = _versions(writer, older, tmp_path_factory.mktemp("versions"))
        return found[writer, older]

    return of


def _versions(writer: Writer, older: bool, place: Path) -> Versions:
    base = place / "base"
    base.mkdir()
    if older:
        writer.write(base, 1)
    old = content(writer, base)
    found = []
    for number in (2, 3):
        folder = copied(base, place / f"version-{number}")
        writer.write(folder, number)
        found.append(content(writer, folder))
    new, newer = found
    assert new is not None and newer is not None and new != newer != old != new
    largest = max(path.stat().st_size for path in (place / "version-2").rglob("*") if path.is_file())
    return Versions(writer, base, (old, new, newer), largest)


def leftovers(folder: Path) -> list[Path]:
    return [path for pattern in (".saving*", ".writing*", "*.tmp") for path in folder.rglob(pattern)]


def check(writer: Writer, folder: Path, states: tuple[Any, Any, Any]) -> Any:
    """The content of a folder that a cut left, with all that must hold then. Version 3 is written over it."""
    old, new, newer = states
    now = content(writer, folder)
    assert now in (old, new, None), "a mix"
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
    writer: Writer, older: bool, made: Made, tmp_path: Path
) -> None:
    versions = made(writer, older)
    folder = copied(versions.base, tmp_path / "it")
    cuts = cuts_of(folder, tmp_path, lambda: writer.write(folder, 2))
    last = len(cuts) - 1
    assert last > 2
    middle = copied(versions.base, tmp_path / "middle")
    assert not exit_before(last // 2, lambda: writer.write(middle, 2))
    assert state_of(middle) == cuts[last // 2][0], "a process that ends leaves something else"
    seen = [versions.check(left, cut == last, state) for cut, (state, left) in enumerate(cuts)]
    assert versions.states[1] in seen and versions.states[0] in seen


@pytest.mark.parametrize("writer", [writer for writer in WRITERS if writer.recovers], ids=str)
def test_an_exit_of_recover_is_finished_by_the_next(writer: Writer, made: Made, tmp_path: Path) -> None:
    versions = made(writer, True)
    new = versions.states[1]
    folder = copied(versions.base, tmp_path / "it")
    cuts = cuts_of(folder, tmp_path / "writing", lambda: writer.write(folder, 2))
    torn = next((left for _, left in cuts if content(writer, left) is None), None)
    if torn is None:
        return  # a single rename is the whole change
    again = cuts_of(torn, tmp_path / "recovering", lambda: P.recover(torn))
    assert len(again) > 3
    for left in dict.fromkeys(left for _, left in again):
        assert content(writer, left) in (None, new)
        assert P.recover(left) or content(writer, left) == new
        assert content(writer, left) == new


@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_a_disk_full_from_any_change_on_is_an_error_and_loses_nothing(
    writer: Writer, made: Made, tmp_path: Path
) -> None:
    versions = made(writer, True)
    for cut in count():
        folder = copied(versions.base, tmp_path / f"cut-{cut}")
        done, error = fail_at(cut, lambda folder=folder: writer.write(folder, 2))
        assert done or "No space left on device" in error
        versions.check(folder, done)
        if done:
            break
    assert cut > 2


@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_a_file_that_ends_at_any_of_20_offsets_is_an_error_and_leaves_the_older(writer: Writer, made: Made) -> None:
    versions = made(writer, True)
    for part in range(20):
        # beside the base, where the file that is converted is whole already
        folder = copied(versions.base, versions.base.with_name(f"part-{part}"))
        done, error = with_file_size(versions.largest * part // 20, lambda folder=folder: writer.write(folder, 2))
        assert not done and ("File too large" in error or "cannot be written" in error), error
        assert not leftovers(folder)
        assert versions.check(folder, done) == versions.states[0] or writer.disposable


@pytest.mark.parametrize("kind", ["adapters of another rank", "a model of another config", "an embedder"])
def test_the_later_of_two_leftovers_is_installed_whatever_the_clock_was(kind: str, made: Made, tmp_path: Path) -> None:
    writer = next(writer for writer in WRITERS if writer.name == kind)
    versions = made(writer, True)
    folder = versions.base
    for number in (2, 3):  # each ends before its first rename into place
        begun = copied(folder, tmp_path / f"{number}")
        cuts = cuts_of(begun, tmp_path / f"cuts-{number}", partial(writer.write, begun, number))
        complete = f".saving-{number - 1:08d}-*/*manifest.json"
        folder = next(left for _, left in cuts if list(left.glob(complete)))
    second = max(folder.glob(".saving-0*"))
    for path in (second, *second.rglob("*")):
        os.utime(path, (1, 1))
    assert len(list(folder.glob(".saving-0*"))) == 2
    assert P.recover(folder) and content(writer, folder) == versions.states[2]

"""Each file of each reader, damaged in each way: refused in a sentence, or read; never followed, hung or endless."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import params as P
from fnmodels.errors import UserError
from tests.support.sockets import make_socket

from .readers import READERS, Reader

SECRET = b"private"


def _link_out(path: Path) -> None:
    """To a file that would be valid here, elsewhere."""
    private = Path(os.environ["DAMAGE_ELSEWHERE"]) / path.name
    path.rename(private)
    path.symlink_to(private)


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _sparse(path: Path) -> None:
    os.truncate(path, 1 << 38)


def _content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


NOT_REGULAR: dict[str, Callable[[Path], None]] = {
    "link out": _link_out,
    "link to nothing": _instead(lambda path: path.symlink_to("nowhere")),
    "link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "pipe": _instead(os.mkfifo),
    "socket": _instead(make_socket),
    "device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "folder": _instead(Path.mkdir),
}
CONTENTS: dict[str, Callable[[Path], None]] = {
    "empty": _content(lambda data: b""),
    "cut": _content(lambda data: data[: len(data) // 2]),
    "longer": _content(lambda data: data + bytes(9)),
    "zeros": _content(lambda data: bytes(len(data))),
    "noise": _content(lambda data: bytes((7 * i * i + 3) % 256 for i in range(500))),
    "no UTF-8": _content(lambda data: b"\xff\xfe" + data),
    "nested lists": _content(lambda data: b"[" * 200_000),
    "nested objects": _content(lambda data: b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a list": _content(lambda data: b"[1]"),
    "null": _content(lambda data: b"null"),
    "a long number": _content(lambda data: b"9" * 10_000),
}
REFUSALS = (P.CheckpointError, UserError, OSError)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Reader], Path]:
    made: dict[str, Path] = {}

    def folder(reader: Reader) -> Path:
        if reader.name not in made:
            made[reader.name] = tmp_path_factory.mktemp("valid") / "it"
            made[reader.name].mkdir()
            reader.make(made[reader.name])
        return made[reader.name]

    return folder


@pytest.fixture
def folder(reader: Reader, valid: Callable[[Reader], Path], tmp_path: Path) -> Path:
    """A valid folder of one's own. It is a fixture because a package of the compiler takes longer to make than a
    reader may take, and the limits of tests are for the reader alone."""
    return shutil.copytree(valid(reader), tmp_path / "it")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.setenv("DAMAGE_ELSEWHERE", str(folder))
    return folder


def outcome(reader: Reader, folder: Path) -> Any:
    """What was read; None where it is refused in a sentence, which is returned by the second of the two."""
    try:
        return reader.read(folder), ""
    except REFUSALS as error:
        return None, str(error)


CASES = [pytest.param(reader, name, id=f"{reader}: {name}") for reader in READERS for name in reader.files]


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_what_is_valid_is_read(reader: Reader, folder: Path) -> None:
    assert all((folder / name).is_file() for name in reader.files)
    assert reader.read(folder) is not None


@pytest.mark.timeout(20, func_only=True)
@pytest.mark.parametrize("way", NOT_REGULAR)
@pytest.mark.parametrize(("reader", "name"), CASES)
def test_what_is_no_regular_file_is_refused_by_name_and_not_followed(
    reader: Reader, name: str, way: str, folder: Path, elsewhere: Path
) -> None:
    NOT_REGULAR[way](folder / name)
    found, message = outcome(reader, folder)
    if (way == "link out" and reader.named) or (way == "folder" and reader.walks):
        assert found is not None, message
        return
    assert found is None, "it was read"
    assert message == "" or Path(name).name in message, message
    assert not (folder / "nowhere").exists()


@pytest.mark.timeout(20, func_only=True)
@pytest.mark.parametrize("way", CONTENTS)
@pytest.mark.parametrize(("reader", "name"), CASES)
def test_other_content_is_refused_in_a_sentence_or_read(reader: Reader, name: str, way: str, folder: Path) -> None:
    CONTENTS[way](folder / name)
    _, message = outcome(reader, folder)
    assert len(message) < 5000
    assert message == "" or str(folder) in message or Path(name).name in message, message


@pytest.mark.timeout(20, func_only=True)
@pytest.mark.parametrize(("reader", "name"), [case for case in CASES if not case.values[0].whole])
def test_a_file_of_256_gb_of_nothing_is_refused_at_once(reader: Reader, name: str, folder: Path) -> None:
    _sparse(folder / name)
    assert outcome(reader, folder)[0] is None

"""The one way to open and replace files: regular files alone, never through a link, never waiting."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fnmodels import files
from fnmodels.errors import FormatError, UnsafePathError
from tests.support.sockets import make_socket


def _link(path: Path) -> None:
    (path.parent / "private").write_text("private")
    path.symlink_to("private")


ODD: dict[str, Callable[[Path], object]] = {
    "link": _link,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
}
USES: dict[str, Callable[[Path], object]] = {
    "read_bytes": files.read_bytes,
    "read_text": files.read_text,
    "append": files.open_append,
    "truncate": lambda path: files.open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("odd", ODD)
def test_open_of_what_is_no_regular_file_raises_and_touches_nothing(odd: str, use: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    ODD[odd](path)
    with pytest.raises(UnsafePathError, match=r"it is (a link|not a regular file)"):
        USES[use](path)
    assert not (tmp_path / "nowhere").exists()
    assert odd != "link" or (tmp_path / "private").read_text() == "private"


@pytest.mark.timeout(10)
@pytest.mark.parametrize("odd", ["pipe", "socket", "device"])
def test_a_followed_name_must_be_a_regular_file_too(odd: str, tmp_path: Path) -> None:
    ODD[odd](tmp_path / "it")
    with pytest.raises(UnsafePathError, match="not a regular file"):
        files.read_bytes(tmp_path / "it", follow=True)


def test_read_of_a_folder_a_long_file_or_other_text_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        files.read_bytes(tmp_path)
    (tmp_path / "it").write_bytes(b"\xff123")
    with pytest.raises(FormatError, match=r"it has 4 bytes; no such file has more than 3\."):
        files.read_bytes(tmp_path / "it", 3)
    with pytest.raises(FormatError, match="it is not UTF-8"):
        files.read_text(tmp_path / "it")
    assert files.read_bytes(tmp_path / "it", 4) == b"\xff123"


def test_a_write_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    _link(tmp_path / "it")
    files.write_text(tmp_path / "it", "new")
    assert not (tmp_path / "it").is_symlink() and (tmp_path / "it").read_text() == "new"
    assert (tmp_path / "private").read_text() == "private"


def test_a_rename_of_what_is_no_regular_file_raises(tmp_path: Path) -> None:
    _link(tmp_path / "it")
    with pytest.raises(UnsafePathError, match="it is not a regular file"):
        files.replace_file(tmp_path / "it", tmp_path / "other")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.replace_file(tmp_path / "private", tmp_path / "folder")
    assert (tmp_path / "private").read_text() == "private"


def test_folders_that_are_links_are_refused_and_removed_as_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "folder").symlink_to("elsewhere")
    with pytest.raises(UnsafePathError, match="folder is a link"):
        files.make_folder(tmp_path / "folder")
    files.remove_tree(tmp_path / "folder")
    assert (tmp_path / "elsewhere" / "kept").exists() and not (tmp_path / "folder").exists()


def test_a_private_folder_is_narrowed(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    files.private_folder(tmp_path / "cache")
    files.private_folder(tmp_path / "new" / "cache")
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("cache", "new/cache")} == {0o700}

"""Manifests: every flipped bit is found, in the data and in the manifest itself."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import params as P
from params.checkpoint.manifest import MANIFEST, write_manifest

FILES = {"a.safetensors": bytes(range(200)), "b.json": b'{"x": 1}', "empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    write_manifest(tmp_path)
    return tmp_path


def rewrite(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content | changes))


def test_it_holds_sizes_and_digests(folder: Path) -> None:
    P.verify(str(folder))
    content = json.loads((folder / MANIFEST).read_text())
    files = {name: {"size": len(data), "digest": hashlib.sha256(data).hexdigest()} for name, data in FILES.items()}
    assert content == {"version": 1, "hash": "sha256", "files": files}
    (folder / "tokenizer.json").write_text("of no concern")
    P.verify(folder)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_flipped_bit_is_found(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    for bit in range(0, 8 * len(data), 13):  # not a multiple of 8, so that every bit of a byte is tested
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(flipped)
        with pytest.raises((P.CheckpointError, FileNotFoundError), match=str(folder)):
            P.verify(folder)
    (folder / name).write_bytes(data)
    P.verify(folder)


def test_all_that_differs_is_in_one_error(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(bytes(200))
    (folder / "empty").write_bytes(b"!")
    with pytest.raises(P.FormatError) as caught:
        P.verify(folder)
    assert "empty has 1 bytes, not 0" in str(caught.value)
    assert "a.safetensors has the sha256" in str(caught.value)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_file_that_is_gone_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {name}"):
        P.verify(folder)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"version": 2}, P.UnsupportedError, "version 2"),
        ({"version": True}, P.UnsupportedError, "version True"),
        ({"hash": "md5"}, P.UnsupportedError, "hash 'md5'"),
        ({"extra": 1}, P.FormatError, "exactly version, hash and files"),
        ({"files": {}}, P.FormatError, "files must map"),
        ({"files": []}, P.FormatError, "files must map"),
        ({"files": {"a": 1}}, P.FormatError, "exactly size and digest"),
        ({"files": {"a": {"size": True, "digest": "0" * 64}}}, P.FormatError, "the size True"),
        ({"files": {"a": {"size": -1, "digest": "0" * 64}}}, P.FormatError, "the size -1"),
        ({"files": {"a": {"size": 1, "digest": "A" * 64}}}, P.FormatError, "64 hex digits"),
        ({"files": {"../a": {"size": 1, "digest": "0" * 64}}}, P.UnsafePathError, "bare name"),
    ],
)
def test_a_manifest_that_is_none(folder: Path, changes: Any, kind: type[Exception], message: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(kind, match=message):
        P.verify(folder)

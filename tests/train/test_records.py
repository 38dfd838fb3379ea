"""Documents from JSON lines and Parquet; what is broken is told by file and line."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from train import corpus
from train.errors import UserError
from train.records import records

GOOD = [f"text number {i}\n" * 5 for i in range(3)]


def _jsonl(path: Path, *extra: bytes) -> Path:
    lines = [json.dumps({"text": text, "id": 7}).encode() for text in GOOD]
    path.write_bytes(b"\n".join([lines[0], *extra, b"", *lines[1:]]))
    return path


def _parquet(path: Path, **columns: list) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def _texts(found: corpus.Corpus) -> list[str]:
    """Whole texts again, from the heads and tails of few documents."""
    return [head.text + tail.text for head, tail in zip(found.train, found.heldout, strict=True)]


def test_records_are_documents_beside_plain_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text\n" * 9)
    _jsonl(tmp_path / "b.jsonl")
    _parquet(tmp_path / "c.parquet", text=["rows and columns\n" * 9], id=[1])
    found = corpus.load(tmp_path)
    assert _texts(found) == ["plain text\n" * 9, *GOOD, "rows and columns\n" * 9]
    assert found.skipped == ()
    assert [d.name for d in found.train][1:3] == ["b.jsonl, line 1 (head)", "b.jsonl, line 3 (head)"]
    assert _texts(corpus.load(tmp_path / "b.jsonl")) == GOOD


BROKEN = {
    "cut": (b'{"text": "abc', "not JSON"),
    "latin": (b'{"text": "\xe9"}', "not UTF-8"),
    "list": (b"[1]", "not a JSON object"),
    "field": (b'{"body": "x"}', "no field 'text' among body"),
    "number": (b'{"text": 3}', "'text' is 3, no text"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_named_and_only_it_is_lost(tmp_path: Path, name: str) -> None:
    line, fault = BROKEN[name]
    found = corpus.load(_jsonl(tmp_path / "b.jsonl", line))
    assert _texts(found) == GOOD
    assert len(found.skipped) == 1 and found.skipped[0].startswith("b.jsonl, line 2 (") and fault in found.skipped[0]
    with pytest.raises(UserError, match=r"b\.jsonl, line 2"):
        corpus.load(tmp_path / "b.jsonl", strict=True)


def test_broken_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not really")
    _parquet(tmp_path / "other.parquet", body=["x"])
    _parquet(tmp_path / "null.parquet", text=[GOOD[0], None])
    found = {path.name: [r for r in records(path) if r.text is None] for path in tmp_path.iterdir()}
    assert "not Parquet" in found["no.parquet"][0].fault
    assert "no column 'text' among body" in found["other.parquet"][0].fault
    assert found["null.parquet"][0].place == "row 2"

"""Files of many documents: JSON lines and Parquet, one document per record, in its field `text`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.commands import check_installed

FIELD = "text"
BATCH = 1024  # records of a Parquet file held at a time


@dataclass(frozen=True)
class Record:
    """A record's place in its file ("line 3"), and its text or, where it has none, why."""

    place: str
    text: str | None
    fault: str = ""


def is_records(path: Path) -> bool:
    return path.suffix in (".jsonl", ".parquet")


def records(path: Path) -> Iterator[Record]:
    """The records of a file, broken ones among them. OSError where it cannot be read at all."""
    return _json_lines(path) if path.suffix == ".jsonl" else _parquet(path)


def _json_lines(path: Path) -> Iterator[Record]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _of_json(f"line {number}", line)


def _of_json(place: str, line: bytes) -> Record:
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        return Record(place, None, "not UTF-8")
    except ValueError as error:
        return Record(place, None, f"not JSON: {error}")
    if not isinstance(value, dict):
        return Record(place, None, "not a JSON object")
    return _of_value(place, value)


def _parquet(path: Path) -> Iterator[Record]:
    check_installed(("pyarrow",))
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        if FIELD not in file.schema_arrow.names:
            yield Record("its schema", None, f"no column {FIELD!r} among {', '.join(file.schema_arrow.names)}")
            return
        number = 0
        for batch in file.iter_batches(BATCH, columns=[FIELD]):
            for value in batch.to_pylist():
                number += 1
                yield _of_value(f"row {number}", value)
    except pyarrow.ArrowInvalid as error:
        yield Record("the file", None, f"not Parquet: {error}")


def _of_value(place: str, value: dict[str, Any]) -> Record:
    if FIELD not in value:
        return Record(place, None, f"no field {FIELD!r} among {', '.join(value)}")
    text = value[FIELD]
    return Record(place, text) if isinstance(text, str) else Record(place, None, f"{FIELD!r} is {text!r:.40}, no text")

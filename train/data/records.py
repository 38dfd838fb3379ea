"""Readers of JSON lines, Parquet files and Hugging Face datasets; each record is a text or a conversation.

A record's document is its field `text` or, where it has none, `messages`: a list of {"role": ..., "content": ...}.
The optional field `tools` lists the JSON schemas of the tools that the assistant can call, as objects or a JSON string.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fnmodels.errors import UserError
from fnmodels.files import open_regular
from params.io.files import LINE_DEPTH_LIMIT, TOO_DEEP, is_deep, parse_line
from train.command_line import check_installed

from .turns.said import BESIDE, fault_beside

TEXT, MESSAGES, TOOLS = "text", "messages", "tools"
LONE_SURROGATE = "holds half a character, a lone surrogate"
PARQUET_BATCH = 64  # records of a Parquet file in memory at a time
PARQUET_BUFFER = 1 << 20  # bytes of a column that are read at a time
PARQUET_TEXT, PARQUET_FACTOR = 1 << 28, 1000  # bytes of text, and bytes for each one of the file, that are read of it

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Record:
    """A record's place in its file ("line 3") and its text, its messages, or why it has neither (`fault`)."""

    place: str
    text: str | None = None
    messages: Messages | None = None
    fault: str = ""
    tools: Messages = ()


def is_records(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson", ".parquet")


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file; broken ones have a `fault`. OSError where the file cannot be read at all."""
    return _parquet(path) if path.suffix.lower() == ".parquet" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[Record]:
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield parse_record(f"line {number}", line)


def parse_record(place: str, line: bytes) -> Record:
    """The record of a line of JSON."""
    try:
        value = parse_line(line)
    except UnicodeDecodeError:
        return Record(place, fault="not UTF-8")
    except json.JSONDecodeError as error:  # whose line numbers count within this line
        return Record(place, fault=f"not JSON: {error.msg}, column {error.colno}")
    except ValueError as error:
        return Record(place, fault=f"not JSON: {error}")
    if not isinstance(value, dict):
        return Record(place, fault="not a JSON object")
    return _record_of(place, value)


def _parquet(path: Path) -> Iterator[Record]:
    with os.fdopen(open_regular(path, follow=True), "rb") as opened:
        yield from read_parquet(opened, os.fstat(opened.fileno()).st_size)


def read_parquet(opened: IO[bytes], size: int, *, first: int = 0) -> Iterator[Record]:
    """The records of an open Parquet file of `size` bytes, from row `first` (counted from 0) on."""
    check_installed(("pyarrow",))
    import pyarrow
    from pyarrow import parquet

    number, left = 0, PARQUET_TEXT + PARQUET_FACTOR * size
    try:
        file = parquet.ParquetFile(opened, buffer_size=PARQUET_BUFFER)
        names = file.schema_arrow.names
        columns = [name for name in ((TEXT,) if TEXT in names else (MESSAGES, *BESIDE)) if name in names]
        if not {TEXT, MESSAGES} & set(columns):
            yield Record("its schema", fault=f"no column {TEXT!r} or {MESSAGES!r} among {', '.join(names)}")
            return
        groups = list(range(file.metadata.num_row_groups))
        while groups and number + file.metadata.row_group(groups[0]).num_rows <= first:
            number += file.metadata.row_group(groups.pop(0)).num_rows
        for batch in file.iter_batches(PARQUET_BATCH, row_groups=groups, columns=columns):
            left -= batch.nbytes  # of one text, which the file has once, there may be a billion
            if left < 0:
                yield Record(f"after row {number}", fault="the file has more text than its size can stand for")
                return
            for value in batch.to_pylist():
                number += 1
                if number > first:
                    yield record_of_row(f"row {number}", value)
    except (pyarrow.ArrowException, OSError) as error:  # damage may surface only while reading, as either
        where = f"after row {number}" if number else "the file"
        yield Record(where, fault=f"not Parquet: {error}")


def read_dataset(dataset: Any) -> Iterator[Record]:
    """The records of a dataset of dicts with a length, such as `datasets.Dataset`; else UserError."""
    try:
        count = len(dataset)
    except TypeError as error:
        raise UserError(
            f"the dataset is a {type(dataset).__name__} without a length: a stream cannot be shuffled"
        ) from error
    for number in range(count):
        try:
            value = dataset[number]
        except KeyError as error:
            raise UserError(f"the dataset is a {type(dataset).__name__} of named splits: give one of them") from error
        place = f"item {number}"
        if isinstance(value, Mapping):
            yield record_of_row(place, value)
        else:
            yield Record(place, fault=f"{value!r:.40} is no dict of columns")


def record_of_row(place: str, value: Mapping[str, Any]) -> Record:
    """The record of a table's row, in which absent fields of nested objects are null."""
    chat = {name: value[name] for name in (MESSAGES, *BESIDE) if name in value}
    if is_deep(chat, LINE_DEPTH_LIMIT):
        return Record(place, fault=TOO_DEEP)
    return _record_of(place, {**value, **{name: _drop_nulls(field) for name, field in chat.items()}})


def _drop_nulls(value: Any) -> Any:
    """Drops null fields, which a chat template would take as present; a null `content` stays, as it means no text."""
    if isinstance(value, Mapping):
        return {name: _drop_nulls(field) for name, field in value.items() if field is not None or name == "content"}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _record_of(place: str, value: Mapping[str, Any]) -> Record:
    if TEXT in value:
        text = value[TEXT]
        if not isinstance(text, str):
            return Record(place, fault=f"{TEXT!r} is {text!r:.40}, no text")
        if not text.strip():
            return Record(place, fault=f"{TEXT!r} is empty")
        return Record(place, text=text) if is_unicode(text) else Record(place, fault=f"{TEXT!r} {LONE_SURROGATE}")
    if MESSAGES not in value:
        return Record(place, fault=f"no field {TEXT!r} or {MESSAGES!r} among {', '.join(map(str, value))}")
    messages = value[MESSAGES]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        return Record(place, fault=f"{MESSAGES!r} is {messages!r:.40}, no list of objects with a role")
    if not messages:
        return Record(place, fault=f"{MESSAGES!r} is empty")
    if fault := fault_beside(value, TOOLS):
        return Record(place, fault=fault)
    tools = _tools(value.get(TOOLS))
    if tools is None:
        return Record(place, fault=f"{TOOLS!r} is {value[TOOLS]!r:.40}, no list of objects")
    found = Record(place, messages=tuple(messages), tools=tools)
    return found if is_unicode(canonical_json(found)) else Record(place, fault=f"{MESSAGES!r} {LONE_SURROGATE}")


def _tools(value: Any) -> Messages | None:
    """The list of tools, from a list or its JSON text; None where it is not a list of objects."""
    if isinstance(value, str):
        try:
            value = parse_line(value or "[]")
        except ValueError:
            return None
    value = [] if value is None else value
    return tuple(value) if isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value) else None


def canonical_json(record: Record) -> str:
    """A conversation and its tools as canonical JSON: equal conversations have equal texts."""
    content = (*record.tools, record.messages) if record.tools else record.messages
    return json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)


def is_unicode(text: str) -> bool:
    """Whether the text is encodable: JSON escapes can spell a lone surrogate, which UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

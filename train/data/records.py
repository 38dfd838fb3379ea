"""Many documents in one place: JSON lines, Parquet, a Hugging Face dataset. Each record is a text or a conversation.

A record's document is its field `text`, or where it has none `messages`: a list of {"role": ..., "content": ...}.
Beside them `tools` may say what the assistant can call: a list of JSON schemas, or the same as JSON in a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from train.command_line import check_installed

TEXT, MESSAGES, TOOLS = "text", "messages", "tools"
HALF = "holds half a character, a lone surrogate"
BATCH = 1024  # records of a Parquet file held at a time

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Record:
    """A record's place ("line 3"), and its text or its messages or, where it has neither, why."""

    place: str
    text: str | None = None
    messages: Messages | None = None
    fault: str = ""
    tools: Messages = ()


def is_records(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson", ".parquet")


def records(path: Path) -> Iterator[Record]:
    """The records of a file, broken ones among them. OSError where it cannot be read at all."""
    return _parquet(path) if path.suffix.lower() == ".parquet" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[Record]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _of_json(f"line {number}", line)


def _of_json(place: str, line: bytes) -> Record:
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        return Record(place, fault="not UTF-8")
    except json.JSONDecodeError as error:  # which counts lines of its own, from this one
        return Record(place, fault=f"not JSON: {error.msg}, column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Record(place, fault=f"not JSON: {error}")
    if not isinstance(value, dict):
        return Record(place, fault="not a JSON object")
    return _of_value(place, value)


def _parquet(path: Path) -> Iterator[Record]:
    check_installed(("pyarrow",))
    import pyarrow
    from pyarrow import parquet

    with open(path, "rb") as opened:
        number = 0
        try:
            file = parquet.ParquetFile(opened)
            names = file.schema_arrow.names
            columns = [TEXT] if TEXT in names else [name for name in (MESSAGES, TOOLS) if name in names]
            if not columns or columns == [TOOLS]:
                yield Record("its schema", fault=f"no column {TEXT!r} or {MESSAGES!r} among {', '.join(names)}")
                return
            for batch in file.iter_batches(BATCH, columns=columns):
                for value in batch.to_pylist():
                    number += 1
                    yield _of_columns(f"row {number}", value)
        except (pyarrow.ArrowException, OSError) as error:  # what is damaged may show late, as either
            where = f"after row {number}" if number else "the file"
            yield Record(where, fault=f"not Parquet: {error}")


def of_dataset(dataset: Any) -> Iterator[Record]:
    """The records of anything with a length whose items are dicts, such as a `datasets.Dataset`; places as in [i]."""
    try:
        count = len(dataset)
    except TypeError as error:
        raise UserError(f"the dataset is a {type(dataset).__name__} without a length: a stream has no order") from error
    for number in range(count):
        try:
            value = dataset[number]
        except KeyError as error:
            raise UserError(f"the dataset is a {type(dataset).__name__} of named parts: give one of them") from error
        place = f"item {number}"
        if isinstance(value, Mapping):
            yield _of_columns(place, value)
        else:
            yield Record(place, fault=f"{value!r:.40} is no dict of columns")


def _of_columns(place: str, value: Mapping[str, Any]) -> Record:
    """The record of a row whose objects all have the same fields: null where they do not have one."""
    talk = {name: _there(value[name]) for name in (MESSAGES, TOOLS) if name in value}
    return _of_value(place, {**value, **talk})


def _there(value: Any) -> Any:
    """The same without the fields that are null, which a template would take for given; that nothing is said stays."""
    if isinstance(value, Mapping):
        return {name: _there(field) for name, field in value.items() if field is not None or name == "content"}
    return [_there(item) for item in value] if isinstance(value, list) else value


def _of_value(place: str, value: Mapping[str, Any]) -> Record:
    if TEXT in value:
        text = value[TEXT]
        if not isinstance(text, str):
            return Record(place, fault=f"{TEXT!r} is {text!r:.40}, no text")
        if not text.strip():
            return Record(place, fault=f"{TEXT!r} is empty")
        return Record(place, text=text) if is_unicode(text) else Record(place, fault=f"{TEXT!r} {HALF}")
    if MESSAGES not in value:
        return Record(place, fault=f"no field {TEXT!r} or {MESSAGES!r} among {', '.join(map(str, value))}")
    messages = value[MESSAGES]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        return Record(place, fault=f"{MESSAGES!r} is {messages!r:.40}, no list of objects with a role")
    if not messages:
        return Record(place, fault=f"{MESSAGES!r} is empty")
    tools = _tools(value.get(TOOLS))
    if tools is None:
        return Record(place, fault=f"{TOOLS!r} is {value[TOOLS]!r:.40}, no list of objects")
    found = Record(place, messages=tuple(messages), tools=tools)
    return found if is_unicode(canonical(found)) else Record(place, fault=f"{MESSAGES!r} {HALF}")


def _tools(value: Any) -> Messages | None:
    """As they were given; None where they are none that a template could name."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except (ValueError, RecursionError):
            return None
    value = [] if value is None else value
    return tuple(value) if isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value) else None


def canonical(record: Record) -> str:
    """A conversation, and what can be called in it, as one text that equal ones share."""
    whole = (*record.tools, record.messages) if record.tools else record.messages
    return json.dumps(whole, ensure_ascii=False, sort_keys=True, default=str)


def is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which no encoding can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

"""Tests of JSON lines, Parquet and data set records; broken ones are reported by file and line."""

import json
import tempfile
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from fnmodels.errors import UserError
from train.data import corpus, of_dataset
from train.data.records import read_dataset, read_records

GOOD = [f"text number {i}\n" * 5 for i in range(3)]


def _jsonl(path: Path, *extra: bytes) -> Path:
    lines = [json.dumps({"text": text, "id": 7}).encode() for text in GOOD]
    path.write_bytes(b"\n".join([lines[0], *extra, b"", *lines[1:]]))
    return path


def _parquet(path: Path, **columns: list) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def _texts(found: corpus.Corpus) -> list[str]:
    """The original texts, rejoined from the heads and tails of few documents."""
    return [head.text + tail.text for head, tail in zip(found.train, found.heldout, strict=True)]


def test_records_are_documents_beside_plain_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text\n" * 9)
    _jsonl(tmp_path / "b.jsonl")
    _parquet(tmp_path / "c.parquet", text=["rows and columns\n" * 9], id=[1])
    found = corpus.read_corpus(tmp_path)
    assert _texts(found) == ["plain text\n" * 9, *GOOD, "rows and columns\n" * 9]
    assert found.skipped == ()
    assert [d.name for d in found.train][1:3] == ["b.jsonl, line 1 (head)", "b.jsonl, line 3 (head)"]
    assert _texts(corpus.read_corpus(tmp_path / "b.jsonl")) == GOOD


BROKEN = {
    "cut": (b'{"text": "abc', "not JSON: Invalid control character at, column 14)"),
    "latin": (b'{"text": "\xe9"}', "not UTF-8"),
    "list": (b"[1]", "not a JSON object"),
    "field": (b'{"body": "x"}', "no field 'text' or 'messages' among body"),
    "number": (b'{"text": 3}', "'text' is 3, no text"),
    "empty": (b'{"text": " "}', "'text' is empty"),
    "deep": (b"[" * 100_000, "not JSON"),
    "half a character": (b'{"text": "a\\ud800b"}', "'text' holds half a character"),
    "roles": (b'{"messages": [{"content": "x"}]}', "no list of objects with a role"),
    "no turns": (b'{"messages": []}', "'messages' is empty"),
    "tools": (b'{"messages": [{"role": "user"}], "tools": [3]}', "'tools' is [3], no list of objects"),
    "tools that are no JSON": (b'{"messages": [{"role": "user"}], "tools": "["}', "'tools' is '[', no list of objects"),
    "system beside": (b'{"messages": [{"role": "user"}], "system": "Be brief."}', "'system' stands beside the turns"),
    "older tools": (b'{"messages": [{"role": "user"}], "functions": [{"name": "add"}]}', "give them as 'tools'"),
    "half in a turn": (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "'messages' holds half"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_named_and_only_it_is_lost(tmp_path: Path, name: str) -> None:
    line, fault = BROKEN[name]
    found = corpus.read_corpus(_jsonl(tmp_path / "b.jsonl", line))
    assert _texts(found) == GOOD
    assert len(found.skipped) == 1 and found.skipped[0].startswith("b.jsonl, line 2 (") and fault in found.skipped[0]
    with pytest.raises(UserError, match=r"b\.jsonl, line 2"):
        corpus.read_corpus(tmp_path / "b.jsonl", strict=True)


def test_a_text_that_is_none_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text\n" * 9)
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    assert corpus.read_corpus(tmp_path).skipped == ("b.txt (not UTF-8 text: byte 0xe9 in line 3)",)
    with pytest.raises(UserError, match=r"b\.txt \(not UTF-8 text"):
        corpus.read_corpus(tmp_path, strict=True)


def test_parquet_that_is_cut_or_damaged_is_named(tmp_path: Path) -> None:
    whole = _parquet(tmp_path / "a.parquet", text=[f"text {i} " * 50 for i in range(3000)]).read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    assert "not Parquet" in [*read_records(tmp_path / "a.parquet")][-1].fault
    (tmp_path / "a.parquet").write_bytes(whole[:40] + bytes(byte ^ 255 for byte in whole[40:600]) + whole[600:])
    found = [*read_records(tmp_path / "a.parquet")]
    assert next(record for record in found if record.fault).fault.startswith("not Parquet")


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3))
VALUES = st.dictionaries(st.sampled_from(["text", "messages", "role"]) | st.text(), JSON | st.just([{"role": "user"}]))
ANYTHING = st.binary() | VALUES.map(lambda value: json.dumps(value).encode()) | st.just(b'{"a\\ud800\\u001b[2J": 1}')


@given(ANYTHING)
def test_any_line_is_a_record_or_a_fault(line: bytes) -> None:
    line = line.replace(b"\n", b"")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(line + b"\n")
        for record in read_records(path):
            assert record.place == "line 1"
            assert [record.text is not None, record.messages is not None, record.fault != ""].count(True) == 1
        try:
            found = corpus.read_corpus(path)
        except UserError as error:
            str(error).encode()
        else:
            assert found.skipped == ()


def test_messages_about_skipped_records_are_printable(tmp_path: Path) -> None:
    found = corpus.read_corpus(_jsonl(tmp_path / "b.jsonl", b'{"a\\ud800\\u001b[2J": 1}'))
    assert found.skipped == ("b.jsonl, line 2 (no field 'text' or 'messages' among a\\ud800\\x1b[2J)",)


def test_broken_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not really")
    _parquet(tmp_path / "other.parquet", body=["x"])
    _parquet(tmp_path / "null.parquet", text=[GOOD[0], None])
    found = {path.name: [r for r in read_records(path) if r.text is None] for path in tmp_path.iterdir()}
    assert "not Parquet" in found["no.parquet"][0].fault
    assert "no column 'text' or 'messages' among body" in found["other.parquet"][0].fault
    assert found["null.parquet"][0].place == "row 2"


def test_rows_are_counted_through_batches_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.data.records.PARQUET_BATCH", 4)
    texts = [None if i in (2, 7, 13) else f"text {i}" for i in range(1, 15)]
    parquet.write_table(pyarrow.table({"text": texts, "id": range(14)}), tmp_path / "a.parquet", row_group_size=3)
    found = list(read_records(tmp_path / "a.parquet"))
    assert [record.text for record in found] == texts
    assert [record.place for record in found if record.fault] == ["row 2", "row 7", "row 13"]


TALKS = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in range(150)]


def test_conversations_are_read_from_lines_and_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS[:100]))
    _parquet(tmp_path / "b.parquet", messages=TALKS[50:])
    found = corpus.read_corpus(tmp_path)
    assert found.is_chat and found.skipped == ()
    both = [list(document.messages or ()) for document in found.train + found.heldout]
    assert len(found.heldout) == 8 and sorted(both, key=str) == sorted(TALKS, key=str)


def test_the_ends_of_names_are_known_in_any_case(tmp_path: Path) -> None:
    _jsonl(tmp_path / "A.JSONL").rename(tmp_path / "b.ndjson")
    _jsonl(tmp_path / "A.JSONL")
    assert _texts(corpus.read_corpus(tmp_path)) == _texts(corpus.read_corpus(tmp_path / "b.ndjson")) == GOOD
    _parquet(tmp_path / "C.PARQUET", text=GOOD)
    assert _texts(corpus.read_corpus(tmp_path / "C.PARQUET")) == GOOD


CALLS = [
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": {key: 1}}]},
        {"role": "tool", "content": "4", "name": name},
    ]
    for name, key in (("add", "a"), ("sum", "b"))
]


def test_fields_that_only_other_rows_have_are_not_there(tmp_path: Path) -> None:
    """Table columns hold null for absent fields; kept, `'tool_calls' in message` would be true for every message."""
    schemas = [[{"name": "add", "parameters": {"a": "int"}}], [{"name": "sum", "parameters": {"b": "int"}}]]
    rows = [{"messages": talk, "tools": tools} for talk, tools in zip(CALLS, schemas, strict=True)]
    _parquet(tmp_path / "a.parquet", messages=CALLS, tools=schemas)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    as_text = [row | {"tools": json.dumps(row["tools"])} for row in rows]
    found = [read_records(tmp_path / "a.parquet"), read_records(tmp_path / "b.jsonl")]
    found += [read_dataset(dataset) for some in (rows, as_text) for dataset in _datasets(some)]
    for source in map(list, found):
        assert [list(record.messages or ()) for record in source] == CALLS
        assert [list(record.tools) for record in source] == schemas
    _parquet(tmp_path / "c.parquet", messages=CALLS, tools=[None, []])
    assert [record.tools for record in read_records(tmp_path / "c.parquet")] == [(), ()]
    _parquet(tmp_path / "d.parquet", tools=schemas)
    (record,) = read_records(tmp_path / "d.parquet")
    assert record.fault == "no column 'text' or 'messages' among tools"
    _parquet(tmp_path / "e.parquet", messages=CALLS, system=["Be brief.", ""], chat_template_kwargs=[None, {"a": None}])
    first, second = read_records(tmp_path / "e.parquet")
    assert first.fault.startswith("'system' stands beside the turns and would be left out: make it the first turn")
    assert not second.fault and second.messages


def test_a_conversation_with_other_tools_is_another(tmp_path: Path) -> None:
    rows = [{"messages": CALLS[0], "tools": tools} for tools in ([], [{"name": "add"}], [{"name": "sum"}], [])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = corpus.read_corpus(tmp_path / "a.jsonl")
    tools = sorted((d.tools for d in found.train + found.heldout), key=str)
    assert tools == [(), ({"name": "add"},), ({"name": "sum"},)]
    assert found.duplicates == 1


def test_of_few_conversations_a_whole_one_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS[:3]))
    found = corpus.read_corpus(tmp_path / "a.jsonl")
    assert (len(found.train), len(found.heldout)) == (2, 1)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALKS[0]}))
    with pytest.raises(UserError, match="too little text"):
        corpus.read_corpus(tmp_path / "a.jsonl")


def test_texts_and_conversations_do_not_mix(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", json.dumps({"messages": TALKS[0]}).encode())
    with pytest.raises(UserError, match=r"texts \(a\.jsonl, line 1\) and conversations \(a\.jsonl, line 2\)"):
        corpus.read_corpus(tmp_path / "a.jsonl")


class Columns:
    """The part of `datasets.Dataset`'s interface that is used."""

    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> object:
        if not 0 <= number < len(self.rows):
            raise IndexError(number)
        return self.rows[number]


def _datasets(rows: list[dict]) -> list:
    """The stand-in, and `datasets.Dataset` where it is installed."""
    try:
        import datasets
    except ImportError:
        return [Columns(rows)]
    return [Columns(rows), datasets.Dataset.from_list(rows)]


def test_a_dataset_is_read_by_what_it_can_do() -> None:
    for dataset in _datasets([{"text": text, "id": i} for i, text in enumerate([*GOOD, " "])]):
        found = of_dataset(dataset, "notes").text
        assert _texts(found) == GOOD
        assert found.skipped == ("notes, item 3 ('text' is empty)",)
        assert found.train[0].name == "notes, item 0 (head)"
        with pytest.raises(UserError, match="1 files or records of the notes"):
            of_dataset(dataset, "notes", strict=True)
    for dataset in _datasets([{"messages": talk} for talk in TALKS]):
        found = of_dataset(dataset).text
        assert found.is_chat and len(found.train) + len(found.heldout) == 150


def test_unsupported_datasets_raise() -> None:
    with pytest.raises(UserError, match="the dataset is a generator without a length"):
        of_dataset(value for value in [{"text": "a"}])
    with pytest.raises(UserError, match="the dataset is a dict of named splits: give one of them"):
        of_dataset({"train": Columns([])})
    assert of_dataset(Columns([*({"text": text} for text in GOOD), 7])).text.skipped == (
        "dataset, item 3 (7 is no dict of columns)",
    )

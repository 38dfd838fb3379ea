"""Streams against documents in memory: the same rows, from any position, on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer

from fnmodels.errors import UserError
from train.data import encoder
from train.data.corpus import read_files
from train.data.rows import Rows, concatenated, make_batch, pack_stream
from train.data.stream import StreamMixture, readers, windows
from train.data.stream.documents import (
    Cursor,
    Documents,
    FileDocuments,
    IteratedDocuments,
    heldout_texts,
    is_heldout,
    train_documents,
)
from train.data.stream.files import stream_files
from train.data.stream.mixture import StreamOptions
from train.data.tokenizer import train_tokenizer

LENGTH, WINDOW = 16, 6
OPTIONS = StreamOptions(LENGTH, WINDOW, seed=3, batch_rows=4)
TEXTS = [f"record {n} says {n * n} and " + "word " * (n % 17) for n in range(300)]


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "GROUP_CHARACTERS", 1000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text, JSON lines (with broken ones) and Parquet in three row groups."""
    made = tmp_path / "data"
    made.mkdir()
    lines = [json.dumps({"text": text}) for text in TEXTS[:100]]
    (made / "a.jsonl").write_text("\n".join([*lines[:7], "{broken", "", *lines[7:]]) + "\n")
    parquet.write_table(pyarrow.table({"text": TEXTS[100:250]}), made / "b.parquet", row_group_size=60)
    for number, text in enumerate(TEXTS[250:]):
        (made / f"c{number:02}.txt").write_text(text)
    (made / ".hidden.txt").write_text("hidden")
    (made / "empty.txt").write_text("")
    return made


def encode_with(tokenizer: Tokenizer) -> Any:
    return lambda texts: encoder.encode(tokenizer, texts, 0)


def mixture(tokenizer: Tokenizer, *sources: Documents, **options: Any) -> StreamMixture:
    weights = options.pop("weights", (1,) * len(sources))
    return StreamMixture(sources, weights, encode_with(tokenizer), OPTIONS, **options)


def source(data: Path | str) -> FileDocuments:
    return FileDocuments("notes", stream_files(str(data)))


def reference(folder: Path, tokenizer: Tokenizer, passes: int) -> Rows:
    """All passes in memory, by the readers of corpora in memory; files in the order of their names."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    texts = [record.text for _, record in read_files(files, folder) if record.text]
    ids, lengths = encoder.encode(tokenizer, [text for text in texts if not is_heldout(text)] * passes, 0)
    return pack_stream(concatenated(ids, lengths), LENGTH)


def same(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_stream_of_a_folder_has_the_rows_of_the_documents_in_memory(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileDocuments, "_order", lambda self, epoch, shuffle: list(range(len(self.files))))
    expected, stream = reference(folder, tokenizer, 3), mixture(tokenizer, source(folder))
    count = expected.count // WINDOW * WINDOW
    assert count > 1.5 * reference(folder, tokenizer, 1).count  # the rows of a second pass join on to the first
    rows = [stream._streams[0].row(sample) for sample in range(count)]
    orders = {tuple(order) for _, order in stream._streams[0].held.values()}
    assert len(orders) > count // WINDOW // 2  # each window has an order of its own, of 720
    places = [window * WINDOW + int(row) for window, (_, order) in stream._streams[0].held.items() for row in order]
    assert sorted(places) == list(range(count))
    for place, row in zip(places, rows, strict=True):
        assert same(row, make_batch(expected, [place])), place
    stream.close()


@pytest.mark.parametrize("weights", [(1,), (3, 2)])
def test_stream_from_a_saved_position_continues_to_the_token(
    folder: Path, tokenizer: Tokenizer, weights: tuple[int, ...]
) -> None:
    sources = [source(folder), IteratedDocuments("mine", lambda: TEXTS[::-1])][: len(weights)]
    stream = mixture(tokenizer, *sources, weights=weights)
    positions, batches = [json.dumps(stream.position(0))], []
    for step in range(30):
        batches.append(stream.batch(step))
        positions.append(json.dumps(stream.position(step + 1)))
    assert len(set(positions)) > 15
    assert any(cursor["cursor"][3] for position in positions for cursor in json.loads(position))  # within a document
    for step in range(0, 30, 4):
        resumed = mixture(tokenizer, *sources, weights=weights)
        resumed.seek(json.loads(positions[step]))
        for later in range(step, min(step + 4, 30)):
            assert same(resumed.batch(later), batches[later]), (step, later)
        assert resumed.epochs(later + 1).keys() == {"notes", "mine"} - ({"mine"} if len(weights) == 1 else set())
        resumed.close()
    with pytest.raises(RuntimeError, match="seek"):
        stream.batch(0)
    stream.close()


def test_ranks_get_slices_of_the_batch(folder: Path, tokenizer: Tokenizer) -> None:
    one, *others = (mixture(tokenizer, source(folder), source(folder), weights=(1, 5)) for _ in range(3))
    for step in range(12):
        shards = [stream.batch(step, rank=rank, ranks=2) for rank, stream in enumerate(others)]
        assert same(one.batch(step), {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]})
    assert one.position(12) == others[0].position(12) == others[1].position(12)


def test_a_url_is_read_as_the_folder_is(folder: Path, tokenizer: Tokenizer) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/notes", recursive=True)
    remote = source("memory://notes")
    assert [file.name for file in remote.files] == [file.name for file in source(folder).files]
    there, here = mixture(tokenizer, remote), mixture(tokenizer, source(folder))
    for step in range(6):
        assert same(there.batch(step), here.batch(step))
    assert source("memory://notes/a.jsonl").files[0].name == "a.jsonl"
    memory.rm("/notes", recursive=True)


def test_heldout_texts_are_no_train_texts_and_read_in_the_order_of_names(folder: Path) -> None:
    texts = [f"{text} {n}" for n in range(4) for text in TEXTS]
    held = heldout_texts(IteratedDocuments("mine", lambda: texts + texts))
    assert held == tuple(text for text in texts if is_heldout(text))
    assert 0.002 < len(held) / len(texts) < 0.03
    first = train_documents(IteratedDocuments("mine", lambda: texts + texts), Cursor(), (0, 0))
    assert {next(first).text for _ in range(2 * len(texts))}.isdisjoint(held)


def test_datasets_in_streaming_mode_resume_by_skip(folder: Path, tokenizer: Tokenizer) -> None:
    def stream() -> Any:
        return datasets.load_dataset(
            "parquet", data_files=str(folder / "b.parquet"), streaming=True, split="train", cache_dir=str(folder)
        )

    found = source(folder / "b.parquet")
    ours, theirs = mixture(tokenizer, found), mixture(tokenizer, IteratedDocuments("hub", stream))
    for step in range(5):
        assert same(ours.batch(step), theirs.batch(step))
    resumed = mixture(tokenizer, IteratedDocuments("hub", stream))
    resumed.seek(theirs.position(5))
    assert same(resumed.batch(5), ours.batch(5))


def test_each_pass_reads_the_files_in_another_order(folder: Path) -> None:
    files = source(folder)
    orders = [files._order(epoch, (0, 0)) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(len(files.files))) for order in orders)
    middle = Cursor(1, file=4)
    before = sum(files.files[number].size for number in orders[1][:4])
    assert files.share(middle, shuffle=(0, 0)) == pytest.approx(before / files.size)


def test_long_text_is_cut_at_line_ends_and_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "TEXT_BYTES", 50)
    text = "\ufeff" + "".join(f"line {n} ü\n" for n in range(40)) + "ü€😀" * 60
    path = tmp_path / "long.txt"
    path.write_text(text)
    (file,) = stream_files(str(path))
    found = list(readers.read_from(file))
    assert "".join(str(record.text) for _, record in found) == text[1:] and len(found) > 8
    assert all(len(str(record.text).encode()) <= 50 for _, record in found)
    for number, (place, _) in enumerate(found):
        assert [record.text for _, record in readers.read_from(file, place)] == [
            record.text for _, record in found[number + 1 :]
        ]


def test_broken_records_are_reported_by_their_place(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "d.txt").write_bytes(b"\xff\xfe")
    (folder / "e.jsonl").write_text('{"text": "' + "x" * 100 + '"}\n{"text": "short"}\n')
    faults: list[str] = []
    stream = mixture(tokenizer, source(folder), report=faults.append)
    for step in range(30):
        stream.batch(step)
    stream.close()
    assert any(fault.startswith("a.jsonl, byte ") and "not JSON" in fault for fault in faults)
    assert "d.txt (not UTF-8 text: byte 0xff at 0)" in faults


def test_lines_beyond_the_limit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 64)
    path = tmp_path / "e.jsonl"
    path.write_text('{"text": "' + "x" * 200 + '"}\n{"text": "short"}')
    (file,) = stream_files(str(path))
    (place, long), (_, short) = readers.read_from(file)
    assert "a line of 213 bytes" in long.fault and short.text == "short"
    assert [record for _, record in readers.read_from(file, place)] == [short]


def test_sources_that_cannot_be_streamed_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    np.save(tmp_path / "ids.npy", np.zeros(3, np.uint16))
    with pytest.raises(UserError, match=r"holds conversations .*leave --stream out"):
        mixture(tokenizer, source(tmp_path / "chat.jsonl")).batch(0)
    with pytest.raises(UserError, match=r"ids\.npy holds token ids"):
        stream_files(str(tmp_path / "ids.npy"))
    with pytest.raises(UserError, match="mine has no train document"):
        mixture(tokenizer, IteratedDocuments("mine", list)).batch(0)
    with pytest.raises(UserError, match="mine made a int"):
        mixture(tokenizer, IteratedDocuments("mine", lambda: 3)).batch(0)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="joins several file systems"):
        stream_files("simplecache::memory://x")
    with pytest.raises(UserError, match="file system cannot be opened"):
        stream_files("nothing://x")
    with pytest.raises(UserError, match="there is no file with text"):
        stream_files("memory://nowhere")

"""The records of a file of a stream, from any place in it. A place is a byte; in Parquet files it is a row."""

from collections.abc import Iterator
from typing import IO

from train.data.records import Record, parse_record, read_parquet

from .files import StreamFile

TEXT_BYTES = 1 << 20  # a longer text file is cut at line ends into documents of this size at most
LINE_BYTES = 1 << 26  # a longer line of JSON is left out


def read_from(file: StreamFile, place: int = 0) -> Iterator[tuple[int, Record]]:
    """(the place behind the record, record) from `place` on; a broken record has a `fault`."""
    try:
        with file.open() as opened:
            if file.suffix == ".parquet":
                for record in read_parquet(opened, file.size, first=place):
                    place += 1
                    yield place, record
            elif file.suffix in (".jsonl", ".ndjson"):
                yield from _json_lines(opened, place)
            else:
                yield from _texts(opened, place)
    except OSError as error:
        yield file.size, Record("", fault=error.strerror or str(error))


def read_share(file: StreamFile, place: int) -> int:
    """The bytes of the file before `place`, 0 where a place does not say."""
    return 0 if file.suffix == ".parquet" else min(place, file.size)


def _json_lines(opened: IO[bytes], place: int) -> Iterator[tuple[int, Record]]:
    opened.seek(place)
    while line := opened.readline(LINE_BYTES):
        begin, whole = place, line
        place += len(line)
        while not line.endswith(b"\n") and (line := opened.readline(LINE_BYTES)):
            place += len(line)
        if place - begin > len(whole):
            yield place, Record(f"byte {begin}", fault=f"a line of {place - begin:,} bytes, over {LINE_BYTES:,}")
        elif whole.strip():
            yield place, parse_record(f"byte {begin}", whole)


def _texts(opened: IO[bytes], place: int) -> Iterator[tuple[int, Record]]:
    """The documents of a text file: the text itself, or pieces of at most TEXT_BYTES that end with a line."""
    opened.seek(place)
    rest = b""
    while data := rest + opened.read(TEXT_BYTES - len(rest)):
        piece = data if len(data) < TEXT_BYTES else data[: _cut(data)]
        rest = data[len(piece) :]
        begin, place = place, place + len(piece)
        where = f"byte {begin}" if begin or rest else ""
        try:
            text = piece.decode("utf-8").removeprefix("\ufeff" if begin == 0 else "")
        except UnicodeDecodeError as error:
            fault = f"not UTF-8 text: byte 0x{piece[error.start]:02x} at {begin + error.start:,}"
        else:
            fault = "binary" if "\0" in text else ""
        if fault:
            yield opened.seek(0, 2), Record(where, fault=fault)  # no other piece of this file is text
            return
        yield place, Record(where, text=text)


def _cut(data: bytes) -> int:
    """The end of a piece: behind its last line, or behind its last full character where it has no line end."""
    if end := data.rfind(b"\n") + 1:
        return end
    last = next((n for n in range(1, 5) if data[-n] & 0xC0 != 0x80), 1)  # bytes of the last character that are there
    return len(data) - last if data[-last] >= 0xC0 else len(data)

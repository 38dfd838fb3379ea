"""Text to learn from: which files, read strictly, split into train and held-out documents.

The default needs no download: the Python standard library's own source files.
"""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError

from . import records
from .records import Messages, Record, canonical

# Not the library's own prose and code: installed packages, test suites (longer than the library itself, and absent from
# some distributions), and modules that are generated tables.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
HELD_OUT_SHARE = 0.05
FEW_DOCUMENTS = 100  # fewer are too few to judge by some of them


@dataclass(frozen=True)
class Document:
    """`messages`, where it is a conversation; its text stands for them where documents are compared and counted."""

    name: str
    text: str
    messages: Messages | None = None
    tools: Messages = ()


@dataclass(frozen=True)
class Corpus:
    """`skipped` holds one "name (reason)" per file that was not readable as text, and "name, line 3 (reason)"s."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    skipped: tuple[str, ...] = ()
    copies: int = 0  # documents that were left out because they are there already

    @property
    def is_chat(self) -> bool:
        """Whether these are conversations. Texts and conversations do not come together."""
        return self.train[0].messages is not None


def load(data: Path | None = None, *, without: Path | None = None, strict: bool = False) -> Corpus:
    """Read the standard library (None), one text file, or a folder's text files except those below `without`.

    Each record of a .jsonl or .parquet file is a document (train.data.records). UserError when nothing is left; with
    `strict` also for a file or record that would be skipped.
    """
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in files_under(root) if is_library_source(path.relative_to(root))]
        source = f"the standard library's folder {root}"
    elif data.is_file():
        root, files, source = data.parent, [data], str(data)
    elif data.is_dir():
        root, files, source = data, files_under(data), f"the folder {data}"
        files = [path for path in files if without is None or not is_below(path, without)]
    elif data.exists():
        raise UserError(f"--data {data}: it is neither a regular file nor a folder")
    else:
        raise UserError(f"--data {data}: there is no such file or folder")
    return parted(contents(files, root), source, strict=strict)


def of_dataset(dataset: Any, name: str = "dataset", *, strict: bool = False) -> Corpus:
    """The same of a Hugging Face dataset, or whatever has a length and dicts with `text` or `messages` as items."""
    return parted(((name, record) for record in records.of_dataset(dataset)), f"the {name}", strict=strict)


def parted(found: Iterable[tuple[str, Record]], source: str, *, strict: bool) -> Corpus:
    """Documents to learn from and documents held out, of the records found in a source."""
    documents, skipped, copies = distinct(found)
    if strict and skipped:
        raise UserError(f"{len(skipped)} files or records of {source} cannot be read: {skipped[0]}")
    if not documents:
        why = f" (skipped: {', '.join(skipped[:3])})" if skipped else ""
        raise UserError(f"no text in {source}{why}: give UTF-8 text with --data FILE_OR_FOLDER")
    chats = [document.messages is not None for document in documents]
    if any(chats) and not all(chats):
        text, chat = documents[chats.index(False)], documents[chats.index(True)]
        raise UserError(
            f"{source} holds texts ({text.name}) and conversations ({chat.name}): give each as its own source"
        )
    train, heldout = split(documents)
    if not train or not heldout:
        raise UserError(f"too little text in {source} to hold a part of it out")
    return Corpus(train, heldout, skipped, copies)


def files_under(root: Path) -> list[Path]:
    """All files below a folder in a fixed order, without hidden ones; a link to a folder is one, and not followed."""
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [Path(folder, name) for name in names + links if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def is_below(path: Path, folder: Path) -> bool:
    return (
        Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents
    )  # Path.resolve fails on a link to itself


def is_library_source(path: Path) -> bool:
    return path.suffix == ".py" and LEFT_OUT.isdisjoint(path.parts)


def contents(files: list[Path], root: Path) -> Iterator[tuple[str, Record]]:
    """(name of the file, record) of all files; a plain text is one record without a place."""
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):  # a pipe would be waited for, a link upwards followed for ever
                what = "a link to a folder" if stat.S_ISDIR(mode) else "neither a regular file nor a folder"
                yield name, Record("", fault=what)
                continue
            for record in records.records(path) if records.is_records(path) else (plain(path),):
                yield name, record
        except OSError as error:
            yield name, Record("", fault=error.strerror or str(error))


def plain(path: Path) -> Record:
    data = path.read_bytes()  # read_text would rewrite line ends, which count as bytes
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Record("", fault=f"not UTF-8 text: byte 0x{data[error.start]:02x} in line {line}")
    text = text.removeprefix("\ufeff")  # the byte order mark of some editors, which is no text
    return Record("", fault="binary") if "\0" in text else Record("", text=text)


def distinct(found: Iterable[tuple[str, Record]]) -> tuple[list[Document], tuple[str, ...], int]:
    """Distinct documents, what was skipped, and how many copies: of them one stays, two could end up on both sides."""
    documents: dict[str, Document] = {}
    skipped: list[str] = []
    copies = 0
    for file, record in found:
        name = f"{file}, {record.place}" if record.place else file
        text = canonical(record) if record.messages is not None else record.text
        if text is None:
            skipped.append(printable(f"{name} ({record.fault})"))
        elif text.strip():  # an empty file is nobody's mistake
            document = Document(name, text, record.messages, record.tools)
            copies += documents.setdefault(digest(text), document) is not document
    return list(documents.values()), tuple(skipped), copies


def printable(text: str) -> str:
    """Names of files and fields may hold anything: half characters, which cannot be printed, and terminals' codes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def split(documents: list[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Hold out the documents with the smallest hashes, so that no order or name decides; of few, the tail of each.

    A conversation has no tail to cut: of few there is one held out.
    """
    whole = documents[0].messages is not None
    if len(documents) < FEW_DOCUMENTS and not whole:
        parts = [cut(document) for document in documents]
        return (
            tuple(head for head, _ in parts if head.text.strip()),
            tuple(tail for _, tail in parts if tail.text.strip()),
        )
    ranked = sorted(documents, key=lambda document: digest(document.text))
    heldout = {document.name for document in ranked[: max(1, round(len(ranked) * HELD_OUT_SHARE))]}
    return (
        tuple(document for document in documents if document.name not in heldout),
        tuple(document for document in documents if document.name in heldout),
    )


def cut(document: Document) -> tuple[Document, Document]:
    """Head and tail of one document, at a line end where there is one."""
    at = int(len(document.text) * (1 - 2 * HELD_OUT_SHARE))
    at = document.text.rfind("\n", 0, at) + 1 or at
    return (
        Document(f"{document.name} (head)", document.text[:at]),
        Document(f"{document.name} (tail)", document.text[at:]),
    )


def fingerprint(corpus: Corpus) -> str:
    """A hash of the texts and their split, the same wherever the files lie."""
    whole = hashlib.sha256()
    for part in (corpus.train, corpus.heldout):
        whole.update(f"{len(part)} documents\n".encode())
        for document in part:
            whole.update(bytes.fromhex(digest(document.text)))
    return whole.hexdigest()


def text_of(documents: tuple[Document, ...]) -> bytes:
    """The documents as one stream of bytes."""
    return b"".join(document.text.encode("utf-8") for document in documents)

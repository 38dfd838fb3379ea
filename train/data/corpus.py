"""The training text: finds and reads files, removes duplicates and splits documents into train and held-out.

The default corpus needs no download: the Python standard library's source files.
"""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fnmodels.errors import UserError, printable
from fnmodels.files import read_bytes

from . import records
from .records import Messages, Record, canonical_json

# Excluded from the standard library: installed packages, test suites (longer than the library itself, and absent from
# some distributions), and modules that are generated tables.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
HELDOUT_FRACTION = 0.05
FEW_DOCUMENTS = 100  # with fewer, the tail of each document is held out instead of whole documents


@dataclass(frozen=True)
class CorpusDocument:
    """A text, or a conversation: `messages`, with their canonical JSON as `text` for comparison and hashing."""

    name: str
    text: str
    messages: Messages | None = None
    tools: Messages = ()


@dataclass(frozen=True)
class Corpus:
    """Train and held-out documents. skipped: "name (reason)" per unreadable file, "name, line 3 (reason)"."""

    train: tuple[CorpusDocument, ...]
    heldout: tuple[CorpusDocument, ...]
    skipped: tuple[str, ...] = ()
    duplicates: int = 0  # documents removed because another one is equal

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations; a corpus never mixes them with plain texts."""
        return self.train[0].messages is not None


def read_corpus(data: Path | None = None, *, without: Path | None = None, strict: bool = False) -> Corpus:
    """Reads the standard library (None), one file, or all files of a folder except those below `without`.

    Each record of a .jsonl or .parquet file is a document (train.data.records). UserError where no document is left,
    and with `strict` also for a file or record that would be skipped.
    """
    root, files, source = files_of(data, without)
    return corpus_from_records(read_files(files, root), source, strict=strict)


def files_of(data: Path | None, without: Path | None = None) -> tuple[Path, list[Path], str]:
    """(their common folder, the files, what they are called) of data as `read_corpus` takes it. UserError."""
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        library = [path for path in files_under(root) if path.suffix == ".py"]
        files = [path for path in library if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts)]
        return root, files, f"the standard library's folder {root}"
    if data.is_file():
        return data.parent, [data], str(data)
    if data.is_dir():
        files = [path for path in files_under(data) if without is None or not is_below(path, without)]
        return data, files, f"the folder {data}"
    if data.exists():
        raise UserError(f"--data {data}: it is neither a regular file nor a folder")
    raise UserError(f"--data {data}: there is no such file or folder")


def corpus_from_records(named_records: Iterable[tuple[str, Record]], source: str, *, strict: bool) -> Corpus:
    """The corpus of (file name, record) pairs. UserError where none is left, or texts and conversations mix."""
    documents, skipped, duplicates = deduplicate(named_records)
    if strict and skipped:
        raise UserError(f"{len(skipped)} files or records of {source} cannot be read: {skipped[0]}")
    if not documents:
        reasons = f" (skipped: {', '.join(skipped[:3])})" if skipped else ""
        raise UserError(f"no text in {source}{reasons}: give UTF-8 text with --data FILE_OR_FOLDER")
    chats = [document.messages is not None for document in documents]
    if any(chats) and not all(chats):
        text, chat = documents[chats.index(False)], documents[chats.index(True)]
        raise UserError(
            f"{source} holds texts ({text.name}) and conversations ({chat.name}): give each as its own source"
        )
    train, heldout = split_heldout(documents)
    if not train or not heldout:
        raise UserError(f"too little text in {source} to hold a part of it out")
    return Corpus(train, heldout, skipped, duplicates)


def files_under(root: Path) -> list[Path]:
    """All files below a folder, sorted, without hidden ones. Links to folders count as files and are not followed."""
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [Path(folder, name) for name in names + links if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def is_below(path: Path, folder: Path) -> bool:
    # not Path.resolve, which fails on a link to itself
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def read_files(files: list[Path], root: Path) -> Iterator[tuple[str, Record]]:
    """(file name, record) of all files; a plain text file is one record without a place."""
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):  # reading a pipe could block, a link upwards never end
                what = "a link to a folder" if stat.S_ISDIR(mode) else "neither a regular file nor a folder"
                yield name, Record("", fault=what)
                continue
            for record in records.read_records(path) if records.is_records(path) else (read_text_file(path),):
                yield name, record
        except OSError as error:
            yield name, Record("", fault=error.strerror or str(error))


def read_text_file(path: Path) -> Record:
    data = read_bytes(path, follow=True)  # read_text would rewrite line ends, and the byte count
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Record("", fault=f"not UTF-8 text: byte 0x{data[error.start]:02x} in line {line}")
    text = text.removeprefix("\ufeff")  # the byte order mark that some editors write
    return Record("", fault="binary") if "\0" in text else Record("", text=text)


def deduplicate(named_records: Iterable[tuple[str, Record]]) -> tuple[list[CorpusDocument], tuple[str, ...], int]:
    """(distinct documents, skipped records, number of duplicates), so that no text is both train and held out."""
    documents: dict[str, CorpusDocument] = {}
    skipped: list[str] = []
    duplicates = 0
    for file, record in named_records:
        name = f"{file}, {record.place}" if record.place else file
        text = canonical_json(record) if record.messages is not None else record.text
        if text is None:
            skipped.append(printable(f"{name} ({record.fault})").replace("\n", "\\n"))
        elif text.strip():  # an empty file is neither a document nor a fault
            document = CorpusDocument(name, text, record.messages, record.tools)
            duplicates += documents.setdefault(text_digest(text), document) is not document
    return list(documents.values()), tuple(skipped), duplicates


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def split_heldout(documents: list[CorpusDocument]) -> tuple[tuple[CorpusDocument, ...], tuple[CorpusDocument, ...]]:
    """(train, held-out): holds out the documents with the smallest hashes, independent of order and names.

    With fewer than FEW_DOCUMENTS texts the tail of each is held out. A conversation has no tail: then one is held out.
    """
    is_chat = documents[0].messages is not None
    if len(documents) < FEW_DOCUMENTS and not is_chat:
        parts = [split_tail(document) for document in documents]
        return (
            tuple(head for head, _ in parts if head.text.strip()),
            tuple(tail for _, tail in parts if tail.text.strip()),
        )
    ranked = sorted(documents, key=lambda document: text_digest(document.text))
    heldout = {document.name for document in ranked[: max(1, round(len(ranked) * HELDOUT_FRACTION))]}
    return (
        tuple(document for document in documents if document.name not in heldout),
        tuple(document for document in documents if document.name in heldout),
    )


def split_tail(document: CorpusDocument) -> tuple[CorpusDocument, CorpusDocument]:
    """Head and tail of one document, split at a line end where there is one."""
    at = int(len(document.text) * (1 - 2 * HELDOUT_FRACTION))
    at = document.text.rfind("\n", 0, at) + 1 or at
    return (
        CorpusDocument(f"{document.name} (head)", document.text[:at]),
        CorpusDocument(f"{document.name} (tail)", document.text[at:]),
    )


def fingerprint(corpus: Corpus) -> str:
    """A hash of the texts and their split, independent of file names and folders."""
    result = hashlib.sha256()
    for part in (corpus.train, corpus.heldout):
        result.update(f"{len(part)} documents\n".encode())
        for document in part:
            result.update(bytes.fromhex(text_digest(document.text)))
    return result.hexdigest()


def concatenated_bytes(documents: tuple[CorpusDocument, ...]) -> bytes:
    """The UTF-8 bytes of all documents, concatenated."""
    return b"".join(document.text.encode("utf-8") for document in documents)

"""Text to learn from: which files, read strictly, split into train and held-out documents.

The default needs no download: the Python standard library's own source files.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from train.errors import UserError
from train.records import is_records, records

# Not the library's own prose and code: installed packages, test suites (longer than the library itself, and absent from
# some distributions), and modules that are generated tables.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
HELD_OUT_SHARE = 0.05
FEW_DOCUMENTS = 100  # fewer are too few to judge by some of them


@dataclass(frozen=True)
class Document:
    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """`skipped` holds one "name (reason)" per file that was not readable as text, and "name, line 3 (reason)"s."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    skipped: tuple[str, ...] = ()


def load(data: Path | None = None, *, without: Path | None = None, strict: bool = False) -> Corpus:
    """Read the standard library (None), one text file, or a folder's text files except those below `without`.

    Each record of a .jsonl or .parquet file is a document, its text in the field `text`. UserError when nothing is
    left; with `strict` also for a file or record that would be skipped.
    """
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in files_under(root) if is_library_source(path.relative_to(root))]
        source = f"the standard library's folder {root}"
    elif data.is_file():
        root, files, source = data.parent, [data], str(data)
    elif data.is_dir():
        root, files, source = data, files_under(data), f"the folder {data}"
        files = [path for path in files if without is None or without.resolve() not in path.resolve().parents]
    elif data.exists():
        raise UserError(f"--data {data}: it is neither a regular file nor a folder")
    else:
        raise UserError(f"--data {data}: there is no such file or folder")
    documents, skipped = read_all(files, root)
    if strict and skipped:
        raise UserError(f"{len(skipped)} files or records of {source} are not readable as text: {skipped[0]}")
    if not documents:
        why = f" (skipped: {', '.join(skipped[:3])})" if skipped else ""
        raise UserError(f"no text in {source}{why}: give UTF-8 text with --data FILE_OR_FOLDER")
    train, heldout = split(documents)
    if not train or not heldout:
        raise UserError(f"too little text in {source} to hold a part of it out")
    return Corpus(train, heldout, skipped)


def files_under(root: Path) -> list[Path]:
    """All files below a folder in a fixed order, without hidden ones; links to folders are not followed."""
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def is_library_source(path: Path) -> bool:
    return path.suffix == ".py" and LEFT_OUT.isdisjoint(path.parts)


def read_all(files: list[Path], root: Path) -> tuple[list[Document], tuple[str, ...]]:
    """Distinct non-empty documents, and what was skipped. Of copies one stays: two could end up on both sides."""
    documents: dict[str, Document] = {}
    skipped: list[str] = []
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            for where, text, fault in texts_of(path):
                if text is None:
                    skipped.append(f"{name}{where} ({fault})")
                elif text.strip():
                    documents.setdefault(digest(text), Document(name + where, text))
        except OSError as error:
            skipped.append(f"{name} ({error.strerror})")
    return list(documents.values()), tuple(skipped)


def texts_of(path: Path) -> Iterator[tuple[str, str | None, str]]:
    """(place in the file, text or None, why there is none) of a file's one text, or of its records."""
    if is_records(path):
        yield from ((f", {record.place}", record.text, record.fault) for record in records(path))
        return
    try:
        text = path.read_bytes().decode("utf-8")  # read_text would rewrite line ends, which count as bytes
    except UnicodeDecodeError:
        yield "", None, "not UTF-8 text"
    else:
        yield ("", None, "binary") if "\0" in text else ("", text, "")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def split(documents: list[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Hold out the documents with the smallest hashes, so that no order or name decides; of few, the tail of each."""
    if len(documents) < FEW_DOCUMENTS:
        parts = [cut(document) for document in documents]
        return (
            tuple(head for head, _ in parts if head.text.strip()),
            tuple(tail for _, tail in parts if tail.text.strip()),
        )
    ranked = sorted(documents, key=lambda document: digest(document.text))
    heldout = {document.name for document in ranked[: round(len(ranked) * HELD_OUT_SHARE)]}
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

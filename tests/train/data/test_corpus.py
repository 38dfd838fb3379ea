"""Tests of train.data.corpus."""

import os
from pathlib import Path

import pytest

from fnmodels.errors import UserError
from train.data import corpus
from train.data.corpus import CorpusDocument


def texts(documents):
    return [document.text for document in documents]


def test_the_standard_library_is_there_without_a_download():
    found = corpus.read_corpus()
    names = [document.name for document in found.train + found.heldout]
    assert names == sorted(names[: len(found.train)]) + sorted(names[len(found.train) :])
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    assert 0.03 < len(found.heldout) / len(names) < 0.07


def test_the_split_depends_on_contents_alone():
    documents = [CorpusDocument(f"{i}.txt", f"text number {i}\n" * 3) for i in range(120)]
    train, heldout = corpus.split_heldout(documents)
    renamed = [CorpusDocument(f"other/{d.name}", d.text) for d in reversed(documents)]
    again_train, again_heldout = corpus.split_heldout(renamed)
    assert len(heldout) == 6
    assert not set(texts(train)) & set(texts(heldout))
    assert set(texts(train)) == set(texts(again_train))
    assert set(texts(heldout)) == set(texts(again_heldout))


def test_of_few_documents_the_tails_are_held_out_and_nothing_is_lost():
    text = "".join(f"line {i}\n" for i in range(100))
    (head,), (tail,) = corpus.split_heldout([CorpusDocument("one", text)])
    assert head.text + tail.text == text
    assert head.text.endswith("\n")
    assert 0.05 < len(tail.text) / len(text) < 0.15


def test_a_folder_is_read_in_a_fixed_order_and_what_is_no_text_is_reported(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second\r\nline\r\n" * 20)
    (tmp_path / "a.md").write_text("first\n" * 20)
    (tmp_path / "copy.md").write_text("first\n" * 20)
    (tmp_path / "sub" / "c.py").write_text("third\n" * 20)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "zeros.bin").write_bytes(b"\0" * 9)
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    found = corpus.read_corpus(tmp_path)
    assert [d.name for d in found.train] == ["a.md (head)", "b.txt (head)", "sub/c.py (head)"]
    assert "\r\n" in found.train[1].text
    assert [s.split(" ")[0] for s in found.skipped] == ["latin.txt", "link.txt", "zeros.bin"]


def test_copies_are_counted(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("the same\n" * 20)
    (tmp_path / "other.txt").write_text("another\n" * 20)
    found = corpus.read_corpus(tmp_path)
    assert found.duplicates == 2 and found.skipped == ()
    assert [d.name for d in found.train] == ["a.txt (head)", "other.txt (head)"]


def test_a_pipe_is_not_waited_for_and_a_byte_order_mark_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + b"from an editor\n" * 20)
    (tmp_path / "wide.txt").write_text("two bytes each\n", encoding="utf-16")
    (tmp_path / "upwards").symlink_to(tmp_path)
    (tmp_path / ".hidden").symlink_to(tmp_path)
    (tmp_path / "itself.txt").symlink_to(tmp_path / "itself.txt")
    found = corpus.read_corpus(tmp_path, without=tmp_path / "run")
    (head,), (tail,) = found.train, found.heldout
    assert head.text + tail.text == "from an editor\n" * 20
    assert found.skipped == (
        "itself.txt (Too many levels of symbolic links)",
        "pipe.jsonl (neither a regular file nor a folder)",
        "upwards (a link to a folder)",
        "wide.txt (not UTF-8 text: byte 0xff in line 1)",
    )


def test_the_fingerprint_follows_the_texts_and_not_their_place(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("some text\n" * 30)
    first, second = corpus.read_corpus(tmp_path / "here"), corpus.read_corpus(tmp_path / "there")
    assert corpus.fingerprint(first) == corpus.fingerprint(second)
    (tmp_path / "there" / "a.txt").write_text("some text\n" * 31)
    assert corpus.fingerprint(first) != corpus.fingerprint(corpus.read_corpus(tmp_path / "there"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "absent", "there is no such file or folder"),
        (lambda path: Path("/dev/null"), "/dev/null: it is neither a regular file nor a folder"),
        (lambda path: path, "no text in the folder"),
        (lambda path: _file(path / "a.bin", b"\0\xff"), r"skipped: a\.bin"),
        (lambda path: _file(path / "a.txt", b"a"), "too little text"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_in_a_sentence(tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        corpus.read_corpus(make(tmp_path))


def _file(path, content):
    path.write_bytes(content)
    return path

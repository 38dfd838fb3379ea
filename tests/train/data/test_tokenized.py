"""Tests of train.data.tokenized."""

import json
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from fnmodels.files import cache_folder
from train.data import cache, of_dataset, tokenized, tokenizer
from train.data.corpus import Corpus, CorpusDocument
from train.data.encoder import encode, encode_chats
from train.data.sources import DataSources, Source
from train.eval.pretrained import load_tokenizer

TEXTS = ["def one():\n    return 1\n" * 9, "class Two:\n\tpass\r\n\r\n" * 7, "<|endoftext|> é 漢字 \U0001f600\n" * 5]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_texts():
    documents = tuple(CorpusDocument(str(i), text) for i, text in enumerate(TEXTS))
    return DataSources((Source("small", Fraction(1), Corpus(documents, documents[1:])),))


def equal(one, other):
    """Whether the train documents have the same tokens."""
    parts = one.train.sources + other.train.sources
    return np.array_equal(*(p.arrays[0] for p in parts)) and np.array_equal(*(p.lengths for p in parts))


def test_every_text_comes_back_from_its_tokens():
    made = tokenizer.train_tokenizer(TEXTS, 300)
    made.encode_special_tokens = True
    for text in [*TEXTS, "  \n\n  x\t\n", "never seen: ÿ\0 123456", "a\r\nb"]:
        assert made.decode(made.encode(text).ids[1:]) == text


def test_training_a_tokenizer_is_deterministic():
    assert tokenizer.train_tokenizer(TEXTS, 320).to_str() == tokenizer.train_tokenizer(list(TEXTS), 320).to_str()


def test_a_word_of_megabytes_is_learnt_in_parts(monkeypatch):
    parts = []
    real = Tokenizer.train_from_iterator
    monkeypatch.setattr(Tokenizer, "train_from_iterator", lambda self, texts, by: real(self, kept(texts), by))

    def kept(texts):
        parts.extend(texts)
        return parts

    long = "acgt" * 6000
    tokenizer.train_tokenizer([*TEXTS, f"a line\n{long} and more\n"], 300)
    assert max(map(len, parts)) == 10_000 and "".join(parts) == "".join(TEXTS) + f"a line\n{long} and more\n"
    assert parts[: len(TEXTS)] == TEXTS


def test_documents_begin_and_end_with_the_end_token_and_cannot_spell_it():
    made = tokenizer.train_tokenizer(TEXTS, 300)
    end = made.token_to_id(tokenizer.END_OF_TEXT)
    line, lengths = encode(made, TEXTS, end)
    for ids in np.split(line, lengths.cumsum())[:-1]:
        assert ids[0] == ids[-1] == end
        assert end not in ids[1:-1]


def test_a_tokenizer_that_cuts_and_pads_does_neither_here(tmp_path):
    """As tokenizers saved by trl or sentence-transformers: they truncate and pad."""
    whole = tokenizer.train_tokenizer(TEXTS, 300)
    expected = encode(whole, TEXTS, 0)
    cutting = Tokenizer.from_str(whole.to_str())
    cutting.enable_truncation(4)
    cutting.enable_padding(pad_id=7, length=9)
    cutting.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.to_str() == whole.to_str() and loaded.encode(TEXTS[0]).ids == whole.encode(TEXTS[0]).ids
    for made in (Tokenizer.from_str(cutting.to_str()), loaded):
        assert all(np.array_equal(*pair) for pair in zip(encode(made, TEXTS, 0), expected, strict=True))
    talks = [(text, [(0, 3)]) for text in TEXTS]
    for pair in zip(encode_chats(cutting, talks), encode_chats(whole, talks), strict=True):
        assert np.array_equal(*pair)


def test_sizes_are_those_of_the_text():
    dataset = tokenized.tokenize(small_texts(), tokenizer.train_tokenizer(TEXTS, 300), 0, 300)
    heldout = "".join(TEXTS[1:]).encode()
    assert dataset.heldout.bytes == len(heldout)
    assert dataset.zlib_bytes == len(zlib.compress(heldout, 9))


def test_the_tokenized_corpus_is_cached_and_a_damaged_file_is_made_again(monkeypatch):
    made = tokenizer.train_tokenizer(TEXTS, 300)
    first = tokenized.tokenize(small_texts(), made, 0, 300)
    (path,) = cache_folder().glob("tokens-*")
    with monkeypatch.context() as patch:
        patch.setattr(tokenized, "encode", lambda *_: pytest.fail("tokenized again"))
        assert equal(tokenized.tokenize(small_texts(), made, 0, 300), first)
    path.write_bytes(path.read_bytes()[:100])
    assert equal(tokenized.tokenize(small_texts(), made, 0, 300), first)
    other = tokenized.tokenize(small_texts(), tokenizer.train_tokenizer(TEXTS, 280), 0, 280)
    assert not equal(other, first)


def test_what_is_not_finished_is_not_in_the_cache():
    def stopped(path):
        path.write_text("ha")
        raise KeyboardInterrupt

    def slow(path):
        path.write_text("ha")
        assert cache.cached("a.txt", lambda path: path.write_text("another's"), Path.read_text) == "another's"
        path.write_text("half and half")

    with pytest.raises(KeyboardInterrupt):
        cache.cached("a.txt", stopped, Path.read_text)
    assert list(cache_folder().iterdir()) == []
    assert cache.cached("a.txt", slow, Path.read_text) == "half and half"  # two at once: the last wins
    assert [path.name for path in cache_folder().iterdir()] == ["a.txt"]


def test_the_tokenizer_file_is_plain_json():
    text = tokenizer.train_tokenizer(TEXTS, 300).to_str()
    assert json.loads(text)["post_processor"]["type"] == "TemplateProcessing"
    assert Tokenizer.from_str(text).to_str() == text


def test_sources_are_taken_alone_in_a_list_or_as_read(tmp_path):
    words = [{"text": f"the story of {i}\n" * 20} for i in range(60)]
    made = tokenizer.train_tokenizer((row["text"] for row in words), 300)
    one = of_dataset(words, "words", weight=2)
    corpus = one.text
    two = Source("others", Fraction(1), Corpus(corpus.heldout + corpus.train[:2], corpus.train[:1]))
    alone = tokenized.tokenize(one, made, 0, 300)
    read = tokenized.tokenize(DataSources((one,)), made, 0, 300)
    assert alone.names == ("words",) and alone.fingerprint == read.fingerprint
    both = tokenized.tokenize([one, two], made, 0, 300)
    assert both.names == ("words", "others") and both.weights == (2, 1)
    # neither trains on what the other holds out
    assert [len(tokens.lengths) for tokens in both.train.sources] == [len(corpus.train) - 1, 1]

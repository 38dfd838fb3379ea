import json
import zlib

import pytest
import torch
from tokenizers import Tokenizer

from train import cache, data, tokenizer
from train.corpus import Corpus, Document

TEXTS = ["def one():\n    return 1\n" * 9, "class Two:\n\tpass\r\n\r\n" * 7, "<|endoftext|> é 漢字 \U0001f600\n" * 5]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_corpus():
    documents = tuple(Document(str(i), text) for i, text in enumerate(TEXTS))
    return Corpus(documents, documents[1:])


def test_every_text_comes_back_from_its_tokens():
    made = tokenizer.train(TEXTS, 300)
    made.encode_special_tokens = True
    for text in [*TEXTS, "  \n\n  x\t\n", "never seen: ÿ\0 123456", "a\r\nb"]:
        assert made.decode(made.encode(text).ids[1:]) == text


def test_training_a_tokenizer_is_deterministic():
    assert tokenizer.train(TEXTS, 320).to_str() == tokenizer.train(list(TEXTS), 320).to_str()


def test_documents_begin_and_end_with_the_end_token_and_cannot_spell_it():
    made = tokenizer.train(TEXTS, 300)
    end = made.token_to_id(tokenizer.END)
    for ids in tokenizer.encode_documents(made, TEXTS, end):
        assert ids[0] == ids[-1] == end
        assert end not in ids[1:-1]


def test_rows_predict_every_token_of_every_document_once():
    made = tokenizer.train(TEXTS, 300)
    dataset = data.tokenized(small_corpus(), made, 0)
    rows = data.rows(dataset.train, 16)
    lengths = dataset.train.lengths
    assert int((rows["labels"] >= 0).sum()) == int(lengths.sum()) - len(lengths)
    assert rows["positions"].max() < 16
    starts = rows["segment_ids"][:, 1:] != rows["segment_ids"][:, :-1]
    assert torch.equal(rows["positions"][:, 1:][starts & (rows["segment_ids"][:, 1:] > 0)].unique(), torch.tensor([0]))
    inside = ~starts & (rows["segment_ids"][:, 1:] > 0)
    assert torch.equal((rows["positions"][:, 1:] - rows["positions"][:, :-1])[inside].unique(), torch.tensor([1]))
    # a label is the next token of the row wherever the next token is of the same document
    assert torch.equal(rows["labels"][:, :-1][inside], rows["tokens"][:, 1:][inside])


def test_sizes_are_those_of_the_text():
    dataset = data.tokenized(small_corpus(), tokenizer.train(TEXTS, 300), 0)
    heldout = "".join(TEXTS[1:]).encode()
    assert dataset.heldout.bytes == len(heldout)
    assert dataset.zlib_bytes == len(zlib.compress(heldout, 9))


def test_the_tokenized_corpus_is_cached_and_a_damaged_file_is_made_again(monkeypatch):
    made = tokenizer.train(TEXTS, 300)
    first = data.tokenized(small_corpus(), made, 0)
    (path,) = cache.folder().glob("tokens-*")
    with monkeypatch.context() as patch:
        patch.setattr(data, "encode", lambda *_: pytest.fail("tokenized again"))
        assert torch.equal(data.tokenized(small_corpus(), made, 0).train.ids, first.train.ids)
    path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(data.tokenized(small_corpus(), made, 0).train.ids, first.train.ids)
    other = data.tokenized(small_corpus(), tokenizer.train(TEXTS, 280), 0)
    assert not torch.equal(other.train.lengths, first.train.lengths)


def test_a_batch_is_a_function_of_seed_and_step_and_epochs_cover_all_rows():
    picked = [data.order(10, 3, step, 4) for step in range(5)]
    whole = torch.cat(picked)
    assert sorted(whole[:10].tolist()) == sorted(whole[10:].tolist()) == list(range(10))
    assert whole[:10].tolist() != whole[10:].tolist()
    assert torch.equal(picked[2], data.order(10, 3, 2, 4))
    assert whole.tolist() != torch.cat([data.order(10, 4, step, 4) for step in range(5)]).tolist()
    assert len(data.order(3, 0, 0, 8)) == 8


def test_the_tokenizer_file_is_plain_json():
    text = tokenizer.train(TEXTS, 300).to_str()
    assert json.loads(text)["post_processor"]["type"] == "TemplateProcessing"
    assert Tokenizer.from_str(text).to_str() == text


def test_positions_of_padding_are_0_whichever_id_it_has():
    assert data.restart(torch.tensor([[0, 0, 1, 1, 2], [-1, -1, 1, 1, -2]])).tolist() == [[0, 0, 0, 1, 0]] * 2

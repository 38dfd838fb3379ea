"""The bytes of tokens joined are the text, for tokenizers of each kind, with characters cut between tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.served import byte_tokenizer
from train.server.token_bytes import TokenBytes

TEXT = "the fox é 안녕 🦊 the\n"
FALLBACK = ["<unk>", "▁", "the", "▁the", "▁fox", "é", *(f"<0x{byte:02X}>" for byte in range(256))]


def _sentencepiece() -> Tokenizer:
    made = Tokenizer(models.Unigram([(token, -float(place > 5)) for place, token in enumerate(FALLBACK)], 0, True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


def _bytewise() -> Tokenizer:
    made = Tokenizer(models.BPE({one: place for place, one in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    return made


def _words() -> Tokenizer:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "fox": 2, "##es": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece("##", cleanup=False)
    return made


@pytest.mark.parametrize(
    "tokenizer", [_sentencepiece(), _bytewise(), byte_tokenizer()], ids=["fallback", "level", "own"]
)
def test_bytes_of_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    read = TokenBytes(tokenizer)
    assert b"".join(map(read.of, ids)).decode().removeprefix(" ") == TEXT
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)  # some are parts of characters


def test_a_space_in_front_of_a_token_is_its_own() -> None:
    read = TokenBytes(_sentencepiece())
    assert [read.of(FALLBACK.index(name)) for name in ("the", "▁the")] == [b"the", b" the"]
    words = TokenBytes(_words())
    assert [words.of(token) for token in (1, 3)] == [b" the", b"es"]


def test_special_tokens_have_their_names_and_ids_without_a_token_nothing() -> None:
    tokenizer = _bytewise()
    read = TokenBytes(tokenizer)
    assert read.of(tokenizer.token_to_id("<s>")) == b"<s>" and read.of(10_000) == b""

"""Text from tokens in pieces: nothing broken, nothing lost, and stop texts across tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from train.generation.stop import StopText, TextStream

BROKEN = "\ufffd"


def _byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def _sentencepiece() -> Tokenizer:
    """As Llama 2's: words that begin with a space, and bytes for what is in no word."""
    words = ["▁", "▁a", "▁word", "s", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


BYTES, PIECES = _byte_level(), _sentencepiece()


def _pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.flush()]


@given(st.text(max_size=60), st.integers(0, 60))
def test_pieces_of_bytes_are_the_text(text: str, split: int) -> None:
    ids = BYTES.encode(text).ids
    before, new = ids[:split], ids[split:]
    pieces = _pieces(TextStream(BYTES, before), new)
    assert BYTES.decode(before).rstrip(BROKEN) + "".join(pieces) == text if split < len(ids) else "".join(pieces) == ""
    complete = BYTES.decode(before).endswith(BROKEN) or all(BROKEN not in piece for piece in pieces)
    assert complete or BROKEN in text


@given(st.lists(st.integers(0, 255), max_size=50))
def test_any_bytes_give_the_tokenizers_text(ids: list[int]) -> None:
    assert "".join(_pieces(TextStream(BYTES), ids)) == BYTES.decode(ids)


@given(st.lists(st.sampled_from(["▁", "▁a", "▁word", "s", "é", "ü", "€", "🙂"]), max_size=50))
def test_pieces_of_words_and_bytes_are_the_text(words: list[str]) -> None:
    ids = []
    for word in words:
        known = PIECES.token_to_id(word)
        found = [known] if known is not None else [PIECES.token_to_id(f"<0x{byte:02X}>") for byte in word.encode()]
        ids += found
    pieces = _pieces(TextStream(PIECES), ids)
    assert "".join(pieces) == PIECES.decode(ids)
    assert BROKEN not in "".join(pieces)


def test_a_character_is_returned_when_its_last_byte_arrives() -> None:
    stream = TextStream(BYTES)
    assert [stream.push(token) for token in BYTES.encode("a🙂b").ids] == ["a", "", "", "", "🙂", "b"]
    assert stream.flush() == ""
    stream = TextStream(BYTES, BYTES.encode("🙂").ids[:2])
    assert [stream.push(token) for token in BYTES.encode("🙂").ids[2:]] == ["", "🙂"]
    cut = TextStream(BYTES)
    assert [cut.push(token) for token in BYTES.encode("a🙂").ids[:-1]] == ["a", "", "", ""]
    assert cut.flush() == BROKEN  # the tail is not lost


def test_special_tokens_are_in_the_text_only_where_wanted() -> None:
    ids = [*BYTES.encode("a").ids, 256, *BYTES.encode("b").ids]
    assert "".join(_pieces(TextStream(BYTES), ids)) == "ab"
    assert "".join(_pieces(TextStream(BYTES, skip_special_tokens=False), ids)) == "a<end>b"


def test_a_long_text_costs_a_window() -> None:
    sizes = []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            sizes.append(len(ids))
            return str(BYTES.decode(ids, skip_special_tokens=skip_special_tokens))

    text = "words and é and 🙂 " * 40
    assert "".join(_pieces(TextStream(Counting()), BYTES.encode(text).ids)) == text
    assert max(sizes) < 50


STOPS = ["\n\n", "stop", "ab", "aab", "é!"]


@given(st.text("abstop\né! ", max_size=40), st.lists(st.integers(1, 4), min_size=40, max_size=40))
def test_text_up_to_the_first_stop_however_it_is_split(text: str, sizes: list[int]) -> None:
    stop, found, place = StopText(STOPS), "", 0
    for size in sizes:
        piece, place = text[place : place + size], place + size
        found += stop.push(piece)
        assert not any(s in found for s in STOPS)
        if stop.found:
            break
    found += stop.flush()
    # the first to be complete as text arrives, for a stop text cannot be waited for while another is there
    ends = [text.find(s) + len(s) for s in STOPS if s in text]
    if not ends:
        assert found == text and not stop.found
    else:
        assert stop.found and found in {text[: text.find(s)] for s in STOPS if s in text}


def test_what_may_begin_a_stop_is_held_back_and_flushed() -> None:
    stop = StopText(["stop", "!!"])
    assert [stop.push(piece) for piece in ("a s", "t", "a st", "o")] == ["a ", "", "sta ", ""]
    assert not stop.found and stop.flush() == "sto"
    assert stop.push("st") + stop.push("op here") == "" and stop.found
    assert stop.push("more") == stop.flush() == ""
    for wrong in ("stop", ["a", ""]):
        with pytest.raises(ValueError, match="stop_texts is"):
            StopText(wrong)


def test_a_stop_text_within_characters_of_several_bytes() -> None:
    stream, stop, found = TextStream(BYTES), StopText(["é!"]), ""
    for token in BYTES.encode("caféé!x").ids:
        found += stop.push(stream.push(token))
        if stop.found:
            break
    assert found == "café"

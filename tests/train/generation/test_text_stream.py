"""Text that was streamed is never taken back, for any kind of tokenizer: pieces joined are the text of all ids."""

import codecs
import functools
from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from train.commands.sample import Prompt, show
from train.generation import text
from train.generation.decoder_traits import CLEANED, open_end
from train.generation.requests import Answer, Event, Request
from train.generation.stop import TextStream, text_of

BROKEN = "\ufffd"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "a", "the", "s", "##s", "##ing", ".", "▁.", "n't", "'", "é", "안", "|", "<pad>", "fox</w>"]
EXTRA = ["<call>", " two words "]  # added tokens that are no special ones
SPECIAL = ["<s>", "</s>"]
D = decoders


def _tokenizer(decoder: Any, vocabulary: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    if decoder is not None:
        made.decoder = decoder
    made.add_tokens(EXTRA)
    made.add_special_tokens(SPECIAL)
    return made


def _unigram(decoder: Any) -> Tokenizer:
    vocabulary = [(token, -1.0) for token in ["<unk>", *WORDS, *BYTES]]
    made = Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    made.decoder = decoder
    made.add_special_tokens(SPECIAL)
    return made


def _chain(*steps: Any) -> Any:
    return D.Sequence(list(steps))


SPACES = D.Replace("▁", " ")
FALLBACK = {
    "llama": _chain(SPACES, D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)),
    "gemma": _chain(SPACES, D.ByteFallback(), D.Fuse()),
    "bytes_then_metaspace": _chain(D.ByteFallback(), D.Metaspace()),
    "bytes_alone": D.ByteFallback(),
    "strips_much": _chain(SPACES, D.ByteFallback(), D.Fuse(), D.Strip(" ", 5, 0)),
    "cleans_spaces": _chain(SPACES, D.ByteFallback(), D.Fuse(), D.Replace(" .", "."), D.Replace("s.", "!")),
    "widens": _chain(SPACES, D.ByteFallback(), D.Fuse(), D.Replace("aa", "bbbb"), D.Replace("bbs", "c")),
    "spells": _chain(
        SPACES, D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0), D.Replace("é\n", "안a"), D.Replace("กa", "a")
    ),
    "by_expression": _chain(SPACES, D.ByteFallback(), D.Fuse(), D.Replace(Regex(" +"), " ")),
    "fused_first": _chain(D.Fuse(), D.ByteFallback(), D.WordPiece()),
    "nested": _chain(_chain(SPACES, D.ByteFallback()), _chain(D.Fuse(), D.Strip(" ", 1, 0))),
}
OTHERS = {
    "words": D.WordPiece(),
    "words_as_they_are": D.WordPiece(cleanup=False),
    "metaspace": D.Metaspace(),
    "metaspace_never": D.Metaspace(prepend_scheme="never"),
    "metaspace_first": D.Metaspace(prepend_scheme="first", split=False),
    "word_ends": D.BPEDecoder("</w>"),
    "speech": D.CTC(),
    "none": None,
}


def _byte_level(*steps: Any) -> Tokenizer:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    pairs = [one + other for one, other in ("Ġt", "ìķ", "he", "ðŁ", "ĺĢ", "ĭë")]  # some end within a character
    return _tokenizer(_chain(D.ByteLevel(), *steps) if steps else D.ByteLevel(), [*letters, *pairs])


@cache
def _all() -> dict[str, Tokenizer]:
    made = {name: _tokenizer(decoder, [*WORDS, *BYTES]) for name, decoder in FALLBACK.items()}
    made |= {name: _tokenizer(decoder, WORDS) for name, decoder in OTHERS.items()}
    made["unigram"] = _unigram(_chain(D.ByteFallback(), D.Metaspace(prepend_scheme="first")))
    made["byte_level"], made["byte_level_cleaned"] = _byte_level(), _byte_level(D.Replace(" .", "."))
    return made


NAMES = [*FALLBACK, *OTHERS, "unigram", "byte_level", "byte_level_cleaned"]


def _written(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text byte by byte, in either way of writing bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = [f"<0x{byte:02X}>" for byte in text.encode()]
    if tokenizer.token_to_id(names[0]) is None:
        names = list(ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])
    ids = [tokenizer.token_to_id(name) for name in names]
    return [token for token in ids if token is not None]


@st.composite
def texts(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[list[int], int, bool]:
    """Ids of any tokens and of characters byte by byte, where they are split, and whether special tokens are left out.

    Lists longer than the stream's window, so that it moves.
    """
    count = tokenizer.get_vocab_size()
    whole = st.sampled_from(["안녕", "ก", "😀", "é", "\n", "a ."]).map(lambda text: _written(tokenizer, text))
    parts = st.one_of(st.integers(0, count - 1).map(lambda token: [token]), whole)
    ids = [token for part in draw(st.lists(parts, max_size=60)) for token in part]
    return ids, draw(st.integers(0, len(ids))), draw(st.booleans())


codecs.register_error("each_byte", lambda error: (BROKEN * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def _decoded(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The decoder's text, once each byte that is no character is written as a replacement character of its run."""
    names = [tokenizer.id_to_token(token) for token in ids]
    if tokenizer.token_to_id(BYTES[0]) is None or tokenizer.decode(_written(tokenizer, "é")) != "é":
        return tokenizer.decode(ids, skip_special_tokens=skip)
    valid = []
    for is_byte, run in groupby([name for name in names if not (skip and name in SPECIAL)], BYTES.__contains__):
        if is_byte:
            text = bytes(int(name[3:5], 16) for name in run).decode("utf-8", "each_byte")
            run = iter(f"<0x{byte:02X}>" for byte in text.encode())
        valid += [tokenizer.token_to_id(name) for name in run]
    return tokenizer.decode(valid, skip_special_tokens=skip)


def _check(tokenizer: Tokenizer, before: list[int], new: list[int], skip: bool, found: str) -> None:
    """`found` is the text of all without that of `before`; a character that `before` begins belongs to `new`."""
    shown, text = _decoded(tokenizer, before, skip).rstrip(BROKEN), _decoded(tokenizer, [*before, *new], skip)
    if BROKEN not in text:
        assert text == tokenizer.decode([*before, *new], skip_special_tokens=skip)
    if text.startswith(shown):
        assert found == text[len(shown) :]
    else:  # replacing across the split has no one right answer
        assert open_end(tokenizer).size and text.endswith(found)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(data=st.data())
def test_text_stream_of_any_tokens_adds_up_to_the_decoders_text(name: str, data: st.DataObject) -> None:
    """Wherever it ends."""
    tokenizer = _all()[name]
    ids, split, skip = data.draw(texts(tokenizer))
    before, new = ids[:split], ids[split:]
    for end in {len(new), data.draw(st.integers(0, len(new)))}:
        stream = TextStream(tokenizer, before, skip_special_tokens=skip)
        pieces = [stream.push(token) for token in new[:end]]
        pending = stream.pending()
        rest = stream.flush()
        assert rest.startswith(pending) and set(rest[len(pending) :]) <= {BROKEN}
        _check(tokenizer, before, new[:end], skip, "".join(pieces) + rest)


def _ids(name: str, *tokens: str) -> list[int]:
    return [_all()[name].token_to_id(token) for token in tokens]


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram", "bytes_then_metaspace"])
def test_text_stream_behind_a_prompt_of_bytes_is_the_answer_alone(name: str) -> None:
    prompt = _written(_all()[name], "안녕하세요")
    stream = TextStream(_all()[name], prompt)
    assert stream.push(*_ids(name, "▁the")) + stream.flush() == " the"
    begun = TextStream(_all()[name], prompt[:-1])  # within a character
    assert begun.push(prompt[-1]) + begun.push(*_ids(name, "▁the")) == "요 the"


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram", "bytes_then_metaspace", "bytes_alone"])
def test_text_stream_of_bytes_shows_each_character_with_its_last_byte(name: str) -> None:
    """Although the decoder makes the whole run replacement characters where a later byte is invalid."""
    tokenizer, text = _all()[name], "สวัสดี 안녕😀"
    stream = TextStream(tokenizer, _ids(name, "a"))
    pieces = [stream.push(token) for token in _written(tokenizer, text)]
    assert [piece for piece in pieces if piece] == list(text)
    assert [piece[:1] for piece in pieces] == [char for own in text for char in ["", "", "", own][-len(own.encode()) :]]
    assert stream.push(_written(tokenizer, "안")[0]) == stream.pending() == ""
    assert stream.push(tokenizer.token_to_id("<s>")) == ""  # a special token does not end the run
    assert stream.push(_written(tokenizer, "안")[1]) == ""
    assert stream.push(_written(tokenizer, "a")[0]) == BROKEN * 2 + "a"  # what was shown before stays
    assert stream.push(_written(tokenizer, "é")[0]) + stream.flush() == BROKEN
    assert tokenizer.decode(_written(tokenizer, text)[:-1]) == BROKEN * (len(text.encode()) - 1)
    assert text_of(tokenizer, _written(tokenizer, text)[:-1]) == text[:-1] + BROKEN * 3


def test_prompt_and_text_that_are_cut_within_a_character_keep_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = _all()["llama"]
    answer, prompt = SimpleNamespace(tokens=[_written(tokenizer, "안녕")[:-1]]), _written(tokenizer, "สวัสดี")[1:]
    monkeypatch.setattr(text, "generate", lambda *_, **__: answer)
    monkeypatch.setattr(text, "prompt_ids", lambda *_: prompt)
    config: Any = SimpleNamespace(max_position_embeddings=99)
    assert text.complete({}, config, tokenizer, "", (), tokens=5) == BROKEN * 2 + "วัสดี안" + BROKEN * 2
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    show(model, [{"prompt": ""}], [Prompt(prompt, [])], iter([Event(0, 0, 0.0, 0.0, "!", "max_new")]))
    assert capsys.readouterr().out == BROKEN * 2 + "วัสดี!\n"


def test_text_stream_without_tokens_for_a_replacement_character_waits_for_the_end() -> None:
    """As where a vocabulary was cut: an invalid byte could not be written without spoiling its run."""
    tokenizer = _tokenizer(FALLBACK["llama"], ["a", *BYTES[:0x80], *BYTES[0xC0:0xC8], *BYTES[0x80:0xB0]])
    ids = _written(tokenizer, "\né")
    stream = TextStream(tokenizer, [0])
    assert [stream.push(token) for token in [0, *ids, ids[1]]] == [""] * 5
    assert stream.flush() == "a" + BROKEN * 4


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("name", ["llama", "byte_level", "byte_level_cleaned", "cleans_spaces", "widens"])
def test_text_stream_of_characters_of_several_tokens_costs_a_window(name: str, cleans: bool) -> None:
    """Where no token alone is a character, as in a Thai text of GPT-2's tokenizer, and where spaces are cleaned."""
    sizes, tokenizer = list[int](), _all()[name]

    class Counting:
        decoder, id_to_token, token_to_id = tokenizer.decoder, tokenizer.id_to_token, tokenizer.token_to_id
        clean_up_tokenization_spaces = cleans  # as transformers' tokenizers do

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            sizes.append(len(ids))
            text = str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
            return functools.reduce(lambda text, one: text.replace(one, one[1:]), CLEANED if cleans else (), text)

    ids = _written(tokenizer, "สวัสดีครับ ." * 40)
    assert text_of(Counting(), ids) == Counting().decode(ids)
    sizes.clear()
    TextStream(Counting(), ids)
    text_of(Counting(), ids)
    assert max(sizes) < 250 < len(ids)


def test_text_stream_of_a_tokenizer_of_transformers_cleans_spaces_before_it_sends() -> None:
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=_all()["unigram"], clean_up_tokenization_spaces=True)
    ids = _ids("unigram", "▁the", "▁", ".", "▁the", "▁", "n't", *["▁the"] * 10) + _written(_all()["unigram"], "é\n")
    stream = TextStream(tokenizer, ids[:1])
    pieces = [stream.push(token) for token in ids[1:]]
    assert "".join(pieces) + stream.flush() == ". then't" + " the" * 10 + "é\n"
    assert any(pieces)


def test_text_stream_of_a_tokenizer_that_refuses_unknown_names_is_its_text() -> None:
    """Such as CANINE's, whose tokens are characters."""

    class Characters:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join(map(chr, ids))

        def convert_tokens_to_ids(self, name: str) -> int:
            return ord(name)

    assert text_of(Characters(), [97, 0x0E01, 98]) == "aกb"


def _answer(
    name: str, ids: list[int], *, max_new: int = 99, stop_ids: tuple[int, ...] = (), stops: tuple[str, ...] = ()
) -> tuple[str, str | None, int]:
    """(the text, the reason, how many tokens were taken)."""
    answer = Answer(0, Request(_ids(name, "a"), max_new, stop_ids=stop_ids, stop_texts=stops), _all()[name])
    text = ""
    for token in ids:
        event = answer.append(token, 0.0, 0.0)
        text += event.text
        if event.reason:
            return text, event.reason, len(answer.tokens)
    return text, None, len(answer.tokens)


def test_answer_ends_with_the_byte_that_completes_a_stop_text() -> None:
    """Although later bytes might have spoiled it: they never come."""
    ids = _ids("llama", "the") + _written(_all()["llama"], "안\n\n녕!")
    assert _answer("llama", ids, stops=("\n\n",)) == ("the안", "stop_text", 6)
    assert _answer("llama", ids, stops=("the안\n",)) == ("", "stop_text", 5)
    assert _answer("llama", ids, stops=("녕!", "x")) == ("the안\n\n", "stop_text", 10)
    assert _answer("llama", ids, stops=("녕!",), max_new=10) == ("the안\n\n", "stop_text", 10)
    assert _answer("llama", ids, stops=("녕!",), max_new=9) == ("the안\n\n녕", "max_new", 9)
    assert _answer("llama", ids, stops=(BROKEN,), max_new=3) == ("the", "max_new", 3)  # an incomplete character is none
    assert _answer("llama", ids, stop_ids=(ids[-1],)) == ("the안\n\n녕", "stop_id", 10)


STOPS = ("the", "안", "\n", " ", "s.", "é a")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_answer_ends_with_the_token_that_completes_a_stop_text(name: str, data: st.DataObject) -> None:
    """As found by decoding all tokens after each one; what was sent before is the text in front of it."""
    tokenizer = _all()[name]
    ids, split, skip = data.draw(texts(tokenizer))
    before, new = ids[:split] or [0], ids[split:]
    wanted, count = "", len(new)
    for size in range(1, len(new) + 1):
        stream = TextStream(tokenizer, before, skip_special_tokens=skip)
        wanted = "".join(map(stream.push, new[:size])) + stream.flush()
        places = [place for place in map(wanted.rstrip(BROKEN).find, STOPS) if place >= 0]
        if places:
            wanted, count = wanted[: min(places)], size
            break
    answer, text = Answer(0, Request(before, len(new) + 1, stop_texts=STOPS), tokenizer, skip), ""
    for token in new:
        event = answer.append(token, 0.0, 0.0)
        text += event.text
        if event.reason:
            break
    assert len(answer.tokens) == count
    assert text == wanted if answer.tokens and event.reason == "stop_text" else wanted.startswith(text)

"""Texts as ids: one begin token in front and none behind, whatever the tokenizer adds."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from fnmodels.errors import UserError
from train.data.encoder import added_in_front, beginning_ids
from train.eval.text_ids import TextIds
from train.generation.text import prompt_ids

BOS, EOS, CLS = 256, 257, 258
# what is added to a text, and the part of it in front
ADDED = {
    "nothing": ("$A", []),
    "bos": ("<bos> $A", [BOS]),
    "eos": ("$A <eos>", []),
    "both": ("<bos> $A <eos>", [BOS]),
    "two": ("<bos> <cls> $A <eos>", [BOS, CLS]),
}
every_tokenizer = pytest.mark.parametrize("added", ADDED)
LONGEST = 8


def _tokenizer(added: str) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>", "<cls>"])
    special = [("<bos>", BOS), ("<eos>", EOS), ("<cls>", CLS)]
    made.post_processor = processors.TemplateProcessing(ADDED[added][0], None, special)
    return made


def _letters(text: str) -> list[int]:
    return _tokenizer("nothing").encode(text, add_special_tokens=False).ids


def _texts(added: str, begin: int | None = BOS, **how: bool) -> TextIds:
    return TextIds(Path("folder"), _tokenizer(added), begin, **how)


@every_tokenizer
def test_pair_of_context_and_continuation_begins_once_and_ends_never(added: str) -> None:
    front = ADDED[added][1]
    start, texts = front or [BOS], _texts(added)
    written = _tokenizer(added).decode(start, skip_special_tokens=False)
    assert texts.pair("One", " two") == (front + _letters("One"), _letters(" two"))
    assert texts.pair("One ", "two") == (front + _letters("One"), _letters(" two"))
    assert texts.pair(f"{written}One", " two") == (start + _letters("One"), _letters(" two"))
    assert texts.pair("", "One") == texts.pair("", f"{written}One") == (start, _letters("One"))
    assert texts.pair("  ", "x") == (start, _letters("  x"))
    assert texts.pair("One", "") == (front + _letters("One"), [])


@every_tokenizer
@pytest.mark.parametrize("size", [0, 1, LONGEST - 1, LONGEST, LONGEST + 1, 2 * LONGEST, 2 * LONGEST + 1, 37])
def test_windows_have_each_token_of_the_text_once_as_a_target(added: str, size: int) -> None:
    start = ADDED[added][1] or [BOS]
    text = "abcdefghijklmnopqrstuvwxyzabcdefghijk"[:size]
    for written in (text, _tokenizer(added).decode(start, skip_special_tokens=False) + text):
        windows = _texts(added).windows(written, LONGEST)
        assert [token for _, targets in windows for token in targets] == _letters(text)
        assert all(len(context) + len(targets) - 1 <= LONGEST for context, targets in windows)
        assert [context for context, _ in windows[:1]] == [start][: len(windows)]
        assert all(context and not {BOS, CLS, EOS} & set(context) for context, _ in windows[1:])


def test_windows_as_the_harness_has_them_begin_twice_and_end() -> None:
    (window,) = _texts("both", as_harness=True).windows("One", LONGEST)
    assert window == ([BOS], [BOS, *_letters("One"), EOS])
    assert _texts("both", as_harness=True).pair("One", " two") == (
        [BOS, *_letters("One"), EOS],
        [*_letters("two"), EOS],
    )
    assert _texts("nothing", as_harness=True).windows("One", LONGEST) == _texts("nothing").windows("One", LONGEST)
    get_windows = pytest.importorskip("lm_eval.utils")
    ids = _letters("abcdefghijklmnopqrstuvwxyz")
    wanted = map(get_windows.make_disjoint_window, get_windows.get_rolling_token_windows(ids, BOS, LONGEST, 1))
    assert _texts("nothing").windows("abcdefghijklmnopqrstuvwxyz", LONGEST) == list(wanted)


def test_texts_without_special_tokens_begin_with_the_checkpoints_token() -> None:
    texts = _texts("both", add_special_tokens=False)
    assert texts.pair("One", " two") == (_letters("One"), _letters(" two"))
    assert texts.windows("One", LONGEST) == [([BOS], _letters("One"))]
    with pytest.raises(UserError, match="neither bos_token_id nor eos_token_id"):
        _texts("nothing", begin=None).pair("", "x")
    assert _texts("bos", begin=None).pair("", "x") == ([BOS], _letters("x"))  # the tokenizer's own


@every_tokenizer
def test_prompt_begins_once_and_does_not_end(added: str) -> None:
    """The prompt of `train.sample`, behind whose <eos> a model would begin something else."""
    tokenizer, front = _tokenizer(added), ADDED[added][1]
    assert added_in_front(tokenizer) == front
    assert prompt_ids(tokenizer, "One") == front + _letters("One")
    assert beginning_ids(tokenizer, "") == front
    written = tokenizer.decode(front, skip_special_tokens=False)
    assert prompt_ids(tokenizer, f"{written}One") == front + _letters("One")


def test_added_in_front_of_a_tokenizer_without_letters_is_not_what_is_added_behind() -> None:
    tokenizer = _tokenizer("both")
    tokenizer.model = models.BPE({digit: i for i, digit in enumerate("0123456789")}, [])
    assert added_in_front(tokenizer) == [BOS] and beginning_ids(tokenizer, "12") == [BOS, 1, 2]
    assert prompt_ids(tokenizer, "12") == [BOS, 1, 2]

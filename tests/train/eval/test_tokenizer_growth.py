"""A tokenizer.json that would make any text endless is refused before it has seen one."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fnmodels.errors import UserError
from params.io.tokenizer_growth import unbounded_part
from train.data.tokenizer import train_tokenizer
from train.eval.pretrained import load_tokenizer


def of(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, [], unk_token="a"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


DOUBLING, WIDENING = normalizers.Replace("a", "aa"), normalizers.Replace(Regex(""), "a")
BYTES = pre_tokenizers.ByteLevel()
ENDLESS = {
    "replacements": ("normalizer", of(normalizer=normalizers.Sequence([DOUBLING] * 60))),
    "sequences of them": (
        "normalizer",
        of(normalizer=normalizers.Sequence([normalizers.Sequence([DOUBLING] * 6)] * 2)),
    ),
    "one long replacement": ("normalizer", of(normalizer=normalizers.Replace("ab", "a" * 3000))),
    "a regular expression": ("normalizer", of(normalizer=normalizers.Sequence([WIDENING] * 11))),
    "letters of bytes": ("pre_tokenizer", of(pre_tokenizer=pre_tokenizers.Sequence([BYTES] * 60))),
    "decoding": ("decoder", of(decoder=decoders.Sequence([decoders.Replace("a", "aa")] * 60))),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_load_tokenizer_that_lengthens_texts_without_bound_is_refused(name: str, tmp_path: Path) -> None:
    part, tokenizer = ENDLESS[name]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=rf"tokenizer\.json: its {part} could make a text more than 1,000 times"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_of_usual_parts_is_read(tmp_path: Path) -> None:
    metaspace = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581"), normalizers.NFKC()]
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Lowercase()]
    for tokenizer in (
        of(normalizer=normalizers.Sequence(spaces), decoder=decoders.Sequence(metaspace)),
        of(normalizer=normalizers.Sequence(quotes), pre_tokenizer=pre_tokenizers.Metaspace()),
        train_tokenizer(["some text to learn from\n" * 9], 280),
        of(),
    ):
        assert unbounded_part(tokenizer) is None
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert load_tokenizer(tmp_path).get_vocab_size() == tokenizer.get_vocab_size()

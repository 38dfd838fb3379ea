"""Compressed ids of tokens, made of a tokenizer, against a loop; models that are initialized and loaded with them."""

import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel

import params as P
from fnmodels import deepseek_v4, deepseek_v41, tree
from fnmodels.errors import MismatchError
from params import compressed_ids as module
from tests.support.cases import generic_params
from tests.variants import deepseek_v4 as v4
from tests.variants.deepseek_v41 import PLAIN, TEXT

WORDS = ["the", " the", "The", " THE", "thé", "the\n", "\t", " ", "  ", "\r\n ", "ﬁ", "fi", "Ω", "Ω", "ω", "①", "1"]
WORDS += ["é", "É", "e", "日", "\u3000日", " 日本", "a b", "a \n b", "A\tB", "́", "~", "!", "！", "\ue000"]
PAD = "<pad>"


def byte_tokenizer(words: list[str] = WORDS, special: tuple[str, ...] = (PAD, "<Pad>")) -> Tokenizer:
    """Of bytes, as the published one; some bytes are parts of characters, and added tokens stand at the end."""
    letters = [*"abcdeABCDE", *sorted(ByteLevel.alphabet())[-20:]]
    spelt = ["".join(_LETTERS[byte] for byte in word.encode()) for word in words]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*letters, *spelt]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    return tokenizer


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte, as GPT-2 writes them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


_LETTERS = _byte_letters()


def by_loop(tokenizer: Tokenizer) -> list[int]:
    """The published recipe by Python's own tables; each letter is lowercased alone, as the tokenizers library does."""
    seen: list[Any] = []
    found = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token)
        else:
            letters = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
            letters = "".join(c.lower() for c in letters if unicodedata.category(c) != "Mn")
            for space in ("\t", "\r", "\n"):
                letters = letters.replace(space, " ")
            while "  " in letters:
                letters = letters.replace("  ", " ")
            letters = " " if letters == " " else letters.strip().replace("\ue000", " ")
            key = letters or text
        if key not in seen:
            seen.append(key)
        found.append(seen.index(key))
    return found


TOKENIZER = byte_tokenizer()
IDS = by_loop(TOKENIZER)
SIZES = {"vocab_size": len(IDS) + 3, "engram_compressed_vocab_size": max(IDS) + 1, "engram_pad_token_id": len(IDS) - 2}


def config_of(**changes: Any) -> Any:
    return deepseek_v41.Config.from_hf(TEXT | SIZES | changes)


CONFIG = config_of()
TABLES = ("layers.1.ngrams.token_map", "layers.2.ngrams.token_map")


def test_ids_are_those_of_a_written_out_loop() -> None:
    """With parts of characters, accents, compatibility forms, white space, and added tokens."""
    assert module.compressed_ids(TOKENIZER) == IDS
    spelt = {TOKENIZER.decode([t], skip_special_tokens=False): IDS[t] for t in range(len(IDS))}
    assert spelt["the"] == spelt[" THE"] == spelt["thé"] == spelt["the\n"] and spelt["a b"] == spelt["a \n b"]
    assert spelt["\t"] == spelt["  "] == spelt[" "] and spelt["日"] == spelt["\u3000日"] != spelt[" 日本"]
    assert spelt[PAD] == spelt["<Pad>"] and spelt["ﬁ"] == spelt["fi"] and spelt["!"] == spelt["！"]
    parts = [t for t in range(len(IDS)) if "\ufffd" in TOKENIZER.decode([t])]
    assert len(parts) > 5 and len({IDS[t] for t in parts}) == len(parts)


def _without(kind: str) -> Any:
    """A normalizer without the steps of one kind."""
    sequence = normalizers.Sequence
    return lambda steps: sequence([step for step in steps if type(step).__name__ != kind])


STEPS = ("NFKC", "StripAccents", "Lowercase", "Replace", "Strip")


@pytest.mark.parametrize("step", STEPS)
def test_a_missing_step_is_found(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs; NFD alone is what StripAccents needs."""
    monkeypatch.setattr(normalizers, "Sequence", _without(step))
    assert module.compressed_ids(TOKENIZER) != IDS


def test_parts_of_characters_by_their_text_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: all of them have one id."""
    monkeypatch.setattr(module, "_PART", "no text has this")
    assert module.compressed_ids(TOKENIZER) != IDS


def test_a_table_has_the_ids_and_that_of_padding_in_rows_without_a_token() -> None:
    table = P.token_map(CONFIG, TOKENIZER)
    assert table.dtype == torch.float32 and table.shape == (CONFIG.vocab_size, 1)
    assert table[:, 0].tolist() == [*IDS, *[IDS[CONFIG.ngram_padding]] * 3]


REFUSED = {
    "fewer rows": ({"vocab_size": len(IDS) - 1}, rf"has {len(IDS)} tokens, and vocab_size is {len(IDS) - 1}"),
    "other ids": (
        {"engram_compressed_vocab_size": max(IDS)},
        rf"have {max(IDS) + 1} compressed ids, and the model hashes n-grams of {max(IDS)} ",
    ),
    "no padding": ({"engram_pad_token_id": len(IDS)}, f"ngram_padding is token {len(IDS)}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_disagree_are_refused(name: str) -> None:
    changes, words = REFUSED[name]
    config = config_of()
    ours = {"engram_compressed_vocab_size": "ngram_ids", "engram_pad_token_id": "ngram_padding"}
    config = replace(config, **{ours.get(key, key): value for key, value in changes.items()})
    with pytest.raises(MismatchError, match=words):
        P.token_map(config, TOKENIZER)


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="has no table of compressed token ids"):
        P.token_map(deepseek_v41.Config.from_hf(PLAIN), TOKENIZER)
    with pytest.raises(ValueError, match="has no table of compressed token ids"):
        P.token_map(deepseek_v4.Config.from_hf(v4.TINY), TOKENIZER)


def test_initialized_parameters_get_the_table() -> None:
    params = P.init(CONFIG, 0, dtype=torch.bfloat16)
    made = tree.flatten(P.with_token_map(CONFIG, params, TOKENIZER))
    table, before = P.token_map(CONFIG, TOKENIZER), tree.flatten(params)
    assert made.keys() == before.keys()
    for path, leaf in made.items():
        assert torch.equal(leaf, table) if path in TABLES else leaf is before[path]
    first, second = (made[path] for path in TABLES)
    assert first.dtype == torch.float32 and first.data_ptr() != second.data_ptr()
    assert not torch.equal(before[TABLES[0]], table)


def publish(folder: Path) -> None:
    """Writes a model as it is published: with a tokenizer, and no table of it."""
    P.save_pretrained(folder, CONFIG, P.with_token_map(CONFIG, generic_params(CONFIG), TOKENIZER))
    state = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in state.items() if not name.endswith("token_map")}
    assert len(state) - len(kept) == 2
    save_file(kept, folder / "model.safetensors")
    TOKENIZER.save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish(tmp_path)
    return tmp_path


@pytest.mark.parametrize("how", [{}, {"copy": True}, {"dtype": torch.bfloat16}, {"check_finite": True}], ids=str)
def test_files_without_tables_are_loaded_with_those_of_the_tokenizer(folder: Path, how: Any) -> None:
    config, params = P.load_pretrained(folder, **how)
    assert config == CONFIG
    flat, table = tree.flatten(params), P.token_map(CONFIG, TOKENIZER)
    assert flat.keys() == tree.flatten(deepseek_v41.spec(CONFIG)).keys()
    assert all(torch.equal(flat[path], table) and flat[path].dtype == torch.float32 for path in TABLES)
    P.save_pretrained(folder / "again", config, params)
    assert torch.equal(tree.flatten(P.load_pretrained(folder / "again")[1])[TABLES[1]], table)


def test_files_without_tables_and_without_their_tokenizer_are_refused(folder: Path) -> None:
    byte_tokenizer([*WORDS, "another"]).save(str(folder / "tokenizer.json"))
    with pytest.raises(MismatchError, match=rf"{folder}: The {len(IDS) + 1} tokens of the tokenizer have"):
        P.load_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MismatchError, match=r"engram.token_map: missing[\s\S]*tokenizer.json is missing"):
        P.load_pretrained(folder)


def test_the_tables_of_files_win_over_the_tokenizer(tmp_path: Path) -> None:
    params = generic_params(CONFIG)
    P.save_pretrained(tmp_path, CONFIG, params)
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    found = tree.flatten(P.load_pretrained(tmp_path)[1])
    assert torch.equal(found[TABLES[0]], tree.flatten(params)[TABLES[0]])
    assert not torch.equal(found[TABLES[0]], P.token_map(CONFIG, TOKENIZER))


@pytest.mark.parametrize("number", [-1.0, float(CONFIG.ngram_ids), 0.5, float("nan"), float("inf"), 2.0**40])
def test_numbers_that_are_no_compressed_id_are_refused(number: float, tmp_path: Path) -> None:
    """In the second table, whatever reads it."""
    params = P.with_token_map(CONFIG, generic_params(CONFIG), TOKENIZER)
    tensors = {name: value.clone() for name, value in P.export(CONFIG, params)}
    P.from_tensors(CONFIG, tensors.items())
    P.save_pretrained(tmp_path, CONFIG, params)
    tensors["layers.2.engram.token_map"][5, 0] = number
    save_file(tensors, tmp_path / "model.safetensors")
    words = rf"{TABLES[1]}, layers.2.engram.token_map: holds {number:.17g}, which is no whole number from 0 to "
    words += rf"{CONFIG.ngram_ids - 1} \(1 of {CONFIG.vocab_size} values\)"
    with pytest.raises(MismatchError, match=words):
        P.from_tensors(CONFIG, tensors.items())
    for how in ({}, {"copy": True}, {"dtype": torch.float16}):
        with pytest.raises(MismatchError, match=words):
            P.load_pretrained(tmp_path, **how)

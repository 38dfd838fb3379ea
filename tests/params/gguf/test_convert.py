"""fnmodels-convert: the folder has the model of the file, and its tokenizer cuts text as the rules of llama.cpp do."""

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import BertWordPieceTokenizer, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import params as P
from fnmodels import tree
from params import inspect
from params.convert import main
from tests.support.gguf_files import Change, tensors_of, write_gguf
from tests.support.gguf_models import MODELS
from train import cli

LLAMA = MODELS["llama"] | {"vocab_size": 400}
TEXTS = (
    "Hello world, it's 2024! I'LL see 12345678 we'll",
    "  def f(x):\n\treturn  x**2\n\n\n  ",
    "Ünïcödé cafe\u0301 漢字 🎉\u00a0nbsp",
    "<s>a<|turn|> b</s> c",
    "",
)
# What each rule is in transformers' tokenizers of the models that it is of.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _cut(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


RULES = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": _cut(QWEN),
    "llama-bpe": _cut(QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")),
}


def trained(rule: str) -> Tokenizer:
    """A tokenizer of 400 tokens that cuts by the rule, with special tokens first."""
    made = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    made.pre_tokenizer, made.decoder = RULES[rule], decoders.ByteLevel()
    if rule == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|turn|>"],
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=1,
    )
    made.train_from_iterator([*TEXTS[:3] * 5, "the 2024 234 345 world worlds hello return returns"], trainer)
    return made


def byte_bpe(tokenizer: Tokenizer, rule: str) -> Change:
    def add(writer: gguf.GGUFWriter) -> None:
        values = json.loads(tokenizer.to_str())["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(sorted(values["vocab"], key=values["vocab"].get))
        writer.add_token_types([3, 3, 3] + [1] * (len(values["vocab"]) - 3))
        writer.add_token_merges([" ".join(one) for one in values["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{{ messages }}")

    return add


def write(folder: Path, change: Change = lambda writer: None) -> Path:
    return write_gguf(folder / "it.gguf", "llama", LLAMA, tensors_of(LLAMA), change)


def test_the_folder_has_the_model_of_the_file(tmp_path: Path) -> None:
    path, folder = write(tmp_path, byte_bpe(trained("smollm"), "smollm")), tmp_path / "folder"
    assert main([str(path), str(folder), "--dtype", "bfloat16"]) == 0
    config, params = P.load_pretrained(folder)
    expected_config, expected = P.load_pretrained(path, dtype=torch.bfloat16)
    assert config == expected_config
    assert all(map(torch.equal, tree.leaves(params), tree.leaves(expected)))
    assert P.verify(folder) is None
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 1}
    told = json.loads((folder / "tokenizer_config.json").read_text())
    assert (told["bos_token"], told["eos_token"], told["chat_template"]) == ("<s>", "</s>", "{{ messages }}")


@pytest.mark.parametrize("rule", RULES)
def test_byte_bpe_cuts_as_the_tokenizer_that_was_written(rule: str, tmp_path: Path) -> None:
    expected, first = trained(rule), [0] * (rule == "llama-bpe")  # by llama.cpp, unless the file says otherwise
    read = converted(write(tmp_path, byte_bpe(expected, rule)), tmp_path)
    for text in TEXTS:
        assert read.encode(text).ids == first + expected.encode(text).ids
        ids = expected.encode(text).ids
        assert read.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)


def test_each_rule_cuts_something_that_another_does_not(tmp_path: Path) -> None:
    cuts = {rule: str([RULES[rule].pre_tokenize_str(text) for text in TEXTS]) for rule in RULES}
    assert len(set(cuts.values())) == len(RULES)


def converted(path: Path, folder: Path) -> Tokenizer:
    assert main([str(path), str(folder / "folder")]) == 0
    return Tokenizer.from_file(str(folder / "folder/tokenizer.json"))


def test_inspect_reports_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, byte_bpe(trained("smollm"), "smollm"))
    assert inspect.main([str(path), "--verify"]) == 0
    report = capsys.readouterr().out
    for part in (
        "GGUF, architecture llama",
        "llama, model type llama",
        "2: 2 full",
        "20, ",
        "20 F32",
        "gpt2, 330 tokens",
    ):
        assert part in report
    assert "all finite" in report
    path.write_bytes(path.read_bytes()[:-40])
    assert inspect.main([str(path)]) == 2
    assert "truncated?" in capsys.readouterr().err
    assert inspect.main([str(tmp_path / "absent.gguf")]) == 2
    assert "absent.gguf" in capsys.readouterr().err


def test_a_run_begins_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from the folder that is made of it, once, in the cache; resuming does not need the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path, byte_bpe(trained("gpt-2"), "gpt-2"))
    text = tmp_path / "text.txt"
    text.write_text("Hello world, it is 2024! " * 400)
    assert main([str(path), str(tmp_path / "folder")]) == 0
    flags = ["--data", str(text), "--batch-rows", "2", "--steps", "2"]
    for init, run in ((path, "one"), (tmp_path / "folder", "other")):
        assert cli.main(["--run", str(tmp_path / run), "--init", str(init), *flags]) == 0
    one, other = (P.load_pretrained(tmp_path / run)[1] for run in ("one", "other"))
    assert all(map(torch.equal, tree.leaves(one), tree.leaves(other)))
    assert len(list((tmp_path / "cache/fnmodels").glob("gguf-*/config.json"))) == 1
    path.unlink()
    assert cli.main(["--run", str(tmp_path / "one"), "--resume", "--steps", "2"]) == 0


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcde", "ab", "bc", "cd", "abc", "▁a"]
SCORES = {"ab": -2.0, "bc": -1.0, "cd": -3.0, "abc": -4.0, "▁a": -0.5}


def sentencepiece(*, space: bool, bos: bool | None) -> Change:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        writer.add_token_scores([SCORES.get(piece, -100.0) for piece in PIECES])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if bos is not None:
            writer.add_add_bos_token(bos)
        writer.add_add_space_prefix(space)

    return add


def joined(text: str) -> list[int]:
    """SentencePiece's loop: the neighbours whose piece has the best score are joined, the first of equal ones."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        options = [(-SCORES[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in SCORES]
        if not options:
            break
        _, i = min(options)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    known: Sequence[list[str]] = [[p] if p in PIECES else [f"<0x{b:02X}>" for b in p.encode()] for p in pieces]
    return [PIECES.index(piece) for group in known for piece in group]


@pytest.mark.parametrize("space", [False, True])
@pytest.mark.parametrize("bos", [False, True, None])
def test_sentencepiece_joins_as_its_loop(space: bool, bos: bool | None, tmp_path: Path) -> None:
    """A text begins with a token in files that do not say whether, as in llama.cpp."""
    tokenizer = converted(write(tmp_path, sentencepiece(space=space, bos=bos)), tmp_path)
    for text in ("abc", "abcd bcd a", "a  ab\nabcabc", "é漢a"):
        expected = [1] * (bos is not False) + joined(" " * space + text)
        assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("bos", [False, True])
def test_gemma_4_joins_by_the_merges_of_the_file(bos: bool, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        sentencepiece(space=False, bos=bos)(writer)
        writer.add_tokenizer_model("gemma4")
        best = sorted(SCORES, key=SCORES.get, reverse=True)
        cuts = [(piece[:i], piece[i:]) for piece in best for i in range(1, len(piece))]
        writer.add_token_merges([f"{a} {b}" for a, b in cuts if a in PIECES and b in PIECES])

    tokenizer = converted(write(tmp_path, add), tmp_path)
    for text in ("abc", "abcd bcd a", "a  ab\nabcabc", "é漢a"):
        expected = [1] * bos + joined(text)
        assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(expected) == text


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abdelh1'!é",
    "hello",
    "hell",
    "##o",
    "##e",
    "##a",
    "##b",
    "ab",
    "漢",
]


@pytest.mark.parametrize("more", [["##bé"], ["Hello", "##B", "É"]], ids=["uncased", "cased"])
def test_word_pieces_are_those_of_berts_tokenizer(more: list[str], tmp_path: Path) -> None:
    """The file marks pieces that begin a word, as llama.cpp's converter does; its vocabulary shows its case."""
    words, cased = [*WORDS, *more], "Hello" in more

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(
            [word if i < 5 else word[2:] if word.startswith("##") else f"▁{word}" for i, word in enumerate(words)]
        )
        writer.add_token_types([3] * 5 + [1] * (len(words) - 5))
        for name, index in (("pad", 0), ("unk", 1), ("sep", 3), ("mask", 4)):
            getattr(writer, f"add_{name}_token_id")(index)
        # older files have a key of the first token's own
        writer.add_bos_token_id(2) if cased else writer.add_uint32("tokenizer.ggml.cls_token_id", 2)
        writer.add_bool("tokenizer.ggml.add_bos_token", True)

    read = converted(write(tmp_path, add), tmp_path)
    expected = BertWordPieceTokenizer({word: i for i, word in enumerate(words)}, lowercase=not cased)
    for text in (*TEXTS, "hello Hello HELLO abab abé a漢b! [MASK] ÉA"):
        assert read.encode(text).ids == expected.encode(text).ids
        assert read.encode(text, "ab").type_ids == expected.encode(text, "ab").type_ids
    named = json.loads((tmp_path / "folder/tokenizer_config.json").read_text())
    assert [named[f"{name}_token"] for name in ("cls", "sep", "mask", "pad", "unk")] == [
        words[i] for i in (2, 3, 4, 0, 1)
    ]


def cased_words(lower: bool | None, strip: bool | None) -> Change:
    """A vocabulary of small letters alone, with the keys of a normalizer."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list([word if i < 5 else f"▁{word}" for i, word in enumerate([*WORDS[:5], "ae", "áe"])])
        writer.add_token_types([3] * 5 + [1] * 2)
        for name, value in (("lowercase", lower), ("strip_accents", strip)):
            if value is not None:
                writer.add_bool(f"tokenizer.ggml.normalizer.{name}", value)

    return add


@pytest.mark.parametrize(
    ("lower", "strip", "ids"),
    [
        (None, None, [5, 5]),
        (True, None, [5, 5]),
        (False, None, [1, 6]),
        (True, False, [5, 6]),
        (False, True, [1, 5]),
    ],
)
def test_the_normalizer_of_word_pieces_is_that_of_the_file(
    lower: bool | None, strip: bool | None, ids: list[int], tmp_path: Path
) -> None:
    read = converted(write(tmp_path, cased_words(lower, strip)), tmp_path)
    assert read.encode("AE áe").ids[1:-1] == ids


def test_tokens_that_end_an_answer_are_those_of_turns_and_messages_too(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        byte_bpe(trained("smollm"), "smollm")(writer)
        writer.add_eot_token_id(2)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 1)
        writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 0)
        writer.add_array("tokenizer.ggml.suppress_tokens", [7, 8])

    converted(write(tmp_path, add), tmp_path)
    told = json.loads((tmp_path / "folder/generation_config.json").read_text())
    assert told == {"bos_token_id": 0, "eos_token_id": [1, 2], "suppress_tokens": [7, 8]}


def without_rule(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])


def with_key(name: str, value: bool) -> Change:
    def add(writer: gguf.GGUFWriter) -> None:
        byte_bpe(trained("gpt-2"), "gpt-2")(writer)
        writer.add_bool(f"tokenizer.ggml.{name}", value)

    return add


UNIGRAMS = {"<s>": 0.0, "<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -3.0, "a": -3.5, "b": -3.0, "c": -4.0}
UNIGRAMS |= {"▁a": -2.0, "ab": -2.5, "bc": -4.5, "▁ab": -5.0, "abc": -8.0, "cb": -2.0}


def one_mapping(source: str, target: str) -> bytes:
    """A map of characters in SentencePiece's form, a double array and texts, that replaces one letter by another."""
    units = [0] * 512
    label = ord(source)
    units[label] = label | 1 << 8 | 256 << 10  # its label, a leaf, and where this is: 256 units away
    units[label ^ 256] = 0  # the place of the text
    return struct.pack("<513I", 4 * 512, *units) + target.encode() + b"\0"


def likeliest(word: str) -> list[int]:
    """The pieces of a word whose scores have the greatest sum, of all ways to cut it."""
    ways: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(word) + 1):
        ends = [(ways[i], word[i:end]) for i in range(end) if word[i:end] in UNIGRAMS]
        ways.append(max((score + UNIGRAMS[piece], [*pieces, piece]) for (score, pieces), piece in ends))
    return [list(UNIGRAMS).index(piece) for piece in ways[-1][1]]


@pytest.mark.parametrize("bos", [False, True])
def test_unigrams_are_the_likeliest_pieces(bos: bool, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(list(UNIGRAMS))
        writer.add_token_scores(list(UNIGRAMS.values()))
        writer.add_token_types([3, 3, 3, 2, *[1] * (len(UNIGRAMS) - 4)])
        writer.add_unk_token_id(3)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(bos)
        writer.add_add_eos_token(True)
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(one_mapping("X", "b"))

    tokenizer = converted(write(tmp_path, add), tmp_path)
    for text in ("abc", "abcb  ab cbc", " aXc bX", "aabbcbabc"):
        words = [likeliest(f"▁{word}") for word in text.replace("X", "b").split()]
        assert tokenizer.encode(text).ids == [0] * bos + [one for word in words for one in word] + [2]
    assert tokenizer.encode("é").ids[bos:] == [4, 3, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_tokenizer_model("rwkv"), "'tokenizer.ggml.model' is 'rwkv'; of tokenizers gpt2, llama"),
        (lambda w: byte_bpe(trained("gpt-2"), "odd")(w), "'tokenizer.ggml.pre' is 'odd'; the rules gpt-2, olmo"),
        (lambda w: byte_bpe(trained("gpt-2"), "default")(w), "'tokenizer.ggml.pre' is 'default'; the rules gpt-2"),
        (without_rule, "has no 'tokenizer.ggml.pre', the rule by which text is cut"),
        (with_key("odd_switch", True), "'tokenizer.ggml.odd_switch' is True, which may change how text is cut"),
        (with_key("normalizer.lowercase", True), "'tokenizer.ggml.normalizer.lowercase' is True, which is read of"),
    ],
    ids=["kind", "rule", "llama.cpp's rule", "no rule", "key", "normalizer"],
)
def test_another_tokenizer_is_refused_before_anything_is_written(
    change: Change, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = write(tmp_path, change), tmp_path / "folder"
    assert main([str(path), str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()
    assert main([str(path), str(folder), "--without-tokenizer"]) == 0
    assert sorted(one.name for one in folder.iterdir() if one.suffix == ".json") == [
        "config.json",
        "fnmodels_manifest.json",
    ]

"""fnmodels-convert: the folder has the model of the file, and its tokenizer cuts text as the rules of llama.cpp do."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
    expected = trained(rule)
    read = converted(write(tmp_path, byte_bpe(expected, rule)), tmp_path)
    for text in TEXTS:
        assert read.encode(text).ids == expected.encode(text).ids
        ids = read.encode(text).ids
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


def sentencepiece(*, space: bool, bos: bool) -> Change:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        writer.add_token_scores([SCORES.get(piece, -100.0) for piece in PIECES])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
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
@pytest.mark.parametrize("bos", [False, True])
def test_sentencepiece_joins_as_its_loop(space: bool, bos: bool, tmp_path: Path) -> None:
    tokenizer = converted(write(tmp_path, sentencepiece(space=space, bos=bos)), tmp_path)
    for text in ("abc", "abcd bcd a", "a  ab\nabcabc", "é漢a"):
        expected = [1] * bos + joined(" " * space + text)
        assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_tokenizer_model("bert"), "'tokenizer.ggml.model' is 'bert'; of tokenizers gpt2 and llama"),
        (lambda w: byte_bpe(trained("gpt-2"), "odd")(w), "'tokenizer.ggml.pre' is 'odd'; the rules default, gpt-2"),
    ],
    ids=["kind", "rule"],
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

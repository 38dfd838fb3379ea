"""`python -m train.eval` against a loop over the tokens of each document."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import fnmodels
import params as P
from fnmodels import llama
from tests.support.cases import generic_params
from train.eval.command import main

CONFIG = llama.Config(258, 32, 48, 2, 4, 2, max_position_embeddings=24, tie_word_embeddings=True)
TEXTS = {"a": "A short text.", "b": "é, and a text that is longer than a window: " + "ab " * 12, "c": "x"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    P.save_pretrained(path, CONFIG, generic_params(CONFIG))
    tokenizer.save(str(path / "tokenizer.json"))
    values = json.loads((path / "config.json").read_text()) | {"bos_token_id": 256, "eos_token_id": 257}
    (path / "config.json").write_text(json.dumps(values))
    with open(path.parent / "texts.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS.values())
    return path


def nats_of(folder: Path, text: str) -> float:
    """Each token behind the 24 before it; those of a first window behind <bos> and all of that window."""
    ids = [256, *Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids]
    total, size = 0.0, CONFIG.max_position_embeddings
    for last in range(1, len(ids)):
        # the end of the window in which this token is a target
        begin = 0 if last <= size else max(0, min(len(ids), size + 1 + -(-(last - size) // size) * size) - size - 1)
        prepared = fnmodels.prepare(CONFIG, torch.tensor([ids[begin:last]]))
        logits = fnmodels.forward(generic_params(CONFIG), *prepared, config=CONFIG, kernel="math")
        total -= logits[0, -1].double().log_softmax(-1)[ids[last]].item()
    return total


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def test_each_document_and_their_sum_equal_a_loop_over_tokens(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.jsonl"
    assert run(folder, "--data", folder.parent / "texts.jsonl", "--out", out) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["document"] for line in lines] == [f"texts.jsonl, line {n}" for n in (1, 2, 3)]
    for line, text in zip(lines, TEXTS.values(), strict=True):
        assert line["nats"] == pytest.approx(nats_of(folder, text), rel=1e-5)
        assert line["bytes"] == line["tokens"] == len(text.encode())
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2))
    nats, size = (sum(line[name] for line in lines) for name in ("nats", "bytes"))
    printed = capsys.readouterr().out
    assert f"loss           {nats / size:.4f} nats per token" in printed
    assert f"perplexity     {math.exp(nats / size):.3f} per token" in printed
    assert f"bits per byte  {nats / size / math.log(2):.4f}" in printed


def test_the_numbers_do_not_depend_on_batches_and_bf16_is_close(folder: Path, tmp_path: Path) -> None:
    found = {}
    for name, flags in {"whole": (), "small": ("--batch-tokens", 8), "bf16": ("--dtype", "bfloat16")}.items():
        assert run(folder, "--data", folder.parent / "texts.jsonl", "--out", tmp_path / name, *flags) == 0
        found[name] = [json.loads(line)["nats"] for line in (tmp_path / name).read_text().splitlines()]
    assert found["small"] == pytest.approx(found["whole"], rel=1e-5)
    assert found["bf16"] == pytest.approx(found["whole"], rel=3e-2) and found["bf16"] != found["whole"]


def test_a_folder_of_texts_is_read_and_what_cannot_be_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("Some text.")
    (tmp_path / "two.txt").write_bytes(b"\xff\xfe\x00")
    assert run(folder, "--data", tmp_path, "--limit", 1) == 0
    assert "documents      1" in capsys.readouterr().out
    assert run(folder, "--data", tmp_path) == 0
    captured = capsys.readouterr()
    assert "documents      1 (1 skipped)" in captured.out and "skipped: two.txt" in captured.err


def test_what_cannot_be_scored_is_a_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    (tmp_path / "empty").mkdir()
    for data, flags, said in [
        (tmp_path / "chat.jsonl", (), "chat.jsonl, line 1 is a conversation"),
        (tmp_path / "nosuch", (), "there is no such file or folder"),
        (tmp_path / "empty", (), "no text in the folder"),
        (tmp_path / "chat.jsonl", ("--limit", 0), "--limit 0: it must be at least 1"),
    ]:
        assert run(folder, "--data", data, *flags) == 2
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1


def test_urls_and_functions_are_scored_as_files_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder.parent / "texts.jsonl"
    (tmp_path / "own.py").write_text(
        "import json\nfrom pathlib import Path\n\n\ndef texts():\n"
        f"    return (json.loads(line)['text'] for line in Path({str(file)!r}).read_text().splitlines())\n\n\n"
        "def broken():\n    yield 'A text.'\n    raise KeyError('text')\n"
    )
    own = tmp_path / "own.py"
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/eval/texts.jsonl", file.read_bytes())
    nats = dict[str, list[float]]()
    for number, data in enumerate((file, "memory://eval", f"{own}:texts", f"{file},{own}:texts")):
        assert run(folder, "--data", data, "--out", tmp_path / "out") == 0
        nats[str(number)] = [json.loads(line)["nats"] for line in (tmp_path / "out").read_text().splitlines()]
    assert nats["1"] == pytest.approx(nats["0"]) and nats["2"] == pytest.approx(nats["0"])
    assert nats["3"] == pytest.approx(nats["0"] * 2)
    capsys.readouterr()
    for data, said in {
        "memory://nothing": "there is no file with text",
        "nosuch://a": "its file system cannot be opened",
        f"{own}:none": "has no function 'none'",
        f"{own}:broken": f"{own}:broken failed: KeyError: 'text' in own.py, line 11",
        f"{file}:3": "has the weight 3",
    }.items():
        assert run(folder, "--data", data) == 2
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1


@pytest.mark.slow
def test_the_sums_are_those_of_the_harness_over_transformers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rolling log-likelihood, in windows; by default the numbers of this tokenizer, which adds no tokens, agree."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="the extra `eval` has lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    theirs = huggingface.HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    requests = [SimpleNamespace(args=(text,)) for text in TEXTS.values()]
    wanted = [-logp for logp in theirs.loglikelihood_rolling(requests, disable_tqdm=True)]
    for flags in ((), ("--as-harness",)):
        assert run(folder, "--data", folder.parent / "texts.jsonl", "--out", tmp_path / "out", *flags) == 0
        found = [json.loads(line)["nats"] for line in (tmp_path / "out").read_text().splitlines()]
        assert found == pytest.approx(wanted, abs=1e-3)


def test_what_cannot_be_computed_on_or_written_to_is_refused_before_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train.eval.command.Evaluator", None)  # no work begins
    data = folder.parent / "texts.jsonl"
    assert run(folder, "--data", data, "--device", "tpu") == 2
    assert "--device tpu: torch cannot compute there: " in capsys.readouterr().err
    assert run(folder, "--data", data, "--out", tmp_path / "absent" / "scores.jsonl") == 2
    assert f"there is no folder {tmp_path / 'absent'}" in capsys.readouterr().err

"""The command `documents`: runs of every loss learn, their models are read, and they resume to the same bytes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import fnmodels
import params as P
from fnmodels import bert, clip, llama
from fnmodels.embedding import Embedder
from fnmodels.errors import UserError
from train.commands.documents import main
from train.data.examples import read_examples
from train.data.pictures import Pixels, read_picture

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = bert.Config(vocab_size=len(WORDS), max_position_embeddings=16, initializer_range=0.1, **SIZES)


def tokenizer(folder: Path) -> None:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.add_special_tokens(WORDS[:5])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(folder / "tokenizer.json"))


def folder_of(path: Path, config: Any) -> Path:
    P.save_pretrained(path, config, P.init(config, seed=0))
    tokenizer(path)
    return path


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def run(data: Path, init: Path, to: Path, loss: str, *flags: str, steps: int = 40) -> list[float]:
    given = ["--run", str(to), "--data", str(data), "--init", str(init), "--loss", loss, "--steps", str(steps)]
    assert main([*given, "--batch", "6", "--learning-rate", "3e-3", *flags]) == 0
    rows = [json.loads(line) for line in (to / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [row["loss"] for row in rows]


PAIRS = [{"query": f"w{i} w{i + 1}", "positive": f"w{i + 20} w{i + 3} w9", "negatives": ["w9 w9"]} for i in range(6)]
LABELS = [{"text": f"w{i} w{20 + i % 5}", "label": ["good", "bad"][i % 2]} for i in range(20)]


def test_pairs(tmp_path: Path) -> None:
    """From a model with a pooler, which the loss does not read: its values stay."""
    init = folder_of(tmp_path / "init", replace(CONFIG, head="none", pooler=1))
    losses = run(lines(tmp_path / "data", PAIRS), init, tmp_path / "run", "pairs")
    assert losses[-1] < 0.1 * losses[0]
    config, params, embedder = P.load_embedder(tmp_path / "run" / "model")
    before = P.load_pretrained(init)[1]["pooler"]
    assert config.pooler == 1 and all(torch.equal(params["pooler"][name], value) for name, value in before.items())
    again = run(tmp_path / "data", tmp_path / "run" / "model", tmp_path / "more", "pairs", steps=2)
    assert again[0] < 0.2 * losses[0] and (tmp_path / "run" / "model" / "tokenizer.json").is_file()
    ids = [[2, 5 + i, 6 + i, 3] for i in range(6)] + [[2, 25 + i, 8 + i, 14, 3] for i in range(6)]
    vectors = fnmodels.embed_documents(params, ids, config=config, embedder=embedder)
    assert (vectors[:6] @ vectors[6:].T).argmax(1).tolist() == list(range(6))


@pytest.mark.parametrize("loss", ["pairs", "labels", "masked"])
def test_unknown_fields_are_ignored_where_they_are_named(
    loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = folder_of(tmp_path / "init", CONFIG if loss == "masked" else replace(CONFIG, head="none"))
    file = init / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"novelty": 1}))
    (init / "fnmodels_manifest.json").unlink()
    rows = {"pairs": PAIRS, "labels": LABELS, "masked": [{"text": one["text"]} for one in LABELS]}[loss]
    data = lines(tmp_path / "data", rows)
    assert main(["--run", str(tmp_path / "no"), "--data", str(data), "--init", str(init), "--loss", loss]) == 2
    assert "novelty" in capsys.readouterr().err
    run(data, init, tmp_path / "run", loss, "--ignore-fields", "novelty", steps=1)


def test_pairs_are_lowercased_where_the_folder_says_so(tmp_path: Path) -> None:
    init, found = folder_of(tmp_path / "init", replace(CONFIG, pooler=0)), []
    config, params = P.load_pretrained(init)
    P.save_embedder(tmp_path / "lower", config, params, Embedder(lower_case=True))
    tokenizer(tmp_path / "lower")
    upper = [{name: text.upper() for name, text in pair.items() if name != "negatives"} for pair in PAIRS]
    lower = [{name: text.lower() for name, text in pair.items()} for pair in upper]
    for name, rows in (("one", upper), ("two", lower)):
        data = lines(tmp_path / f"{name}.jsonl", rows)
        found.append(run(data, tmp_path / "lower", tmp_path / name, "pairs", steps=2))
    assert found[0] == found[1]


@pytest.mark.parametrize("decoder", [False, True])
def test_labels(decoder: bool, tmp_path: Path) -> None:
    config = llama.Config(vocab_size=len(WORDS), num_key_value_heads=4, **SIZES) if decoder else CONFIG
    data = lines(tmp_path / "data", LABELS)
    losses = run(data, folder_of(tmp_path / "init", config), tmp_path / "run", "labels")
    assert losses[-1] < 0.3 * losses[0]
    config = P.load_pretrained(tmp_path / "run" / "model")[0]
    assert (config.head, config.num_labels) == ("classification", 2)
    assert json.loads((tmp_path / "run/model/config.json").read_text())["id2label"] == {"0": "bad", "1": "good"}
    assert run(data, tmp_path / "run" / "model", tmp_path / "more", "labels", steps=2)[0] < 0.3 * losses[0]
    other = lines(tmp_path / "other", [{"text": "w1", "label": i % 3} for i in range(6)])
    run(other, tmp_path / "run" / "model", tmp_path / "new", "labels", steps=1)
    assert P.load_config(tmp_path / "new" / "model").num_labels == 3


def test_masked_tokens_and_resuming(tmp_path: Path) -> None:
    data = lines(tmp_path / "data", [{"text": " ".join([f"w{i}"] * 12)} for i in range(4)])
    init, one, two = folder_of(tmp_path / "init", CONFIG), tmp_path / "one", tmp_path / "two"
    losses = run(data, init, one, "masked", "--save-every", "20")
    assert losses[-1] < 0.5 * losses[0]
    assert run(data, init, two, "masked", "--save-every", "20") == losses
    (two / "steps" / "step-00000040").rename(tmp_path / "lost")
    (two / "model" / "model.safetensors").unlink()
    assert run(data, init, two, "masked", "--save-every", "20", "--resume") == losses
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (one, two)]
    assert weights[0] == weights[1]


def test_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision = SIZES | {"image_size": 12, "patch_size": 6, "initializer_range": 0.1}
    text = SIZES | {"vocab_size": len(WORDS), "max_position_embeddings": 8, "bos_token_id": 2, "eos_token_id": 3}
    values = {"model_type": "clip", "projection_dim": 20, "vision_config": vision, "text_config": text}
    init = folder_of(tmp_path / "init", clip.Config.from_hf(values))
    for i in range(6):
        Image.new("RGB", (14 + i, 20), (40 * i, 255 - 40 * i, 90)).save(tmp_path / f"{i}.png")
    data = lines(tmp_path / "data", [{"image": f"{i}.png", "text": f"w{i} w{i + 7}"} for i in range(6)])
    losses = run(data, init, tmp_path / "run", "captions", "--save-every", "39")
    assert losses[-1] < 0.5 * losses[0]
    assert type(P.load_config(tmp_path / "run" / "model")) is clip.Config
    given = ["--data", str(lines(tmp_path / "gone", [{"image": "7.png", "text": "w1"}])), "--init", str(init)]
    assert main([*given, "--run", str(tmp_path / "none"), "--loss", "captions"]) == 2
    assert "7.png, which is no file; 1 are missing" in capsys.readouterr().err
    again = ["--data", str(data), "--init", str(init), "--run", str(tmp_path / "run"), "--loss", "captions"]
    again += ["--steps", "40", "--batch", "6", "--learning-rate", "3e-3", "--resume"]
    assert main(again) == 0 and "the run is finished: 40 steps" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run" / "steps" / "step-00000040")
    image = read_picture(tmp_path / "1.png", Pixels(12))
    for name, bytes_, flag in (
        (tmp_path / "2.png", (tmp_path / "3.png").read_bytes(), "--data"),
        (init / "tokenizer.json", (init / "tokenizer.json").read_bytes().replace(b"w1", b"x1"), "--init"),
        (init / "preprocessor_config.json", b"{}", "--init"),
    ):
        before = name.read_bytes() if name.exists() else None
        name.write_bytes(bytes_)
        capsys.readouterr()
        assert main(again) == 2
        assert f"{flag} is not that with which the run in {tmp_path / 'run'} began" in capsys.readouterr().err
        name.unlink() if before is None else name.write_bytes(before)
    torch.testing.assert_close(image, torch.tensor([40, 215, 90]).div(127.5).sub(1)[:, None, None].expand(3, 12, 12))


@pytest.mark.parametrize(
    ("line", "loss", "words"),
    [
        ('{"text": "w1"}', "labels", "line 2: 'label' must be a text or an integer"),
        ('{"query": "w1", "positive": "w2", "negatives": "w3"}', "pairs", "'negatives' must be a list of texts"),
        ("[1]", "masked", "line 2: this is no JSON object"),
        ("{", "masked", "line 2: this is no JSON "),
    ],
)
def test_lines_that_do_not_fit(line: str, loss: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text(f"\n{line}\n")
    with pytest.raises(UserError, match=words):
        read_examples(tmp_path / "data", loss)


def test_separators_of_unicode_do_not_end_lines(tmp_path: Path) -> None:
    text = "w1 \u2028 w2 \x85 w3"
    (tmp_path / "data").write_text(json.dumps({"text": text}, ensure_ascii=False), encoding="utf-8")
    assert read_examples(tmp_path / "data", "masked")[0]["text"] == text


def test_what_a_loss_cannot_train_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init, data = folder_of(tmp_path / "init", CONFIG), lines(tmp_path / "data", [{"text": "w1", "label": 4}])
    given = ["--data", str(data), "--run", str(tmp_path / "run")]
    assert main([*given, "--loss", "masked"]) == 2
    assert "--init is needed" in capsys.readouterr().err
    assert main([*given, "--init", str(init), "--loss", "labels"]) == 2
    assert "has one label, 4; a classifier needs two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image_mean": None}, "'image_mean' is null; it must be three numbers, of red, green and blue"),
        ({"image_mean": 0.5}, "'image_mean' is 0.5; it must be three numbers"),
        ({"image_std": [1, 1, 0]}, "'image_std' is [1, 1, 0]; it must be three numbers above 0"),
        ({"image_std": [1, 1]}, "'image_std' is [1, 1]"),
        ([], "'image_mean' is null"),
    ],
)
def test_preprocessors_that_do_not_fit(values: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    with pytest.raises(UserError) as error:
        Pixels.of(tmp_path, 12)
    assert words in str(error.value)

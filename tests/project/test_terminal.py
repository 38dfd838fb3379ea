"""Names and texts of strangers' files do not steer the terminal: in errors, reports, settings, samples and cards."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import params as P
from fnmodels import errors, llama
from params.command_line import terminal_text
from params.inspect import main as inspect_main
from tests.params.test_memory import CONFIG
from train.commands import compare, sample
from train.job import model_card, report
from train.job.settings import DEFAULT, read_toml

# to clear the screen, to set the title, the one-character form of the first, to turn the direction of writing
CODES = ("\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "\u202e")
STEERING = frozenset("\x1b\x07\x9b\u202e")


@pytest.fixture(autouse=True)
def nothing_steers(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert not STEERING & set("".join(capsys.readouterr()))


def kinds(above: type[Exception]) -> list[type[Exception]]:
    return [above, *(kind for below in above.__subclasses__() for kind in kinds(below))]


@pytest.mark.parametrize("kind", kinds(errors.PrintableError), ids=lambda kind: kind.__name__)
def test_an_error_of_any_kind_shows_codes_as_text(kind: type[Exception]) -> None:
    said = str(kind(f"a{''.join(CODES)}b\nc"))
    assert not STEERING & set(said) and said.startswith("a\\x1b[2J") and said.endswith("b\nc")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("place", ["config", "index", "tensor", "manifest", "architecture", "dtype"])
def test_inspect_and_load_of_names_with_codes_show_them_as_text(
    code: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    P.save_pretrained(tmp_path, CONFIG, P.init(CONFIG, 0))
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    if place == "config":
        file.write_text(json.dumps(values | {f"field{code}": 1, "model_type": f"llama{code}"}))
    elif place == "architecture":
        file.write_text(json.dumps(values | {"architectures": [f"Llama{code}"]}))
    elif place == "dtype":
        file.write_text(json.dumps(values | {"torch_dtype": code}))
    elif place == "manifest":
        wrong = {"version": 1, "hash": "sha256", "files": {f"a{code}": {"size": code, "digest": ""}}}
        (tmp_path / "fnmodels_manifest.json").write_text(json.dumps(wrong))
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(tensors | {f"a{code}\nproblem": torch.ones(1)}, tmp_path / "model.safetensors")
        if place == "index":
            (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
            index = {"metadata": {}, "weight_map": {f"b{code}": f"{code}.safetensors"}}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect_main([str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert not STEERING & set(out + error)
    assert "\nproblem" not in out  # a name begins no line
    if place != "manifest":
        with pytest.raises((errors.CheckpointError, OSError)) as raised:
            P.load_pretrained(tmp_path)
        assert not STEERING & set(str(raised.value))


class Terminal:
    """A standard output that says that it is a terminal."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.write = self.written.append

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass


def events(texts: list[str]) -> Iterator[Any]:
    for number, text in enumerate(texts):
        reason = "stop" if number + 1 == len(texts) else None
        yield SimpleNamespace(row=0, text=text, reason=reason, token=1, logp=0.0)


def test_sample_to_a_terminal_shows_codes_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(decode=lambda ids, **_: f"prompt{CODES[0]}é\u00a0\t\n" * len(ids))
    model = SimpleNamespace(tokenizer=tokenizer, respond=lambda *_: events(list(CODES)), prompt=lambda *_: None)
    for run in (
        lambda: sample.show(model, [{"prompt": "a"}], [SimpleNamespace(ids=[1])], events(list(CODES))),  # type: ignore[arg-type]
        lambda: sample.write([{"prompt": CODES[2]}], events(list(CODES)), sample.sys.stdout),
        lambda: sample.converse(model, [], 0),  # type: ignore[arg-type]
    ):
        terminal, lines = Terminal(), iter(["hi\n", ""])
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", terminal)
            patch.setattr("sys.stdin", SimpleNamespace(readline=lambda lines=lines: next(lines)))
            run()
        shown = "".join(terminal.written)
        assert not STEERING & set(shown) and "9b" in shown
    assert terminal_text("é\u00a0\u200d\u3000\t\n\r") == "é\u00a0\u200d\u3000\t\n\\r"  # what is text stays


def test_settings_and_differences_of_runs_show_codes_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps("a" + "".join(CODES), ensure_ascii=False).replace("\x9b", "\\u009b").replace("\u202e", "\\u202e")
    (tmp_path / "settings.toml").write_text(f"prompt = {text}\nlicense = {text}\ndata = {text}\n")
    values = read_toml(tmp_path / "settings.toml")
    assert values["prompt"] == "a" + "".join(CODES)
    report.settings(tmp_path, DEFAULT.__class__(**values), DEFAULT)
    assert "\\x9b2J" in capsys.readouterr().out
    for name, prompt in (("one", "a"), ("two", f"b{CODES[2]}")):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": 1.0} for step in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / name / "run.json").write_text(json.dumps({"settings": {"prompt": prompt}}))
    assert compare.main([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "prompt" in capsys.readouterr().out


def test_card_names_a_folder_with_codes_as_text() -> None:
    assert model_card.name_of(f"/a/b{''.join(CODES)}\nc:2") == r"b\x1b[2J\x1b]0;title\x07\x9b2J\u202e\nc:2"


def test_skipped_files_with_codes_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, data = (
        SimpleNamespace(skipped=(f"a{CODES[0]} (binary)",), duplicates=0),
        SimpleNamespace(skipped=(CODES[2],)),
    )
    report.skipped(tmp_path, texts.skipped + data.skipped, texts.duplicates)
    assert "\\x1b[2J" in capsys.readouterr().out


def test_unused_generation_settings_with_codes_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from train.data.tokenizer import train_tokenizer

    config = llama.Config.from_hf(json.loads((save(tmp_path) / "config.json").read_text()) | {"vocab_size": 300})
    P.save_pretrained(tmp_path, config, P.init(config, 0))
    train_tokenizer(["some text to learn from\n" * 9], 280).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({f"field{code}": 3 for code in CODES}))
    assert sample.main([str(tmp_path), "--prompt", "a", "--tokens", "2"]) == 0
    assert "field\\x1b[2J" in capsys.readouterr().err


def save(folder: Path) -> Path:
    P.save_pretrained(folder, CONFIG, P.init(CONFIG, 0))
    return folder

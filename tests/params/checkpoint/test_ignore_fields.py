"""`ignore_fields`: unknown fields of config.json that the caller knows to change nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

import fnmodels
import params as P
from params.checkpoint.manifest import MANIFEST
from params.inspect import main as inspect
from tests.fnmodels.models.test_llava import VARIANTS
from tests.support.cases import cases, generic_params
from tests.train.job.test_finetune import letters
from train.cli import main as train
from train.job.settings import Settings
from train.job.tasks import initial_model

LLAMA = next(case for case in cases() if case.name == "llama").config


def saved(folder: Path, config: Any = LLAMA, **more: Any) -> Path:
    """A checkpoint folder whose config.json has more fields."""
    P.save_pretrained(folder, config, generic_params(config))
    (folder / MANIFEST).unlink()
    values = json.loads((folder / "config.json").read_text())
    for name, value in more.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) and name in values else value
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_an_ignored_field_is_recorded_in_what_is_saved(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", novelty=0.5, other={"b": [1]})
    with pytest.raises(P.ConfigError, match=r'ignore_fields=\("novelty", "other",\) reads the file without them'):
        P.load_pretrained(folder)
    with pytest.raises(P.ConfigError, match=r'ignore_fields=\("novelty",\)'):
        P.load_pretrained(folder, ignore_fields=("other",))
    config, params = P.load_pretrained(folder, ignore_fields=("novelty", "other"))
    assert config == LLAMA == P.load_config(folder, ignore_fields=("novelty", "other"))
    P.save_pretrained(tmp_path / "b", config, params)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["_ignored_fields"] == {"novelty": 0.5, "other": {"b": [1]}} and "novelty" not in written
    again, _ = P.load_pretrained(tmp_path / "b")
    assert again == config and again.to_hf()["_ignored_fields"] == written["_ignored_fields"]
    assert P.load_config(tmp_path / "b", ignore_fields=("novelty",)) == config  # which was ignored before


@pytest.mark.parametrize("name", ["hidden_size", "use_cache", "nowhere"])
def test_only_unknown_fields_can_be_ignored(name: str, tmp_path: Path) -> None:
    with pytest.raises(P.ConfigError, match=f'ignore_fields has "{name}", which is no unknown field: it is read, or'):
        P.load_config(saved(tmp_path, use_cache=True), ignore_fields=(name,))


def test_a_file_cannot_ask_for_it(tmp_path: Path) -> None:
    folder = saved(tmp_path, novelty=1, _ignored_fields={"novelty": 1}, _ignore_fields=["novelty"])
    with pytest.raises(P.ConfigError, match="novelty = 1"):
        P.load_config(folder)


def test_fields_of_parts(tmp_path: Path) -> None:
    """Of the wrapper, its text, its tower, and a rope."""
    config = fnmodels.family_for("llava").Config.from_hf(VARIANTS["llama"])
    parts = {"text_config": {"a": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "r": 2}}}
    folder = saved(tmp_path / "a", config, **parts, vision_config={"a": 3}, b=4)
    with pytest.raises(P.ConfigError, match="a = 1"):
        P.load_config(folder, ignore_fields=("b", "r"))
    read, params = P.load_pretrained(folder, ignore_fields=("a", "b", "r"))
    assert read == config
    P.save_pretrained(tmp_path / "b", read, params)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    inner = [written["text_config"], written["vision_config"], written]
    assert [one["_ignored_fields"] for one in inner] == [{"a": 1}, {"a": 3}, {"b": 4, "r": 2}]
    assert P.load_config(tmp_path / "b") == config


@pytest.mark.parametrize("name", ["mpt", "llama"])
def test_fields_of_objects_that_keep_nothing_are_recorded_at_the_top(name: str, tmp_path: Path) -> None:
    config = next(case for case in cases() if case.name == name).config
    inner = "attn_config" if name == "mpt" else "rope_parameters"
    folder = saved(tmp_path / "a", config, **{inner: {"novelty": 1}})
    read, params = P.load_pretrained(folder, ignore_fields=("novelty",))
    P.save_pretrained(tmp_path / "b", read, params)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["_ignored_fields"] == {"novelty": 1}
    assert P.load_config(tmp_path / "b") == config


def test_inspect_and_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "a", novelty=1)
    assert inspect([str(folder), "--verify"]) == 2
    assert inspect([str(folder), "--verify", "--ignore-fields", "novelty"]) == 0
    assert "without     the fields novelty of config.json" in capsys.readouterr().out
    letters().save(str(folder / "tokenizer.json"))
    settings = Settings(init=str(folder), ignore_fields=("novelty",))
    assert (
        initial_model.config_of_checkpoint(folder, settings) == LLAMA == initial_model.load_weights(folder, settings)[0]
    )
    with pytest.raises(P.ConfigError, match="novelty = 1"):
        initial_model.config_of_checkpoint(folder, Settings(init=str(folder)))
    assert train(["--run", str(tmp_path / "run"), "--ignore-fields", "novelty"]) == 2
    assert "--ignore-fields novelty is for the checkpoint that --init names" in capsys.readouterr().err

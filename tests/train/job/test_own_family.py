"""A model of the user's own by `--family`: in the main job, its resumes and meshes, and the commands that read it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fnmodels
import params as P
from fnmodels.errors import UnsupportedError, UserError
from params.imported import imported_family
from params.inspect import main as inspect_main
from tests.support.forks import Forks
from tests.train.job.test_run import own_cache, rows, text, train  # noqa: F401  fixtures
from tests.train.job.test_stream_run import notes  # noqa: F401  a fixture
from train.commands import compare
from train.eval.command import main as evaluate
from train.job.settings import Settings
from train.job.tasks.new_model import new_config

PAGE = Path(__file__).parents[3] / "docs" / "own-model.md"
SIZES = ("--hidden-size", 32, "--intermediate-size", 32, "--num-hidden-layers", 2, "--vocab-size", 300)


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """The file of docs/own-model.md."""
    source = re.search(r"<!-- mymodel.py -->\n```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert source
    (tmp_path / "mymodel.py").write_text(source[1])
    return tmp_path / "mymodel.py"


@pytest.fixture
def run(family: Path, tmp_path: Path, text: Path) -> Path:  # noqa: F811
    assert train(tmp_path / "run", text, "--family", family, "--set", "first_scale=0.2", "--steps", 2) == 0
    return tmp_path / "run"


def test_a_run_records_the_file_and_its_resume_asks_for_it_again(
    run: Path,
    family: Path,
    text: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert settings["family"] == str(family) and "mymodel" not in (run / "settings.toml").read_text()
    assert json.loads((run / "config.json").read_text())["model_type"] == "scaled"
    assert "layers.1.mlp_scale" in P.flatten(P.load_pretrained(run, family=imported_family(str(family)))[1])
    assert train(run, None, "--resume", "--steps", 3) == 2
    assert f"--family {family}, code that a folder may not run: give it again" in capsys.readouterr().err
    assert train(run, None, "--resume", "--steps", 3, "--family", family) == 0
    assert train(run.parent / "more", text, "--init", run, "--family", family, "--steps", 1) == 0
    (run.parent / "a.toml").write_text(f'family = "{family}"')
    assert train(run.parent / "third", text, "--config", run.parent / "a.toml") == 2
    assert "names code" in capsys.readouterr().err


def test_commands_read_it_with_the_flag_and_name_it_without(
    run: Path,
    family: Path,
    text: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert inspect_main([str(run)]) == 2
    assert "a module of yours, name the module with family= (--family in commands)" in capsys.readouterr().err
    assert inspect_main([str(run), "--verify", "--family", str(family)]) == 0
    assert "model type scaled" in capsys.readouterr().out
    assert evaluate([str(run), "--data", str(text), "--limit", "1"]) == 2
    assert evaluate([str(run), "--data", str(text), "--limit", "1", "--family", str(family)]) == 0
    assert "bits per byte" in capsys.readouterr().out
    with pytest.raises(UserError, match="code that a folder may not run"):
        compare.run_at("HEAD", run, run.parent / "again")


def test_an_unknown_model_type_names_the_argument() -> None:
    with pytest.raises(UnsupportedError, match=r"'nosuch' is not supported; .* name the module with family="):
        fnmodels.family_for("nosuch")


@pytest.mark.parametrize(
    ("source", "values", "said"),
    [
        (None, {}, "there is no such file"),
        ("import nosuch_module", {}, "there is no module 'nosuch_module'"),
        ("x = 3", {}, "it defines no class Config"),
        ("class Config: ...", {}, "it has no MODEL_TYPES"),
        ("class Config: ...\nMODEL_TYPES = ('a', 'b')", {"model": "qwen3"}, "--model qwen3: .* reads a, b"),
    ],
)
def test_what_is_no_family_is_a_sentence(source: str | None, values: dict[str, Any], said: str, tmp_path: Path) -> None:
    if source is not None:
        (tmp_path / "own.py").write_text(source)
    with pytest.raises(UserError, match=said):
        new_config(Settings(family=str(tmp_path / "own.py"), **values), 300, {})


@pytest.mark.slow
def test_processes_of_a_mesh_import_it_and_train_on_the_stream_of_one_process(
    family: Path,
    tmp_path: Path,
    notes: Path,  # noqa: F811
    forks: Forks,
) -> None:
    flags = ["--family", family, "--data", notes, "--stream", 7, *SIZES, "--row-length", 32, "--steps", 6]
    flags += ["--dtype", "float32", "--sample-tokens", 2, "--eval-rows", 4, "--save-every", 2]
    for name, mesh in (("mesh", ("--mesh", "fsdp=2")), ("one", ())):
        done = forks.run(["-m", "train", "--run", tmp_path / name, *mesh, *map(str, flags)])
        assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "one")) == 6
    for ours, theirs in zip(rows(tmp_path / "mesh"), rows(tmp_path / "one"), strict=True):
        assert ours["tokens"] == theirs["tokens"] and ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)

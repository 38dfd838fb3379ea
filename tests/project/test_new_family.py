"""`python -m params.new_family` begins a family that runs, and the page's example is that family."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fnmodels
import params as P
from params import new_family
from tests.support.cases import batch_of, generic_params, segments

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in (new_family.FAMILIES, new_family.VARIANTS):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / new_family.PAGE, tmp_path / new_family.PAGE)
    for folder in (new_family.FAMILIES, new_family.VARIANTS):
        shutil.copy(ROOT / folder / "mixtral.py", tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("like", [None, "mixtral"])
def test_what_it_writes_runs(like: str | None, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert new_family.main(["newcomer", *(["--like", like] if like else [])]) == 0
    family = load(checkout / new_family.FAMILIES / "newcomer.py", "newcomer", monkeypatch)
    variants = load(checkout / new_family.VARIANTS / "newcomer.py", "newcomer_variants", monkeypatch)
    assert family.MODEL_TYPES == ("newcomer",)
    for values in variants.variants().values():
        config = family.Config.from_hf(values)
        assert fnmodels.family_of(config) is family and family.Config.from_hf(config.to_hf()) == config
        logits = batch_of(config, segments((5, 3))).forward(generic_params(config))
        assert logits.shape == (1, 8, config.vocab_size) and logits.isfinite().all()
    for name, values in variants.published().items():
        assert P.count(family.Config.from_hf(values)) == variants.sizes()[name]


def test_a_dense_family_is_60_to_100_lines(checkout: Path) -> None:
    assert new_family.main(["newcomer"]) == 0
    assert 60 <= len((checkout / new_family.FAMILIES / "newcomer.py").read_text().splitlines()) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama"], "the model type 'llama' is read by fnmodels.models.llama already"),
        (["New-One"], "'New-One' is no model type"),
        (["newcomer", "--like", "nobody"], "there is no family 'nobody'; there are mixtral"),
    ],
)
def test_what_cannot_be_is_said(
    arguments: list[str], words: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new_family.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_nothing_is_written_over(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_family.main(["newcomer"]) == 0 and new_family.main(["newcomer"]) == 2
    assert "newcomer.py is there already" in capsys.readouterr().err

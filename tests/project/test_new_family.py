"""`python -m params.new_family` begins a family that runs, and the page's example is that family."""

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fnmodels
import params as P
from fnmodels.models.common.family import traits_of
from params import new_family
from tests.support.cases import batch_of, cases, family_modules, generic_params, segments, variants_of
from tests.support.find_seeds import seed_for

ROOT = Path(__file__).parents[2]
FAMILIES = family_modules()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in (*new_family.FOLDERS, new_family.VARIANTS):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / new_family.PAGE, tmp_path / new_family.PAGE)
    for folder in (*new_family.FOLDERS, new_family.VARIANTS):
        for path in (ROOT / folder).glob("*.py"):
            shutil.copy(path, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def file_of(checkout: Path) -> Path:
    """The file of the new family, in the folder of the one that it was copied from."""
    (path,) = [path for folder in new_family.FOLDERS if (path := checkout / folder / "newcomer.py").is_file()]
    return path


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
    family = load(checkout / new_family.FOLDERS[0] / "newcomer.py", "newcomer", monkeypatch)
    variants = load(checkout / new_family.VARIANTS / "newcomer.py", "newcomer_variants", monkeypatch)
    assert family.MODEL_TYPES == ("newcomer",)
    for values in variants.variants().values():
        config = family.Config.from_hf(values)
        assert fnmodels.family_of(config) is family and family.Config.from_hf(config.to_hf()) == config
        logits = batch_of(config, segments((5, 3))).forward(generic_params(config))
        assert logits.shape == (1, 8, config.vocab_size) and logits.isfinite().all()
    for name, values in variants.published().items():
        assert P.count(family.Config.from_hf(values)) == variants.sizes()[name]


@pytest.mark.parametrize("like", FAMILIES)
def test_a_copy_of_a_family_claims_the_new_type_only(
    like: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new_family.main(["newcomer", "--like", like]) == 0
    said = capsys.readouterr().out
    original = getattr(fnmodels, like)
    family = load(file_of(checkout), "newcomer", monkeypatch)
    load(checkout / new_family.VARIANTS / "newcomer.py", "newcomer_variants", monkeypatch)
    assert family.MODEL_TYPES == ("newcomer",) and not hasattr(family, "PRESETS")
    assert family.Config.__dataclass_fields__["model_type"].default in ("", "newcomer")
    named = said.partition("is there for ")[2].partition(":")[0].split(", ")
    assert len(set(original.MODEL_TYPES) - set(named)) == 1  # the one that the new type replaces
    assert ("tests.support.find_seeds newcomer" in said) == traits_of(original).routed


# Variants of these make Configs with their own family; those of minimax_m3 and mistral_large4 have names of their own.
OWN = (
    "llama4",
    "qwen3_next",
    "bailing_moe",
    "llada",
    "minimax_m3",
    "nemotron_nas",
    "qwen4_exp",
    "rwkv7",
    "mistral_large4",
    "inkling2",
    "glm5_next",
    "kimi_k3",
    "deepseek_v41",
    "ouro",
)


@pytest.mark.parametrize("like", [family for family in FAMILIES if family not in OWN])
def test_the_variants_of_a_copy_are_read_by_it(like: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert new_family.main(["newcomer", "--like", like]) == 0
    family = load(file_of(checkout), "newcomer", monkeypatch)
    variants = load(checkout / new_family.VARIANTS / "newcomer.py", "newcomer_variants", monkeypatch)
    files = {name: values for name, values in variants.variants().items() if isinstance(values, dict)}
    own = {name: values for name, values in files.items() if values["model_type"] == "newcomer"}
    assert own and all(name.startswith("newcomer") for name in own)
    for values in own.values():
        config = family.Config.from_hf(values)
        assert fnmodels.family_of(config) is family and family.Config.from_hf(config.to_hf()) == config
    before = {rope_type(values) for values in variants_of(like).variants().values()}
    assert {rope_type(values) for values in variants.variants().values()} == before


def rope_type(values: Any) -> Any:
    if not isinstance(values, dict):
        return values.rope.kind
    ropes = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return ropes.get("rope_type", ropes.get("type"))


def test_the_seeds_of_a_variant_are_found() -> None:
    case = next(case for case in cases() if case.name == "mixtral")
    assert seed_for(case) == variants_of("mixtral").SEEDS.get("mixtral", 0)


def test_a_dense_family_is_60_to_100_lines(checkout: Path) -> None:
    assert new_family.main(["newcomer"]) == 0
    assert 60 <= len((checkout / new_family.FOLDERS[0] / "newcomer.py").read_text().splitlines()) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama"], "the model type 'llama' is read by fnmodels.models.decoder.llama already"),
        (["New-One"], "'New-One' is no model type"),
        (["newcomer", "--like", "nobody"], "there is no family 'nobody'; there are afmoe, albert, "),
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

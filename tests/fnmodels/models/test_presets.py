"""Presets: their parameter counts are the published totals, and a wrong name says what is near."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fnmodels
import params as P
from fnmodels.errors import UserError
from fnmodels.models.common import registry
from fnmodels.models.common.family import field_of
from fnmodels.models.common.registry import family_reading, text_config
from fnmodels.models.decoder import stablelm
from fnmodels.models.presets import preset, presets, published
from tests.support.cases import check_shapes, collected, family_modules, published_of
from tests.support.status import CHECKED, PRESET
from tests.variants import bart, flux, moonshine, t5, t5gemma, vision, wav2vec2, whisper, wrappers

# Totals as their publishers' files add up to (a tied head counts once); of Gemma 3's larger and Ministral 3 without the
# vision tower and its projection. A text is all that the publisher says, cut off and not rounded: Ministral's 8.4B is
# 8.49. The copies of embedding and head that MTP modules have on disk are no parameters of their own: 1.9B of DeepSeek
# V3's files, and of GLM 4.5's.
PUBLISHED: dict[str, int | str] = collected("TOTALS") | vision.TOTALS | t5.TOTALS | whisper.TOTALS
PUBLISHED |= flux.TOTALS | t5gemma.TOTALS | bart.TOTALS | wav2vec2.TOTALS | wrappers.TOTALS | moonshine.TOTALS


def test_every_preset_has_a_published_total() -> None:
    missing = set(presets()) ^ PUBLISHED.keys()
    assert not missing, f"TOTALS in tests/variants must have each preset, {{name: parameters}}: {sorted(missing)}."


@pytest.mark.parametrize("name", presets())
def test_counts_equal_the_published_totals(name: str, record_property: Callable[[str, object], None]) -> None:
    config, total = preset(name), PUBLISHED[name]
    count: int | str = P.count(config)
    if isinstance(total, str):
        decimals = len(total.partition(".")[2].removesuffix("B"))
        count = f"{P.count(config) // 10 ** (9 - decimals) / 10**decimals:.{decimals}f}B"
    assert count == total
    record_property(PRESET, (config.model_type, P.count(config)))


# Totals of encoders without the head that their preset has: {name: (whether with a pooler, parameters)}.
WITHOUT_HEAD = {
    "bert-base-uncased": (1, 109_482_240),
    "xlm-roberta-base": (1, 278_043_648),
    "xlm-roberta-large": (1, 559_890_432),
    "eurobert-210m": (None, 211_766_016),
}


@pytest.mark.parametrize("name", WITHOUT_HEAD)
def test_counts_without_a_head(name: str) -> None:
    pooler, total = WITHOUT_HEAD[name]
    changes: dict[str, Any] = {"head": "none"} | ({} if pooler is None else {"pooler": pooler})
    assert P.count(dataclasses.replace(preset(name), **changes)) == total


def largest() -> Iterator[Any]:
    """Of each model type, texts of wrappers included; tests/contract/test_build.py runs those with a config.json."""
    built = [(c.model_type, c) for family in family_modules() for c in published_of(family).values()]
    read = [text_config(family_reading(values).Config.from_hf(values)) for values in published().values()]
    configs = [config for config in read if field_of(config, "head") in ("lm", "masked_lm")]
    for model_type in fnmodels.families():
        config = max((c for c in configs if c.model_type == model_type), key=P.count, default=None)
        if config is not None and (model_type, config) not in built:
            yield pytest.param(config, id=model_type)


@pytest.mark.parametrize("config", list(largest()))
def test_the_largest_runs_in_shapes(config: Any, record_property: Callable[[str, object], None]) -> None:
    check_shapes(config)
    record_property(CHECKED, (config.model_type, P.count(config)))


def test_an_unknown_name_lists_near_ones() -> None:
    for wrong, near in (
        ("qwen3-0.6B", "qwen3-0.6b"),
        ("GPT2", "gpt2"),
        ("GPT2-XL", "gpt2-xl"),
        ("Llama3", "llama-3-8b"),
    ):
        with pytest.raises(ValueError, match=rf"There is no preset '{wrong}'; near it are .*\b{near}\b"):
            preset(wrong)
    with pytest.raises(ValueError, match=r"There is no preset 'zzzz'; there are afm-4.5b, .*, starcoder2-7b"):
        preset("zzzz")


@pytest.mark.parametrize("known", ["gpt2", "phi-2"])  # of presets.py, and of another family
def test_a_preset_of_two_owners_is_refused(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stablelm, "PRESETS", {known: {}}, raising=False)
    owner = "decoder.phi" if known == "phi-2" else "presets"
    words = rf"The preset '{known}' is claimed by fnmodels\.models\.{owner} and by fnmodels\.models\.decoder\.stablelm;"
    with pytest.raises(UserError, match=words):
        fnmodels.preset("gpt2")


def test_a_model_type_of_two_families_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stablelm, "MODEL_TYPES", ("stablelm", "phi"))
    words = (
        r"The model type 'phi' is claimed by fnmodels\.models\.decoder\.phi and by fnmodels\.models\.decoder\.stablelm;"
    )
    with pytest.raises(UserError, match=words):
        fnmodels.families()


def test_reading_a_config_imports_the_modules_that_name_its_type_only() -> None:
    code = (
        "import sys, fnmodels; fnmodels.family_for('qwen3');"
        "print(*(name for name in sys.modules if name.startswith('fnmodels.models.')))"
    )
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert fnmodels.family_for("qwen3").__name__ in imported
    assert "fnmodels.models.decoder.gpt2" not in imported and "fnmodels.models.diffusion.flux" not in imported


def test_every_type_is_read_by_the_family_that_claims_it() -> None:
    assert {kind: fnmodels.family_for(kind).__name__ for kind in fnmodels.families()} == fnmodels.families()


def test_a_module_named_after_its_type_is_read_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: object) -> bool:
        raise AssertionError("the sources of other families were read")

    monkeypatch.setattr(registry, "_claimed_in", search)
    named = {"gpt2": {}, "gpt_neox": {}, "llava": {"vision_config": {}}}
    for kind, values in named.items():
        assert registry.family_reading({"model_type": kind, **values}).__name__.endswith(f".{kind}")
    with pytest.raises(AssertionError, match="sources"):
        registry.family_for("mistral")

"""Published config.json files with every field: each is read and equals its preset.

FILES in tests/variants has them by the names of presets. Fields that a publisher's own code has left behind are what a
family written from transformers alone refuses.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import fnmodels
import params as P
from fnmodels.models.presets import published
from tests.support.cases import collected, family_modules, variants_of

FILES: dict[str, dict[str, Any]] = collected("FILES")


def test_every_model_type_has_a_published_file() -> None:
    """In FILES or published(); NO_FILE says of which there is none, and why."""
    files = [*FILES.values(), *(f for family in family_modules() for f in variants_of(family).published().values())]
    there = {values["model_type"] for values in files} | collected("NO_FILE").keys()
    missing = fnmodels.families().keys() - there
    assert not missing, f"FILES in tests/variants has no published config.json of {sorted(missing)}."


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_read_and_is_its_preset(name: str, tmp_path: Path) -> None:
    """Except initializer_range, which presets leave at the family's default."""
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    config, preset = P.load_config(tmp_path), fnmodels.preset(name)
    assert config == dataclasses.replace(preset, initializer_range=config.initializer_range)
    assert config.to_hf()["architectures"] == FILES[name]["architectures"]


@pytest.mark.parametrize("name", [name for name, values in published().items() if "model_type" in values])
def test_a_folder_of_a_preset_is_read_as_it_and_so_is_its_text_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published()[name]))
    whole = fnmodels.preset(name)
    assert P.load_config(tmp_path) == whole
    if "text_config" in published()[name]:
        assert P.load_config(tmp_path, part="text") == (whole.text if hasattr(whole, "text") else whole)


def test_what_qwen3_coder_says_besides(tmp_path: Path) -> None:
    """Its files name explicitly what holds for every qwen3_moe."""
    plain = FILES["qwen3-30b-a3b"]
    coder = plain | {"intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28}
    coder |= {"rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0}
    coder |= {"qkv_bias": False, "use_qk_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(coder))
    config, preset = P.load_config(tmp_path), fnmodels.preset("qwen3-30b-a3b")
    rope = dataclasses.replace(preset.rope, theta=1e7)
    changes = {"intermediate_size": 5472, "max_position_embeddings": 262144, "rope": rope}
    assert config == dataclasses.replace(preset, **changes)


@pytest.mark.parametrize("name", ["granite-3.1-2b", "gpt2", "starcoder2-3b"])
def test_dropout_is_kept_for_those_who_train_elsewhere(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    given = {field: value for field, value in FILES[name].items() if "dropout" in field or field.endswith("pdrop")}
    given.pop("summary_first_dropout", None)  # of a classification head, which is absent
    written = P.load_config(tmp_path).to_hf()
    assert given and {field: written[field] for field in given} == given


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [one for family in family_modules() for one in getattr(variants_of(family), "CONTRADICTIONS", [])],
)
def test_second_names_that_say_something_else_are_refused(
    name: str, changes: dict[str, Any], error: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES[name] | changes))
    with pytest.raises(P.UnsupportedError, match=error):
        P.load_config(tmp_path)

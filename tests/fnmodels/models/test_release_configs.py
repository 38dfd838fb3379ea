"""Every config.json that releases of transformers write for our model types is read as what it was written from."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from fnmodels.models.common.registry import every_model, family_reading
from tests.support import release_configs
from tests.support.release_configs import REPLACED, asked_of, digest_of, minimal_files, releases, written_by

RELEASES = ("4.16.2", "4.40.2", "4.57.6", "5.24.0")
COUNTS = dict(zip(RELEASES, (246, 756, 1388, 2042), strict=True))
# Fields of the Config whose default was another one in the release, whose files state it.
OTHER_DEFAULTS = {
    "4.16.2": {
        "text.eos_token_id",
        "vocab_size",
    },  # of CLIP, with the same meaning: the highest id is the last; Marian's
}


def _config(values: dict[str, Any], part: str | None) -> Any:
    return family_reading(values, part).Config.from_hf(values)


def _differing(one: Any, other: Any, path: str = "") -> Iterator[str]:
    if type(one) is not type(other) or not dataclasses.is_dataclass(one):
        yield from [path] if one != other else []
        return
    for field in dataclasses.fields(one):
        if field.compare:
            yield from _differing(
                getattr(one, field.name), getattr(other, field.name), f"{path}.{field.name}".strip(".")
            )


FOLLOWING = ("num_hidden_layers",)  # of HRM-Text, whose file says the number for one cycle too


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_release_writes_is_read_as_what_it_was_written_from(release: str) -> None:
    found, wrong = 0, {}
    for label, forms in written_by(release).items():
        wrapped = "text_config" in forms["minimal"]
        part = "text" if wrapped and "vision_config" not in forms["minimal"] else None  # releases add a default tower
        replaced = {name: value for name, value in forms.get("replaced", {}).items() if name not in FOLLOWING}
        wanted = _config(forms["minimal"] | replaced, part)
        for form in ("full", "saved"):
            try:
                read = _config(forms[form], part)
            except ValueError as error:
                wrong[f"{label}, {form}"] = str(error)
                continue
            found += 1
            if lost := set(_differing(wanted, read)) - OTHER_DEFAULTS.get(release, set()):
                wrong[f"{label}, {form}"] = ", ".join(sorted(lost))
    assert not wrong, "\n".join(f"{label}: {what}" for label, what in wrong.items())
    assert found == COUNTS[release]


# Model types without such a file: transformers does not have them.
UNKNOWN = {
    "bailing_moe",
    "bailing_moe_v2",
    "Dream",
    "deepseek_v41",
    "deepseek_v41_text",
    "FluxTransformer2DModel",
    "kimi_k2",
    "kimi_k3",
    "llada",
    "longcat_flash_ngram",
}
UNKNOWN |= {"minimax_m1", "minimax_text_01", "nemotron-nas", "ouro", "rwkv7", "sdar"}


def test_every_model_type_of_transformers_is_covered() -> None:
    assert releases() == sorted(RELEASES)
    written = [forms for release in RELEASES for forms in written_by(release).values()]
    assert every_model().keys() - {forms["minimal"]["model_type"] for forms in written} == UNKNOWN
    assert not UNKNOWN & set(CONFIG_MAPPING.keys())
    replaced = {(forms["minimal"]["model_type"], name) for forms in written for name in forms.get("replaced", {})}
    assert replaced == {(model_type, name) for model_type, names in REPLACED.items() for name in names}


def test_the_newest_file_is_of_the_variants_and_presets_of_today() -> None:
    """Those of older releases need their packages, see `release_configs`: they are made after a family is added."""
    newest = RELEASES[-1]
    if os.environ.get("FNMODELS_UPDATE_DOCS"):
        release_configs.main()
    assert asked_of(newest) == digest_of(minimal_files(newest)), (
        "FNMODELS_UPDATE_DOCS=1 pytest tests/fnmodels/models/test_release_configs.py writes the file again"
    )

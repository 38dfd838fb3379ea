"""Reading config.json: every field once, checked, in both dialects; what is odd is an error which names the field."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.registry import _modules
from fnmodels.models.common.rope_config import parse_rope, rope_from_hf, rope_to_hf
from fnmodels.ops.rotary import Rope


@pytest.mark.parametrize(
    ("getter", "value", "words"),
    [
        ("integer", 0, "from 1"),
        ("integer", True, "an integer"),
        ("integer", 2.0, "an integer"),
        ("integer", "2", "an integer"),
        ("integer", 1 << 40, "an integer"),
        ("number", float("nan"), "finite"),
        ("number", float("inf"), "finite"),
        ("number", -1.0, "above 0"),
        ("number", "1", "finite"),
        ("number", True, "finite"),
        ("boolean", 1, "true or false"),
        ("boolean", "false", "true or false"),
    ],
)
def test_values_of_the_wrong_type_or_range(getter: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        getattr(Fields({"size": value}), getter)("size")
    assert "'size'" in str(caught.value)


def test_absent_null_and_default() -> None:
    fields = Fields({"size": None, "rate": 2})
    assert fields.integer("size", 7) == 7 and fields.integer("other", 8) == 8
    assert fields.number("rate") == 2.0 and isinstance(fields.number("rate"), float)
    for name in ("size", "other"):
        with pytest.raises(ConfigError, match=f"has no {name!r}"):
            fields.integer(name)


def test_choices_and_lists() -> None:
    fields = Fields({"act": "silu", "odd": "wavy", "list": [1, 2.5], "short": [1], "bad": [1, -2]})
    assert fields.choice("act", ("silu", "relu")) == "silu"
    with pytest.raises(UnsupportedError, match="'odd' is \"wavy\"; supported are silu, relu"):
        fields.choice("odd", ("silu", "relu"))
    assert fields.numbers("list", 2) == (1.0, 2.5)
    for name in ("short", "bad", "act"):
        with pytest.raises(ConfigError, match="a list of 2 positive numbers"):
            fields.numbers(name, 2)


def test_only_supported_values() -> None:
    fields = Fields({"dropout": 0.0, "encoder": True, "flag": 0})
    fields.expect("dropout", 0, 0.0)
    fields.expect("absent", False)
    for name in ("encoder", "flag"):  # 0 is not false
        with pytest.raises(UnsupportedError, match=f"'{name}'.*only false is supported"):
            fields.expect(name, False)


def test_nothing_is_overlooked() -> None:
    fields = Fields({"known": 1, "wobble": 2, "eos_token_id": 3, "null": None, "use_cache": True})
    fields.integer("known")
    with pytest.raises(ConfigError, match="wobble = 2"):
        fields.finish()
    assert fields.finish(ignored=("wobble",)) == (("eos_token_id", "3"),)
    with pytest.raises(ConfigError, match="JSON object"):
        Fields([1])  # type: ignore[arg-type]


def _read(values: dict[str, Any], head_dim: int = 8, max_positions: int = 64) -> Rope:
    return rope_from_hf(Fields(values), head_dim=head_dim, max_positions=max_positions, theta=500.0, partial=1.0)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1, 2, 3, 4], "long_factor": [5, 6, 7, 8], "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, Rope(500.0)),
        ({"rope_theta": 3}, Rope(3.0)),
        ({"rope_theta": 3, "rope_scaling": None}, Rope(3.0)),
        ({"rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}}, Rope(3.0)),
        ({"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(3.0, "linear", factor=2.0)),
        ({"rope_theta": 3.0, "partial_rotary_factor": 0.5}, Rope(3.0, partial=0.5)),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            Rope(500.0, "dynamic", factor=2.0, original_max_position_embeddings=64),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            Rope(500.0, "llama3", factor=8.0, original_max_position_embeddings=16),
        ),
        (  # without a factor it is what the context grew by
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}},
            Rope(500.0, "yarn", factor=4.0, original_max_position_embeddings=16),
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", **LONG}},
            Rope(
                500.0,
                "longrope",
                factor=4.0,
                original_max_position_embeddings=16,
                short_factor=(1.0, 2.0, 3.0, 4.0),
                long_factor=(5.0, 6.0, 7.0, 8.0),
            ),
        ),
    ],
)
def test_ropes(values: dict[str, Any], want: Rope) -> None:
    rope = _read(values)
    assert rope == want
    assert parse_rope(Fields(rope_to_hf(rope)), head_dim=8, max_positions=64, theta=1.0, partial=1.0) == rope


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"rope_scaling": 2.0}, ConfigError, "object or null"),
        ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedError, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, ConfigError, "'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}}, ConfigError, "wobble"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, ConfigError, "disagree"),
        ({"rope_theta": 3.0, "rope_parameters": {"rope_theta": 4.0}}, ConfigError, "rope_theta"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"factor": 3.0}},
            ConfigError,
            "disagree",
        ),
        ({"partial_rotary_factor": 0.4}, ConfigError, "3 of 8"),
        ({"partial_rotary_factor": 1.5}, ConfigError, "1.5, but must be .* at most 1"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 5.0}}, ConfigError, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "longrope", **LONG, "long_factor": [1]}}, ConfigError, "list of 4"),
    ],
)
def test_ropes_refused(values: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        _read(values)


def test_a_family_that_rotates_all_refuses_a_part() -> None:
    given = {"head_dim": 8, "max_positions": 64, "theta": 1.0}
    assert rope_from_hf(Fields({"partial_rotary_factor": 1}), **given) == Rope(1.0)
    with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
        rope_from_hf(Fields({"partial_rotary_factor": 0.5}), **given)


def test_a_family_of_text_is_found_without_importing_those_with_a_tower() -> None:
    program = """
import sys
from fnmodels.models.common.registry import family_for
assert family_for("llama").__name__ == "fnmodels.models.decoder.llama"
assert not [name for name in sys.modules if name.startswith("fnmodels.models.vision")]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_modules_of_a_package_are_those_of_its_folders_or_of_its_zip_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("__init__.py", "two.py", "one.py", "notes.txt"):
            (tmp_path / name).write_text("")
            archive.writestr(f"package/{name}", "")
    for folder in (tmp_path, tmp_path / "all.zip" / "package"):
        assert _modules("package", (str(folder),)) == ("package.one", "package.two")

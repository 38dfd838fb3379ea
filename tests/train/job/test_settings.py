"""Tests of settings: round trips through flags, TOML and JSON, and a message for every invalid value."""

import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from fnmodels.errors import UserError
from train.job.settings import (
    DEFAULT,
    MODEL_SIZES,
    SETTING_TYPES,
    Settings,
    changeable,
    fixed_settings,
    from_json,
    read_toml,
    to_toml,
)

ALL = Settings(
    data='/a/"b\\c\x7f\n é',
    steps=3,
    learning_rate=1e-5,
    betas=(0.0, 0.5),
    dtype="float32",
    prompt="\t'",
    keep=7,
)


@pytest.mark.parametrize("settings", [DEFAULT, ALL, replace(ALL, init="/model")])
def test_what_is_written_is_read_back(tmp_path, settings):
    (tmp_path / "a.toml").write_text(to_toml(settings))
    found = read_toml(tmp_path / "a.toml")
    idle = {name for name, value in asdict(settings).items() if value is None}
    idle |= set(MODEL_SIZES) if settings.init else set()
    assert found == {name: value for name, value in asdict(settings).items() if name not in idle}
    assert {line.split(" =")[0].removeprefix("# ") for line in to_toml(settings).splitlines()} == SETTING_TYPES.keys()


def test_what_decides_comes_back_from_json():
    fixed = {name: value for name, value in asdict(ALL).items() if name not in changeable(Settings)}
    assert from_json(fixed_settings(ALL)) == fixed
    assert {"save_every", "keep"} <= changeable(Settings)
    wrong = {"steps": 0, "seed": None, "unknown": 1, "betas": [1, 2, 3], "data": None}
    assert from_json(wrong) == {"data": None}


def test_every_default_is_a_value_that_may_be_given():
    for entry in fields(Settings):
        value = getattr(DEFAULT, entry.name)
        assert value is None or SETTING_TYPES[entry.name].check(value) == value, entry.name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "there is no setting 'stepz'; the nearest is steps"),
        ("xyzzy = 3", "there is no setting 'xyzzy'"),
        ("save-every = 3", "the nearest is save_every"),
        ("[sizes]\nsteps = 3", "there is no setting 'sizes': settings stand outside of tables"),
        ("steps = 0", "steps is 0, which is not a whole number from 1"),
        ("steps = 2.5", "steps is 2.5, which is not a whole number from 1"),
        ("steps = true", "steps is True, which is not a whole number from 1"),
        ('steps = "3"', "steps is '3', which is not a whole number from 1"),
        ("learning_rate = -1", "learning_rate is -1, which is not a number from 0"),
        ("learning_rate = nan", "learning_rate is nan, which is not a number from 0"),
        ("clip = 0", "clip is 0, which is not a number above 0"),
        (f"clip = 1{'0' * 400}", "which is not a number above 0"),
        ("decay_ratio = 2", "decay_ratio is 2, which is not a number from 0 to 1"),
        ("betas = [0.9]", "betas is [0.9], which is not two numbers from 0 to below 1"),
        ("betas = [0.9, 1]", "betas is [0.9, 1], which is not two numbers"),
        ("betas = 0.9", "betas is 0.9, which is not two numbers"),
        ('dtype = "float16"', "dtype is 'float16', which is not one of bfloat16, float32"),
        ("data = 3", "data is 3, which is not a path"),
        ('init = "a\\u0000b"', "init is 'a\\x00b', which is not a path"),
        ("steps = ", "is not TOML"),
        ("steps = 1\nsteps = 2", "is not TOML"),
        (b"\xff", "is not TOML"),
        (None, "the file of settings cannot be read (No such file or directory)"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, words):
    path = tmp_path / "a.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        read_toml(path)
    assert words in str(error.value) and str(error.value).startswith(str(path))


def test_whole_numbers_do_where_a_number_is_asked_and_paths_are_of_the_file(tmp_path):
    (tmp_path / "a.toml").write_text('weight_decay = 0\nbetas = [0, 0.5]\ndata = "below"\ninit = "/abs"\n')
    found = read_toml(tmp_path / "a.toml")
    assert found == {"weight_decay": 0.0, "betas": (0.0, 0.5), "data": str(tmp_path / "below"), "init": "/abs"}
    assert all(type(value) is float for value in (found["weight_decay"], *found["betas"]))


def test_the_guide_names_each_setting_that_a_resumed_run_may_change():
    guide = (Path(__file__).parents[3] / "docs" / "main-job.md").read_text()
    paragraph = next(text for text in guide.split("\n\n") if "Settings that are passed again" in text)
    assert set(re.findall(r"`(\w+)`", paragraph)) == changeable(Settings)

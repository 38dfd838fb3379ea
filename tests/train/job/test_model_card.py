"""The model card of a run folder: front matter that the Hub can read, results, and nothing of this machine."""

import json

import pytest

from tests.train.job.test_run import TINY, stop_after, train
from train.job import run_folder


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "secret folder" / "functions.txt"
    path.parent.mkdir()
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    return path


def front_of(card):
    """{key: value}: each line of the front matter is a key and a value in JSON."""
    lines = card.split("---\n")[1].splitlines()
    return {line.split(": ", 1)[0]: json.loads(line.split(": ", 1)[1]) for line in lines}


def test_the_card_says_what_was_trained_on_what_and_how_well(tmp_path, text):
    path = tmp_path / "small"
    assert train(path, text, "--license", "apache-2.0") == 0
    card, summary = (path / run_folder.CARD).read_text(), json.loads((path / run_folder.SUMMARY).read_text())
    front = front_of(card)
    assert front["license"] == "apache-2.0" and front["pipeline_tag"] == "text-generation"
    metric = front["model-index"][0]["results"][0]["metrics"][0]
    assert metric["value"] == summary["heldout_bits_per_byte"]
    assert "functions.txt" in card and "secret folder" not in card and str(tmp_path) not in card
    assert f"6 of {TINY.steps} steps" in card and "](loss.png)" in card and '"row_length": 32' in card


def test_a_stopped_run_has_a_card_and_a_resumed_one_that_of_a_run_without_a_stop(tmp_path, text, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        assert train(tmp_path / "a" / "run", text) == 130
    card = (tmp_path / "a" / "run" / run_folder.CARD).read_text()
    assert "2 of 6 steps" in card and "the run is at step 2" in card and "license" not in front_of(card)
    assert train(tmp_path / "a" / "run", text, "--resume") == 0
    assert train(tmp_path / "b" / "run", text) == 0
    cards = [(tmp_path / name / "run" / run_folder.CARD).read_text() for name in "ab"]
    assert cards[0] == cards[1]


def test_a_run_on_a_checkpoint_names_it_as_the_base_model(tmp_path, text):
    assert train(tmp_path / "base", text, "--steps", 1) == 0
    assert train(tmp_path / "tuned", text, "--init", tmp_path / "base", "--steps", 1) == 0
    card = (tmp_path / "tuned" / run_folder.CARD).read_text()
    assert front_of(card)["base_model"] == "base" and "trained further from base" in card

"""The published cookbook's plain loops (tinker-cookbook 0.6.1) run with `ServiceClient` of `train.integrations.tinker`.

`make verl` installs the cookbook beside verl and runs them. `tests/train/server/tinker/test_recipes.py` has the same
loops with nothing replaced, over HTTP.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import params as P
from tests.support.cookbook_home import MODEL, write_home
from train.integrations.tinker import ServiceClient

pytest.importorskip("tinker_cookbook")
rl_loop = pytest.importorskip("tinker_cookbook.recipes.rl_loop", exc_type=ImportError)
sl_loop = pytest.importorskip("tinker_cookbook.recipes.sl_loop", exc_type=ImportError)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def cookbook(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    """Our service in place of the package's, in a folder with the model and the data sets."""
    monkeypatch.chdir(home)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for loop in (rl_loop, sl_loop):
        monkeypatch.setattr(loop.tinker, "ServiceClient", functools.partial(ServiceClient, folder=tmp_path / "saved"))


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_supervised_training(tmp_path: Path) -> None:
    log, sizes = str(tmp_path / "log"), {"batch_size": 4, "lora_rank": 8, "save_every": 4}
    sl_loop.main(sl_loop.Config(log_path=log, model_name=MODEL, learning_rate=3e-3, max_steps=12, **sizes))
    losses = [line["train_mean_nll"] for line in _lines(tmp_path / "log" / "metrics.jsonl")]
    assert len(losses) == 12 and losses[0] > 2 and losses[-1] < 0.5, losses
    saved = _lines(tmp_path / "log" / "checkpoints.jsonl")
    assert [one["name"] for one in saved] == ["000004", "000008", "final"]
    assert Path(saved[-1]["sampler_path"], P.lora.CONFIG).is_file()


def test_policy_gradients(tmp_path: Path) -> None:
    config = rl_loop.Config(
        log_path=str(tmp_path / "log"),
        model_name=MODEL,
        batch_size=4,
        group_size=16,
        learning_rate=3e-3,
        lora_rank=8,
        max_tokens=10,
        loss_fn="importance_sampling",
    )
    rl_loop.main(config)
    rewards = [line["reward/total"] for line in _lines(tmp_path / "log" / "metrics.jsonl")]
    assert len(rewards) == 24 and sum(rewards[:2]) < 0.5 and sum(rewards[-4:]) > 3.2, rewards
    assert "state_path" in _lines(tmp_path / "log" / "checkpoints.jsonl")[-1]
    rl_loop.main(config)  # the log names a saved state: it resumes there, after the last batch
    assert len(_lines(tmp_path / "log" / "metrics.jsonl")) == 24
    assert len(_lines(tmp_path / "log" / "checkpoints.jsonl")) == 3  # after 20 batches, and two final ones

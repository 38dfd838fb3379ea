"""Recipes of Tinker's published cookbook, run as its readers run them, against a server in a process of its own.

Nothing of the cookbook and of the `tinker` package is replaced: the base URL is a flag of the recipes, and their model
and data sets are folders with the names of the Hub. The last test draws their curves.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cookbook_home import MODEL, write_home

pytest.importorskip("starlette")
pytest.importorskip("tinker_cookbook")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

TOKEN = "tml-secret"
Recipe = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "train.server", home / MODEL, "--name", MODEL, "--train", "--token", TOKEN]
    command += ["--port", "0", "--slots", "64", "--context", "512", "--saves", home / "saves"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1].removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def recipe(home: Path, url: str) -> Recipe:
    """Runs a recipe; its metrics of each step."""
    network = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "cache"), "TINKER_TELEMETRY": "0"}
    environment = os.environ | network | {"TINKER_API_KEY": TOKEN}

    def run(name: str, log: str, **flags: Any) -> list[dict[str, Any]]:
        flags = {"base_url": url, "model_name": MODEL, "log_path": home / log, "lora_rank": 8} | flags
        command = [sys.executable, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{name}"]
        command += [f"{flag}={value}" for flag, value in flags.items()]
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        return _lines(home / log / "metrics.jsonl")

    return run


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


POLICY = {"batch_size": 4, "group_size": 16, "max_tokens": 10, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def losses(recipe: Recipe) -> list[float]:
    lines = recipe("sl_loop", "sl", batch_size=4, learning_rate=3e-3, save_every=10)
    return [line["train_mean_nll"] for line in lines]


@pytest.fixture(scope="module")
def rewards(recipe: Recipe) -> list[float]:
    lines = recipe("rl_loop", "rl", loss_fn="importance_sampling", save_every=10, **POLICY)
    return [line["reward/total"] for line in lines]


@pytest.fixture(scope="module")
def distilled(recipe: Recipe, home: Path, rewards: list[float]) -> list[dict[str, Any]]:
    """The student begins as the base model; its teacher is the policy at its end. Its reward is the teacher's alone."""
    teacher = _lines(home / "rl" / "checkpoints.jsonl")[-1]["sampler_path"]
    names = {"teacher_model": MODEL, "teacher_checkpoint": teacher, "dataset": "tulu3"}
    sizes = {"group_size": 8, "groups_per_batch": 8, "max_tokens": 6, "max_steps": 24, "eval_every": 0, "save_every": 0}
    return recipe("distillation.on_policy_distillation", "distillation", learning_rate=3e-3, **names, **sizes)


def test_supervised_training_learns_the_sentence_of_its_data(losses: list[float], home: Path) -> None:
    assert len(losses) == 24 and losses[0] > 2 and _mean(losses[-4:]) < 0.1, losses
    assert [one["name"] for one in _lines(home / "sl" / "checkpoints.jsonl")] == ["000010", "000020", "final"]


def test_policy_gradients_find_the_answer_of_their_data(rewards: list[float]) -> None:
    assert len(rewards) == 24 and _mean(rewards[:2]) < 0.25 and _mean(rewards[-4:]) > 0.8, rewards


def test_gspo_has_the_numbers_of_its_paper_where_the_recipe_names_none(recipe: Recipe) -> None:
    rewards = [line["reward/total"] for line in recipe("rl_loop", "gspo", loss_fn="gspo", max_steps=12, **POLICY)]
    assert _mean(rewards[:2]) < 0.25 and _mean(rewards[-3:]) > 0.6, rewards


def test_distillation_learns_what_the_policy_has_found(distilled: list[dict[str, Any]]) -> None:
    divergences = [line["teacher_kl"] for line in distilled]
    assert len(divergences) == 24 and _mean(divergences[:2]) > 0.4, divergences
    assert _mean(divergences[-4:]) < 0.3 * _mean(divergences[:2]), divergences
    # the sampler's log-probabilities are the trainer's
    assert max(abs(line["optim/kl_sample_train_v1"]) for line in distilled) < 1e-4


def test_the_curves_are_drawn(
    losses: list[float], rewards: list[float], distilled: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The picture of docs/server.md, for someone who looks at it."""
    figure = Figure((9.6, 2.8), layout="constrained")
    divergences = [line["teacher_kl"] for line in distilled]
    panels = {
        "sl_loop": ("nats per token", losses),
        "rl_loop": ("reward", rewards),
        "on_policy_distillation": ("KL to the teacher", divergences),
    }
    for axes, (name, (label, values)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axes.plot(range(len(values)), values)
        axes.set(title=name, xlabel="updates", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.savefig(tmp_path / "recipes.png", dpi=100)
    assert (tmp_path / "recipes.png").stat().st_size > 10_000

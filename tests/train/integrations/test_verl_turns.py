"""verl's agent loop over this package's rollout: many turns with tools and pictures, and `main_ppo` with both.

In verl's virtual environment: `make verl`. verl's `ToolAgentLoop`, its parser of calls, its data set and `main_ppo` run
as they are; tests of pictures are skipped where torchvision and qwen-vl-utils could not be installed.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
HERE = importlib.util.find_spec("verl") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="verl has a virtual environment of its own: make verl")


def support(name: str) -> Any:
    """The module tests/support/NAME.py; verl installs a package `tests` of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/support/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toy = support("verl_toy")
with_pictures = pytest.mark.skipif(not toy.PICTURES.exists(), reason="torchvision and qwen-vl-utils: make verl")


def conversations(folder: Path, **options: Any) -> dict[str, Any]:
    """What tests/support/verl_turns.py finds, of which what holds for every model is checked."""
    program = [sys.executable, str(ROOT / "tests/support/verl_turns.py"), str(folder / "model"), str(folder)]
    found: dict[str, Any] = json.loads(toy.printed(program, folder, **options).splitlines()[-1])
    assert len(found["turns"]) == 24 and {1, 2, 3} <= {*found["turns"]}
    answered = sum(found["turns"]) - len(found["turns"])  # observations, each of at least 8 tokens
    assert answered >= 8 and found["observed"] >= 8 * answered and found["log_probs"] < 1e-5
    assert found["tokens"] == found["marks"] == 0
    return found


def test_conversations_with_tools_have_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    """Turn by turn the same ids; marks and log-probabilities of what was sampled, and of nothing else."""
    support("verl_flow").write_model("llama", tmp_path / "model")
    toy.write_task(tmp_path, tmp_path / "model")
    conversations(tmp_path)


@with_pictures
def test_conversations_with_pictures_in_prompts_and_of_tools(tmp_path: Path) -> None:
    """The rollout's pixels are those that verl makes for the actor; no answer has a token that verl takes for one."""
    support("verl_looking").write_task(tmp_path, tmp_path / "model")
    found = conversations(tmp_path, pictures=True)
    assert {0, 1, 2, 3} <= {*found["images"]} and found["other_images"] == found["placeholders"] == 0
    assert found["blank"] > 1e-3  # pictures matter to the log-probabilities
    text, fewer, wrong = found["refused"]
    assert text.startswith("ValueError: The request has images, and the weights that were sent are those of the text")
    assert re.match(r"ValueError: The prompt of request \d+ has \d+ image tokens .*, but its \d images have", fewer)
    assert wrong.startswith("ValueError: Image 0 of the request is a object; it must be a picture of PIL")


def test_main_ppo_replays_the_experts_of_conversations_with_tools(tmp_path: Path) -> None:
    support("verl_flow").write_model("mixtral", tmp_path / "model")  # verl asks more of the tokenizers of Qwen models
    toy.write_task(tmp_path, tmp_path / "model")
    command = toy.command(tmp_path, tmp_path / "model", steps=2) + toy.turns(tmp_path, 40)
    command += ["actor_rollout_ref.actor.fnmodels.router_replay.mode=R3"]
    check(toy.printed([*command, "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"], tmp_path))


@with_pictures
def test_main_ppo_with_pictures_in_prompts_and_of_tools(tmp_path: Path) -> None:
    """Actor, reference policy and rollout of a model that reads images, with a validation."""
    support("verl_looking").write_task(tmp_path, tmp_path / "model")
    command = toy.command(tmp_path, tmp_path / "model", steps=2) + toy.turns(tmp_path, 40)
    command += ["actor_rollout_ref.actor.fnmodels.images=True", "actor_rollout_ref.actor.use_kl_loss=True"]
    text = toy.printed([*command, "data.max_prompt_length=24", "trainer.test_freq=2"], tmp_path, pictures=True)
    check(text)
    (divergence,) = toy.logged(text, "actor/kl_loss")[1:]
    assert toy.logged(text, "actor/kl_loss")[0] == 0 < divergence
    assert "val-core/digits/" in text  # the validation's score


def check(text: str) -> None:
    """Some conversations had a tool's turn, and the actor's probabilities of what was sampled are the rollout's."""
    assert max(toy.logged(text, " num_turns/max")) > 2
    apart = toy.logged(text, "training/rollout_probs_diff_max")
    assert len(apart) == 2 and max(apart) < 1e-5

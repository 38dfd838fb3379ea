"""`python -m train.rl --environment`: learning in many turns, weights of bounded age, exact resume, stops, refusals."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fnmodels import tree
from tests.train.rl.scene import CONFIG, PARAMS, Counting, scene, write_checkpoint
from train.engine import Engine
from train.optim.adamw import adamw
from train.rl import command
from train.rl.ahead import Ahead
from train.rl.many_turns import FIRST_TASK, HELDOUT, Groups, ManyTurns, task_seeds
from train.rl.rollouts import Draws, rollouts

ROOT = Path(__file__).parents[3]
# two turns, rewarded for the share of letters that are ASCII; HANGS: steps of updates never return
SOURCE = """
import os, time
from train.rl.environment import Outcome

class Letters:
    def reset(self, seed):
        self.turns, self.seed = 0, seed
        return [{"role": "user", "content": f"letters {seed % 7}"}]

    def step(self, text):
        self.turns += 1
        if os.environ.get("HANGS") and self.seed > 1000:  # not those that are held out
            print("hangs", flush=True)
            time.sleep(3600)
        share = sum(letter.isascii() for letter in text) / max(1, len(text))
        return Outcome(f"{share:.1f}", share / 2, self.turns == 2)

class Broken(Letters):
    def step(self, text):
        return text
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder / "model")
    (folder / "own.py").write_text(SOURCE)
    return folder


def flags(base: Path, run: Path, *given: Any) -> list[str]:
    sizes = ["--prompts", "4", "--answers", "12", "--tokens", "8", "--context", "96", "--turns", "3"]
    made = ["--run", run, "--init", base / "model", "--environment", f"{base / 'own.py'}:Letters", *sizes]
    return [str(one) for one in (*made, "--save-every", 3, "--learning-rate", 0.02, *given)]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_stopped_run_continues_to_the_bits_of_one_that_learned_with_old_weights(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--updates", 12, "--staleness", 2)
    assert command.main(flags(base, tmp_path / "whole", *given)) == 0
    found = rows(tmp_path / "whole")
    rewards = [row["reward"] for row in found]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert [row["staleness"] for row in found] == [0, 1, *[2] * 10] == [row["staleness_most"] for row in found]
    assert found[0]["ratio"] == pytest.approx(1, abs=1e-5) and found[0]["turns"] == 2
    assert abs(found[5]["ratio"] - 1) > 1e-4  # the log-probabilities are those of the older weights
    real = command.stop_requests

    @contextmanager
    def stopping() -> Iterator[Any]:
        updates = count(1)
        with real():
            yield lambda: next(updates) >= 5

    with monkeypatch.context() as patch:
        patch.setattr(command, "stop_requests", stopping)
        assert command.main(flags(base, tmp_path / "run", *given)) == 130
    assert command.main(flags(base, tmp_path / "run", *given, "--resume")) == 0
    for name in ("model.safetensors", "metrics.jsonl", "summary.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["heldout_prompts"] == HELDOUT and "\nTool: " in summary["samples"][0]["answer"]
    assert (tmp_path / "run" / "reward.png").exists()


def test_conversations_have_the_weights_that_they_began_with() -> None:
    """Each update's conversations, with a bound of 2, are those of the weights two updates ago, alone."""
    engine = Engine(CONFIG, PARAMS, adamw(1e-2, weight_decay=0.0), clip=1.0)
    groups, weights = Groups(2, 3, seed=4), list[Any]()
    learner = ManyTurns(scene(Counting), groups, updates=5, staleness=2)
    seen = dict[int, Any]()
    real = learner._ahead.take

    def take(params: Any, number: int) -> Any:
        seen[number] = real(params, number)
        return seen[number]

    learner._ahead.take = take  # type: ignore[method-assign]
    for number in range(5):
        weights.append(tree.map(lambda leaf: leaf.detach().clone(), engine.params))
        learner.update(engine, number)
    learner.close()
    for number, (found, _) in seen.items():
        version = max(0, number - 2)
        assert {one.version for one in found} == {version}
        draws = Draws(4 * 1_000_003 + number, task_seeds(groups, number), version)
        assert rollouts(scene(Counting), weights[version], draws)[0] == found


def test_a_conversation_of_older_weights_than_the_bound_is_refused() -> None:
    """A planted schedule, which gives an update the conversations of another."""
    found = rollouts(scene(turns=1), PARAMS, Draws(0, [1], version=0))
    ahead = Ahead(lambda *_: found, 1, 9, {3: found})
    with pytest.raises(ValueError, match="conversation of weights 3 updates ago; the bound is 1"):
        ahead.take(PARAMS, 3)
    ahead.close()


def test_tasks_are_equal_in_a_group_and_never_held_out() -> None:
    seeds = task_seeds(Groups(3, 2, 1), 0)
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 3 and min(seeds) >= FIRST_TASK > HELDOUT
    assert seeds != task_seeds(Groups(3, 2, 1), 1) and seeds != task_seeds(Groups(3, 2, 2), 0)


REFUSED = {
    ("--data", "x"): "--data does not go with --environment",
    ("--environment", "calculater"): "--environment calculater: it is none of calculator, search",
    ("--context", "9"): "the first messages have",
    ("--role", "tool", "--turns", "0"): "--turns: '0' is not a whole number from 1",
    ("--environment", "{}/own.py:Nothing"): "has no function 'Nothing'",
    ("--environment", "{}/own.py:Broken"): "Broken failed: TypeError: step returned ",
}


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_a_mistake_is_one_sentence(
    given: tuple[str, ...], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [one.replace("{}", str(base)) for one in given]
    assert command.main(flags(base, tmp_path / "run", *filled)) == 2
    assert REFUSED[given] in capsys.readouterr().err


def test_flags_of_one_turn_and_of_many_are_told_apart(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--run", str(base / "new"), "--init", str(base / "model")]
    for given, sentence in {
        (): "--data is missing: give --data and --checker, or --environment",
        ("--data", "x", "--checker", "equal", "--staleness", "1"): "--staleness is for conversations",
    }.items():
        assert command.main([*place, *given]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("staleness", [0, 1])
def test_ctrl_c_twice_ends_a_run_whose_environment_hangs(staleness: int, base: Path, tmp_path: Path) -> None:
    argv = flags(base, tmp_path / "run", "--workers", 2, "--staleness", staleness)
    program = [sys.executable, "-m", "train.rl", *argv]
    env = {**os.environ, "HANGS": "1", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a suite that a shell runs in the background ignores the signal, and so would what it starts
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(program, cwd=ROOT, env=env, preexec_fn=heard, **pipes) as run:
        assert run.stdout is not None and run.stderr is not None
        assert any("hangs" in line for line in run.stdout)
        begin = time.monotonic()
        run.send_signal(signal.SIGINT)
        # on a busy machine two signals would arrive as one
        assert any("stopping after this step, then saving" in line for line in run.stderr)
        run.send_signal(signal.SIGINT)
        try:
            ended = run.wait(timeout=60)
        finally:
            run.kill()
    assert ended == 130 and time.monotonic() - begin < 60

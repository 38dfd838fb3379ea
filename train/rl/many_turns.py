"""GRPO over conversations: groups about one task, and clipped updates with the log-probabilities of the sampler."""

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fnmodels.tree import Tree
from train.engine import Engine
from train.losses.policy import group_advantages

from .ahead import Ahead, Found
from .conversation import Trajectory, microbatches
from .loop import BUDGET, PASSES, loss
from .rollouts import Draws, Scene, rollouts

HELDOUT = 64  # tasks 0 to 63, which no update draws
FIRST_TASK, TASKS = 1 << 20, 1 << 31  # the range of seeds of the tasks that updates draw


@dataclass(frozen=True)
class Groups:
    """The conversations of an update.

    Args:
        tasks: Tasks of an update.
        answers: Conversations about each.
        seed: Of all draws.
    """

    tasks: int
    answers: int
    seed: int


def task_seeds(groups: Groups, number: int) -> list[int]:
    """The seed of each conversation's task in update `number`, equal within a group."""
    draw = random.Random(f"{groups.seed} {number}")
    return [seed for _ in range(groups.tasks) for seed in [draw.randrange(FIRST_TASK, TASKS)] * groups.answers]


class ManyTurns:
    """Multi-turn GRPO of a run.

    Args:
        scene: What the conversations have in common.
        groups: Those of an update.
        updates: Updates in total.
        staleness: Updates between the weights that begin a conversation and those that train on it, at most.
        pending: Of `saved`, for a run that is resumed.
    """

    def __init__(
        self,
        scene: Scene,
        groups: Groups,
        *,
        updates: int,
        staleness: int = 0,
        pending: Mapping[str, Any] | None = None,
    ) -> None:
        self.scene, self.groups = scene, groups
        found = {int(update): _from_json(values) for update, values in (pending or {}).items()}
        self._ahead = Ahead(self._roll, staleness, updates, found)
        self._loss = functools.partial(loss, config=scene.config)

    def update(self, engine: Engine, number: int) -> dict[str, Any]:
        """Update `number`, from 0; returns its row of metrics."""
        found, computed = self._ahead.take(engine.params, number)
        rewards = torch.tensor([one.reward for one in found])
        gains = group_advantages(rewards.reshape(self.groups.tasks, self.groups.answers)).flatten()
        batches = microbatches(found, gains, max(BUDGET, self.scene.limits.context))
        ratio, last = 1.0, {}
        for turn in range(PASSES):
            engine.forward_backward(batches, self._loss)
            last = engine.optim_step()
            ratio = float(last["aux"]["ratio"] / last["count"].clamp(min=1)) if turn == 0 else ratio
        return row_of(found, number) | {
            "prefill_tokens": computed,
            "ratio": ratio,
            **{name: float(last[name]) for name in ("grad_norm", "lr")},
        }

    def judged(self, params: Tree) -> tuple[float, list[dict[str, Any]]]:
        """(mean reward, samples) of the likeliest turns in conversations about the held-out tasks."""
        found, _ = rollouts(self.scene, params, Draws(0, range(HELDOUT), greedy=True))
        return sum(one.reward for one in found) / len(found), [self._sample(one) for one in found]

    def saved(self) -> dict[str, Any]:
        """The conversations that were made ahead, as JSON, once they are complete."""
        pending = self._ahead.pending()
        return {
            str(update): [[one.to_json() for one in found], computed] for update, (found, computed) in pending.items()
        }

    def close(self) -> None:
        """Gives up the rollouts that are under way."""
        self._ahead.close()

    def _roll(self, params: Tree, number: int, version: int, stopped: Callable[[], bool]) -> Found:
        draws = Draws(self.groups.seed * 1_000_003 + number, task_seeds(self.groups, number), version)
        return rollouts(self.scene, params, draws, stopped=stopped)

    def _sample(self, one: Trajectory) -> dict[str, Any]:
        decode = functools.partial(self.scene.turns.tokenizer.decode, skip_special_tokens=False)
        asked, rest = one.tokens[: one.prompt_size], one.tokens[one.prompt_size :]
        return {"messages": [{"role": "user", "content": decode(list(asked))}], "answer": decode(list(rest))}


def row_of(found: list[Trajectory], number: int) -> dict[str, Any]:
    """The metrics of an update's conversations: means over them, and the age of the weights of each group."""
    count, ages = len(found), [number - one.version for one in found]
    return {
        "reward": sum(one.reward for one in found) / count,
        "turns": sum(len(one.rewards) for one in found) / count,
        "sampled_tokens": sum(sum(one.sampled) for one in found) / count,
        "mistakes": sum(one.mistakes for one in found) / count,
        "cut_off": sum(one.ended != "done" for one in found) / count,
        "staleness": sum(ages) / count,
        "staleness_most": max(ages),
    }


def _from_json(values: list[Any]) -> Found:
    found, computed = values
    return [Trajectory.from_json(one) for one in found], computed

"""GRPO on top of fnmodels: a small policy learns from reward alone to count on without question marks.
The loop, the sampler and the trainer are separate.

    python examples/grpo.py                 # three seeds, some minutes on two CPU cores; the curve is grpo.png

1. The main job trains a small model on runs of numbers, in which half of the numbers end in a question mark. RL changes
   mostly the form: the marks disappear.
2. A sampler with weights of its own goes on from "23:" with a cache, so that a token costs one step however long the
   answer is; the reward is the share of the next numbers that stand in their places without a mark.
3. The engine makes the update from packed microbatches, and sends its weights to the sampler one tensor at a time.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
import train
from train.eval.pretrained import load_tokenizer
from train.cli import main as main_job
from train.engine import Engine
from train.job.settings import Settings

SMALL = Settings(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    row_length=128,
    batch_rows=16,
    steps=300,
    eval_every=300,
    eval_rows=8,
    prompt="23:",
    sample_tokens=24,
)
PROMPTS, ANSWERS, NEW = 16, 8, 96  # prompts of an update, answers to each, tokens of an answer at most
RUN, FIRSTS = 24, 100  # numbers of an answer; those that a prompt may name
BUDGET = 4096  # tokens of a microbatch at most


def counting(draw: random.Random) -> str:
    """A line as "23: 24 25? 26 ... 47", half of its numbers with a mark."""
    first = draw.randrange(FIRSTS)
    return f"{first}:" + "".join(f" {first + i}{draw.choice(['', '?'])}" for i in range(1, RUN + 1)) + "\n"


def base_policy(folder: Path) -> Path:
    """A checkpoint of the main job, trained if it does not exist yet."""
    run = folder / "base"
    if not (run / "summary.json").exists():
        draw = random.Random(0)
        folder.mkdir(parents=True, exist_ok=True)
        documents = (json.dumps({"text": counting(draw)}) + "\n" for _ in range(3000))
        (folder / "counting.jsonl").write_text("".join(documents))
        given = ["--run", str(run), "--data", str(folder / "counting.jsonl")]
        if code := main_job([*given, *(["--resume"] if run.exists() else [])], defaults=SMALL):
            raise SystemExit(code)
    return run


class Sampler:
    """Stands in for an inference engine: weights under their checkpoint names, no gradients."""

    def __init__(self, config: Any, kernel: str) -> None:
        self.config, self.kernel, self.names = config, kernel, fnmodels.family_of(config).hf_names(config)
        self.weights: dict[str, Tensor] = {}

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.weights[name] = tensor.clone()

    def answer(self, prompts: list[list[int]], tokenizer: Any, seed: int) -> train.Generations:
        """The first lines that continue the prompts, NEW tokens at most, drawn at temperature 1."""
        params = P.unflatten({path: self.weights[name] for path, name in self.names.items()})
        options = {"max_new": NEW, "stop_texts": ["\n"], "tokenizer": tokenizer, "seeds": seed, "slots": len(prompts)}
        return train.generate(params, self.config, prompts, kernel=self.kernel, **options)


@dataclass(frozen=True)
class Rollout:
    """tokens: prompt and answer, up to the end of its line; learnt: which tokens the policy chose."""

    tokens: Tensor
    learnt: Tensor
    reward: float


def rollouts(sampler: Sampler, tokenizer: Any, draw: random.Random, seed: int) -> list[Rollout]:
    """ANSWERS to each of PROMPTS numbers, grouped by prompt."""
    firsts = [draw.randrange(FIRSTS) for _ in range(PROMPTS)]
    firsts = [first for first in firsts for _ in range(ANSWERS)]
    prompts = [tokenizer.encode(f"{first}:").ids for first in firsts]  # equal ones are computed once
    found = sampler.answer(prompts, tokenizer, seed)
    rows = zip(prompts, firsts, found.tokens, found.texts, strict=True)
    return [judged(prompt, first, tokens, text) for prompt, first, tokens, text in rows]


def judged(prompt: list[int], first: int, new: list[int], text: str) -> Rollout:
    """The reward is the share of the RUN numbers after `first` in their places; an answer too long has less."""
    tokens, found = torch.tensor(prompt + new), text.split(" ")[1:]
    right = sum(one == str(first + i) for i, one in enumerate(found[:RUN], 1))
    return Rollout(tokens, torch.arange(len(tokens)) >= len(prompt), right / max(RUN, len(found)))


def microbatches(found: list[Rollout]) -> list[dict[str, Tensor]]:
    """Packed rows under a token budget, with the advantage of each token that the policy chose."""
    rewards = torch.tensor([r.reward for r in found]).reshape(PROMPTS, ANSWERS)
    gains = train.losses.group_advantages(rewards).flatten()
    learnt = [torch.cat((r.learnt[1:], torch.tensor([False]))) for r in found]  # as labels: of the next token
    entries = {
        "tokens": [r.tokens for r in found],
        "learnt": learnt,
        "advantages": [gain * chosen for gain, chosen in zip(gains, learnt, strict=True)],
    }
    (rows,) = train.token_budget(entries, BUDGET)
    return [row.batch for row in rows]


def loss(
    params: Any, batch: dict[str, Tensor], *, config: Any, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """options: keywords that the engine passes to losses; with them the first update's ratios are 1 to the last bit."""
    logp, entropy, _ = train.token_logprobs(params, batch, config=config, **options)
    return train.policy_loss(
        logp, batch["old_logp"], batch["advantages"], batch["learnt"], clip=(0.2, 0.28), entropy=entropy
    )


def learn(
    base: Path, seed: int, updates: int, kernel: str = "auto", make_sampler: Callable[..., Sampler] = Sampler
) -> list[float]:
    """The mean reward before each update. kernel: of attention, in the sampler and in training."""
    config, params = P.load_pretrained(base, copy=True)
    tokenizer = load_tokenizer(base)
    draw = random.Random(seed)
    sampler = make_sampler(config, kernel)

    def rate(step: Tensor) -> Any:
        return 5e-4 * train.warmup_stable_decay(step, total=2 * updates, warmup=10, decay_ratio=0.5)

    engine = Engine(config, params, train.adamw(rate, betas=(0.9, 0.95), weight_decay=0.0), clip=1.0)
    logprobs = functools.partial(train.token_logprobs, config=config, kernel=kernel)
    loss_fn = functools.partial(loss, config=config, kernel=kernel)
    curve = []
    for update in range(updates):
        sampler.update(engine.export())
        found = rollouts(sampler, tokenizer, draw, seed * 10_000 + update)
        curve.append(sum(r.reward for r in found) / len(found))
        batches = microbatches(found)
        old = [logp for logp, _, _ in engine.infer(batches, logprobs)]
        batches = [b | {"old_logp": o} for b, o in zip(batches, old, strict=True)]
        for _ in range(2):  # the second update is off-policy, which is what the clip is for
            engine.forward_backward(batches, loss_fn)
            engine.optim_step()
        if update % 10 == 0:
            print(f"seed {seed}  update {update:3d}  reward {curve[-1]:.2f}", flush=True)
    return curve


def draw_curves(curves: dict[int, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for seed, curve in curves.items():
        means = [sum(near) / len(near) for near in (curve[max(0, i - 4) : i + 5] for i in range(len(curve)))]
        (line,) = axes.plot(means, linewidth=2, label=f"seed {seed}")
        axes.plot(curve, linewidth=0.8, alpha=0.35, color=line.get_color())
    axes.set(
        xlabel="update",
        ylabel="mean reward",
        ylim=(0, 1.02),
        title="Mean reward of 128 answers in each update, and the mean of the nearest nine",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/grpo"), help="of the base policy and the picture")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a curve of each (default 0 1 2)")
    parser.add_argument("--updates", type=int, default=30, help="of the policy, for each seed (default 30)")
    parser.add_argument(
        "--kernel", default="auto", help="\"invariant\": the sampler's log-probabilities have the bits of the trainer's"
    )
    arguments = parser.parse_args()
    base = base_policy(arguments.folder)
    curves = {seed: learn(base, seed, arguments.updates, arguments.kernel) for seed in arguments.seeds}
    for seed, curve in curves.items():
        tenth = max(len(curve) // 10, 1)
        print(f"seed {seed}: reward {sum(curve[:tenth]) / tenth:.2f} -> {sum(curve[-tenth:]) / tenth:.2f}")
    draw_curves(curves, arguments.folder / "grpo.png")
    print(f"curve: {arguments.folder / 'grpo.png'}")


if __name__ == "__main__":
    main()

"""Times GRPO of examples/grpo.py with a cache in its rollouts beside rollouts that compute each prefix anew.

    python benchmarks/dev/grpo.py              30 updates of one seed each
    python benchmarks/dev/grpo.py --quick      an untrained policy and one update, to check that everything runs

Both draw with the noise of (seed, row, step), so that they have the same answers and the same curve of rewards.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import above  # noqa: F401
import torch
from turns import give_back_memory

import fnmodels
import train
from train.generation.requests import Answer, collect, requests_of
from train.generation.sampling import sample_state, sample_step


def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo_example", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def recomputed(
    params: Any,
    config: Any,
    prompts: list[list[int]],
    *,
    max_new: int,
    stop_texts: list[str],
    tokenizer: Any,
    seeds: int,
    kernel: str,
    slots: int,
) -> train.Generations:
    """`train.generate` without a cache: a forward pass over the unfinished rows, padded on the right, per token."""
    made = requests_of(prompts, max_new, None, seeds, (), stop_texts)
    answers, events = [Answer(row, request, tokenizer) for row, request in enumerate(made)], []
    rows = [list(prompt) for prompt in prompts]
    going = list(range(len(made)))
    for step in range(max_new):
        lengths = torch.tensor([len(rows[row]) for row in going])
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(rows[row]) for row in going], batch_first=True)
        segment_ids = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        prepared = fnmodels.prepare(config, tokens, segment_ids=segment_ids)
        x = fnmodels.hidden(params, *prepared, config=config, kernel=kernel)
        last = x[torch.arange(len(going)), lengths - 1]
        logits = fnmodels.family_of(config).unembed(params, last[:, None], config=config)[:, 0]
        seed, draw = (torch.tensor([getattr(made[row], name) for row in going]) for name in ("seed", "draw"))
        state = sample_state(train.Sampling(), seed, draw, steps=torch.full_like(seed, step))
        drawn, logp, kept, _ = sample_step(logits, state)
        new = [
            answers[row].append(*one)
            for row, one in zip(going, zip(drawn.tolist(), logp.tolist(), kept.tolist(), strict=True), strict=True)
        ]
        events += new
        for event in new:
            rows[event.row].append(event.token)
        going = [event.row for event in new if event.reason is None]
        if not going:
            break
    return collect(events, len(made))


def timed(sampler: Any, answer: Callable[..., train.Generations], spent: list[float]) -> Any:
    """A class like `sampler` whose rollouts are by `answer`, with their seconds in `spent`."""

    class Timed(sampler):
        def answer(self, prompts: list[list[int]], tokenizer: Any, seed: int) -> train.Generations:
            before, train.generate = train.generate, answer
            begin = time.perf_counter()
            try:
                found: train.Generations = super().answer(prompts, tokenizer, seed)
            finally:
                train.generate = before
            spent.append(time.perf_counter() - begin)
            return found

    return Timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--kernel", default="auto")
    args = parser.parse_args()
    give_back_memory()
    torch.set_num_threads(args.threads)
    grpo = example()
    if args.quick:
        args.updates = 1
        grpo.SMALL = dataclasses.replace(grpo.SMALL, steps=2, batch_rows=4)
        grpo.NEW = 8
    curves = {}
    print("| rollouts | wall s | of it rollouts s | reward, first and last fifth |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        base = grpo.base_policy(Path(folder))
        for name, answer in (("a forward pass per token", recomputed), ("with a cache", train.generate)):
            spent: list[float] = []
            begin = time.perf_counter()
            curve = grpo.learn(base, 0, args.updates, args.kernel, timed(grpo.Sampler, answer, spent))
            wall = time.perf_counter() - begin
            fifth = max(len(curve) // 5, 1)
            ends = [sum(part) / fifth for part in (curve[:fifth], curve[-fifth:])]
            curves[name] = curve, wall
            print(f"| {name} | {wall:.1f} | {sum(spent):.1f} | {ends[0]:.2f} -> {ends[1]:.2f} |", flush=True)
    (slow, slow_wall), (fast, fast_wall) = curves.values()
    off = max(abs(a - b) for a, b in zip(slow, fast, strict=True))
    print(f"the cache takes {fast_wall / slow_wall:.2f} of the wall time; the rewards differ by {off:.4f} at most")


if __name__ == "__main__":
    main()

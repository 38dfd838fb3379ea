"""Times `train.generate` with nothing chosen beside transformers' `generate`: the 26M Llama of generate.py, greedy.

    python benchmarks/dev/nothing_chosen.py                      1 row, 512 new tokens
    python benchmarks/dev/nothing_chosen.py --rows 8
    python benchmarks/dev/nothing_chosen.py --compile            first compiles these sizes, as an earlier process would
    python benchmarks/dev/nothing_chosen.py --quick              a tiny model, to check that everything runs

"nothing chosen" has compile="auto", whose choice is printed; "eager" has compile="none". Contenders take turns; a
figure is the median of the seconds of a call, and how many times as fast as transformers' it is, by CPU time and wall.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import above  # noqa: F401
import generate
import torch

import train
from train.generation.compile_choice import explain_compile

PROMPT = 16  # tokens


def theirs(model: Any, prompts: torch.Tensor, new: int) -> list[list[int]]:
    given = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with torch.no_grad():
        found = model.generate(prompts, max_new_tokens=new, **given)
    tokens: list[list[int]] = found[:, PROMPT:].tolist()
    return tokens


def ours(pair: generate.Pair, prompts: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    greedy = train.Sampling(temperature=0.0)
    return train.generate(pair.params, pair.config, prompts, max_new=new, sampling=greedy, **options).tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.new, args.rounds = 8, 1
    torch.set_num_threads(args.threads)
    pair = generate.pair("llama", generate.QUICK if args.quick else generate.SIZES, max(64, 2 * args.new))
    pair.theirs.generation_config.eos_token_id = None
    vocab = pair.config.vocab_size
    prompts = torch.randint(0, vocab, (args.rows, PROMPT), generator=torch.Generator().manual_seed(0))
    rows = prompts.tolist()
    if args.compile:
        ours(pair, rows, args.new, compile="step")
    print(explain_compile(pair.params, pair.config, rows=args.rows, prompt=PROMPT, max_new=args.new))
    calls: dict[str, Callable[[], list[list[int]]]] = {
        "transformers": partial(theirs, pair.theirs.eval(), prompts, args.new),
        "eager": partial(ours, pair, rows, args.new, compile="none"),
        "nothing chosen": partial(ours, pair, rows, args.new),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(args.rounds):
        for name, call in calls.items():
            cpu, wall = time.process_time(), time.perf_counter()
            tokens[name] = call()
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    base = [statistics.median(times) for times in zip(*taken["transformers"], strict=True)]
    print("| who | CPU s | x | wall s | x | equal tokens |\n|---|---|---|---|---|---|")
    for name, times in taken.items():
        cpu, wall = (statistics.median(of) for of in zip(*times, strict=True))
        equal = (torch.tensor(tokens[name]) == torch.tensor(tokens["transformers"])).double().mean()
        print(f"| {name} | {cpu:.2f} | {base[0] / cpu:.2f} | {wall:.2f} | {base[1] / wall:.2f} | {equal:.0%} |")


if __name__ == "__main__":
    main()

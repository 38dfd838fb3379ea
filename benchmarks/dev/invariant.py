"""Times what kernel="invariant" costs: a gradient of rows of 512 tokens, and a step of decoding.

    python benchmarks/dev/invariant.py              the 26M Llama of train_step.py, fp32 and bf16
    python benchmarks/dev/invariant.py --quick      a tiny model and one round, to check that everything runs

A gradient is forward, loss and backward of 4 rows; a step of decoding is `decode_` on rows with 128 and 1,024 cached
tokens, with packed weights in fp32. The ordinary kernel is "auto". Both take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import above  # noqa: F401
import torch
from decoders import Start, ours
from generate import QUICK, SIZES, configs, turn
from turns import give_back_memory, take_turns

import params as P
import train
from fnmodels import tree
from fnmodels.ops.invariant.attention import TILE

KERNELS = ("auto", "invariant")


def gradients(params: Any, config: Any, rows: int, length: int) -> dict[str, Callable[[], Any]]:
    tokens = torch.randint(config.vocab_size, (rows, length + 1))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "segment_ids": torch.ones(rows, length).long()}
    batch["positions"] = torch.arange(length).expand(rows, -1)
    leaves = tree.map(lambda leaf: leaf.requires_grad_(), params)

    def run(kernel: str) -> Any:
        total, count = train.next_token_loss(leaves, batch, config=config, kernel=kernel)
        return torch.autograd.grad(total / count, tree.leaves(leaves))

    return {kernel: lambda kernel=kernel: run(kernel) for kernel in KERNELS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    give_back_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes, rows, length, contexts, steps = (QUICK, 2, 16, [8], 2) if args.quick else (SIZES, 4, 512, [128, 1024], 16)
    rounds = 1 if args.quick else args.rounds
    print(f"{args.threads} threads\n| dtype | what | ordinary ms | invariant ms | ratio | by CPU time |")
    print("|---|---|---|---|---|---|")
    for name in args.dtypes:
        dtype = getattr(torch, name)
        _, config = configs(sizes, max(length, *contexts) + TILE)
        params = tree.map(lambda leaf, dtype=dtype: leaf.to(dtype), P.init(config, seed=0))
        cells = {f"gradient of {rows} rows of {length}": (1, gradients(params, config, rows, length))}
        fast = P.packed(params) if dtype is torch.float32 else tree.map(torch.Tensor.detach, params)
        for batch in (1, 8):
            tokens = torch.randint(config.vocab_size, (steps, batch))
            for context in contexts:
                start = Start(torch.randint(config.vocab_size, (1, context)), batch, TILE, dtype)
                with torch.no_grad():
                    both = {kernel: turn(ours(fast, config, start, kernel=kernel), tokens) for kernel in KERNELS}
                cells[f"step, B {batch}, {context} cached tokens"] = (steps, both)
        for what, (count, both) in cells.items():
            auto, invariant = take_turns(both, rounds).values()
            times = f"{auto.wall / count * 1e3:.1f} | {invariant.wall / count * 1e3:.1f}"
            ratios = f"{invariant.wall / auto.wall:.2f} | {invariant.cpu / auto.cpu:.2f}"
            print(f"| {name} | {what} | {times} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()

"""Times attention over chosen keys, kernel="sparse", beside attention under a dense mask of the same choice.

    python benchmarks/sparse.py                 k = 2,048 of 4,096, 16,384 and 65,536 keys
    python benchmarks/sparse.py --quick         small sizes and one round, to check that everything runs

64 query heads share one head of keys and values of width 64, as chosen latents are shared; fp32, on the CPU. Queries
choose among all keys at random, so that neighbours share no more than chance gives. 1,024 queries are timed, since
both kernels take as long for each of them: times are of one query (one token). Each contender runs in a process of its
own, which reports CPU time and by how much the peak of its resident memory rose. The indexer is a contender apart: the
scores of 64 heads of width 128 over all keys and the choice of the best k, whose time grows with the number of keys.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from turns import peak_of

from fnmodels.inputs import Causal
from fnmodels.inputs.mask import build_mask
from fnmodels.ops.attention.choice import named_once
from fnmodels.ops.attention.select import attention
from fnmodels.ops.indexer import Indexer, choose, keys_of

HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, HIDDEN = 64, 64, 64, 128, 256
CONTENDERS = ("sparse", "dense", "indexer")


def attending(kernel: str, keys: int, count: int, queries: int, backward: bool) -> Callable[[], Any]:
    q, k, v = (torch.randn(1, *s) for s in ((queries, HEADS, WIDTH), (keys, 1, WIDTH), (keys, 1, WIDTH)))
    places = torch.cat([torch.rand(1, 64, keys).topk(count).indices for _ in range(0, queries, 64)], dim=1)[:, :queries]
    choice = named_once(places, torch.ones_like(places, dtype=torch.bool), keys)
    mask: Any = choice if kernel == "sparse" else choice.dense()
    inputs = [t.requires_grad_(backward) for t in (q, k, v)]

    def attended() -> Tensor:
        return attention(*inputs, mask, kernel="sparse" if kernel == "sparse" else "sdpa", scale=WIDTH**-0.5)

    def run() -> None:
        if backward:  # of an output that is held by what its gradient reads, and by nothing else
            torch.autograd.grad(attended().sum(), inputs)
        else:
            attended()

    return run


def indexing(keys: int, count: int, queries: int) -> Callable[[], Any]:
    """Choices of the last queries of a causal row."""
    sizes = {"q_b_proj": (INDEX_HEADS * INDEX_WIDTH, HIDDEN), "weights_proj": (INDEX_HEADS, HIDDEN)}
    weights = {name: torch.randn(size) * HIDDEN**-0.5 for name, size in sizes.items()}
    x, k = torch.randn(1, queries, HIDDEN), torch.randn(1, keys, INDEX_WIDTH)
    positions = torch.arange(keys)[None]
    mask = build_mask(Causal(), positions, torch.ones_like(positions)).select(slice(keys - queries, None), slice(None))
    indexer = Indexer(count, _unrotated)
    return lambda: choose(weights, x, x, k, positions, keys_of(mask), indexer)


def _unrotated(x: Tensor, _: Tensor) -> Tensor:
    return x


def measured(who: str, keys: int, count: int, queries: int, backward: bool, rounds: int) -> dict[str, float]:
    """CPU milliseconds of a query, the median of rounds, and the MiB by which the peak of memory rose."""
    torch.manual_seed(0)
    make = indexing(keys, count, queries) if who == "indexer" else attending(who, keys, count, queries, backward)
    risen, times = peak_of(make), []
    for _ in range(rounds):
        start = time.process_time()
        make()
        times.append(time.process_time() - start)
    return {"ms": statistics.median(times) / queries * 1e3, "mib": risen / 2**20}


def in_process(*args: Any) -> dict[str, float]:
    """What `measured` returns in a process of its own; in one that is forked if BENCHMARK_START says so, for tests."""
    if os.environ.get("BENCHMARK_START") == "fork":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(measured, args)
    command = [sys.executable, __file__, "--one", json.dumps(args)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def table(sizes: list[int], count: int, queries: int, rounds: int) -> None:
    print(f"| keys | pass | kernel | ms per token | x of dense | peak MiB | of dense |\n|{'---|' * 7}")

    def add(*cells: str) -> None:
        print(f"| {' | '.join(cells)} |", flush=True)

    for keys in sizes:
        for backward in (False, True):
            name = "forward + backward" if backward else "forward"
            of = {}
            for who in ("dense", "sparse"):
                if who == "sparse" or keys <= 4 * min(sizes):  # a dense mask of 65,536 keys takes minutes
                    of[who] = in_process(who, keys, count, queries, backward, rounds if who == "sparse" else 1)
            for who, found in of.items():
                time_ratio = f"{of['dense']['ms'] / found['ms']:.2f}" if "dense" in of else ""
                memory_ratio = f"{found['mib'] / of['dense']['mib']:.2f}" if "dense" in of else ""
                add(f"{keys:,}", name, who, f"{found['ms']:.3f}", time_ratio, f"{found['mib']:.0f}", memory_ratio)
        found = in_process("indexer", keys, count, min(queries, 256), False, 1)
        add(f"{keys:,}", "forward", "indexer: scores and choice", f"{found['ms']:.3f}", "", f"{found['mib']:.0f}", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, choices=[1], help="CPU time is of one thread")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(measured(*json.loads(args.one))))
        return
    sizes, count, queries = ([128, 256], 32, 64) if args.quick else ([4096, 16384, 65536], 2048, 1024)
    table(sizes, count, queries, 1 if args.quick else args.rounds)


if __name__ == "__main__":
    main()

"""Times attention over chosen keys, kernel="sparse", beside attention under a dense mask of the same choice.

    python benchmarks/sparse.py                 k = 2,048 of 4,096, 16,384 and 65,536 keys, and windows
    python benchmarks/sparse.py --part windows  the windows alone, or "keys"
    python benchmarks/sparse.py --quick         small sizes and one round, to check that everything runs

64 query heads share one head of keys and values of width 64, as chosen latents are shared; fp32, on the CPU. Queries
choose among all keys at random, so that neighbours share no more than chance gives. 1,024 queries are timed, since
both kernels take as long for each of them: times are of one query (one token). Each contender runs in a process of its
own, which reports CPU time and by how much the peak of its resident memory rose. The indexer is a contender apart: the
scores of 64 heads of width 128 over all keys and the choice of the best k, whose time grows with the number of keys.

Windows are DeepSeek V4's: 64 heads of width 512 with sinks read the last 128 tokens and, of windows of 4 tokens, 512
chosen at random, or all windows of 128 tokens, keys being their own values. The last 256 queries of a causal row are
timed, with the making of places or of a mask.
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

from fnmodels.inputs import Causal, Window
from fnmodels.inputs.mask import build_mask
from fnmodels.inputs.windows import Windows
from fnmodels.ops.attention.choice import named_once
from fnmodels.ops.attention.select import attention
from fnmodels.ops.attention.windows import WindowKeys
from fnmodels.ops.indexer import Indexer, choose, keys_of
from fnmodels.ops.indexers.tokens_and_windows import TokensAndWindows, windows_of

HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, HIDDEN = 64, 64, 64, 128, 256
WINDOW_WIDTH, NEAR, CHOSEN = 512, 128, 512  # of DeepSeek V4


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


def windowed(kernel: str, ratio: int, tokens: int, queries: int, backward: bool) -> Callable[[], Any]:
    """The last queries of a causal row; all windows of 128 tokens are read, of others as many as are chosen."""
    positions, last = torch.arange(tokens)[None], slice(tokens - queries, None)
    ends = torch.arange(ratio - 1, tokens, ratio)[None]
    ids, own = torch.ones_like(positions), positions[:, last]
    keys = WindowKeys(torch.zeros(1, ends.shape[1], 0), ends, torch.ones_like(ends))
    near = build_mask(Causal() & Window(NEAR), positions, ids).select(last, slice(None))
    ended = windows_of(keys, Windows(own, own, ids[:, last], ratio))
    choices = None
    if ratio < NEAR:
        visible = (tokens - queries) // ratio
        choices = torch.rand(1, queries, visible).topk(min(CHOSEN, visible)).indices * ratio + ratio - 1
    read, count = TokensAndWindows(near, ended, choices), tokens + ends.shape[1]
    q, k, sinks = (torch.randn(s) for s in ((1, queries, HEADS, WINDOW_WIDTH), (1, count, 1, WINDOW_WIDTH), (HEADS,)))
    inputs = [t.requires_grad_(backward) for t in (q, k, sinks)]

    def attended() -> Tensor:
        sparse = kernel == "sparse"
        mask, name = (read.places(), "sparse") if sparse else (read.dense(), "sdpa")
        return attention(q, k, k, mask, kernel=name, scale=WINDOW_WIDTH**-0.5, sinks=sinks)

    def run() -> None:
        if backward:
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
    kernel, _, ratio = who.partition(" ")
    if ratio:
        make = windowed(kernel, int(ratio), keys, queries, backward)
    else:
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


def add(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def add_pair(keys: int, name: str, of: dict[str, dict[str, float]]) -> None:
    """Rows of contenders beside the one called dense."""
    dense = next((found for who, found in of.items() if who.startswith("dense")), None)
    for who, found in of.items():
        time_ratio = "" if dense is None else f"{dense['ms'] / found['ms']:.2f}"
        memory_ratio = "" if dense is None else f"{found['mib'] / dense['mib']:.2f}"
        add(f"{keys:,}", name, who, f"{found['ms']:.3f}", time_ratio, f"{found['mib']:.0f}", memory_ratio)


PASSES = ((False, "forward"), (True, "forward + backward"))


def windows_table(sizes: list[int], queries: int, rounds: int) -> None:
    for keys in sizes:
        for ratio in (4, 128):
            for backward, name in PASSES:
                of = {}
                minutes = backward and keys > 4 * min(sizes)  # for a dense mask
                for kernel in ("sparse",) if minutes else ("dense", "sparse"):
                    given = (keys, 0, queries, backward, rounds if kernel == "sparse" else 1)
                    of[f"{kernel}, windows of {ratio}"] = in_process(f"{kernel} {ratio}", *given)
                add_pair(keys, name, of)


def keys_table(sizes: list[int], count: int, queries: int, rounds: int) -> None:
    for keys in sizes:
        for backward, name in PASSES:
            of = {}
            for who in ("dense", "sparse"):
                if who == "sparse" or keys <= 4 * min(sizes):  # a dense mask of 65,536 keys takes minutes
                    of[who] = in_process(who, keys, count, queries, backward, rounds if who == "sparse" else 1)
            add_pair(keys, name, of)
        found = in_process("indexer", keys, count, min(queries, 256), False, 1)
        add(f"{keys:,}", "forward", "indexer: scores and choice", f"{found['ms']:.3f}", "", f"{found['mib']:.0f}", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=["keys", "windows"], help="of the table; both without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, choices=[1], help="CPU time is of one thread")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(measured(*json.loads(args.one))))
        return
    rounds = 1 if args.quick else args.rounds
    add("keys", "pass", "kernel", "ms per token", "x of dense", "peak MiB", "of dense")
    add(*["---"] * 7)
    sizes, count, queries = ([128, 256], 32, 64) if args.quick else ([4096, 16384, 65536], 2048, 1024)
    if args.part != "windows":
        keys_table(sizes, count, queries, rounds)
    if args.part != "keys":
        windows_table([256] if args.quick else sizes, 16 if args.quick else 256, rounds)


if __name__ == "__main__":
    main()

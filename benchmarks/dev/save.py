"""Times saving: how long a background save delays a step, how long a full save takes, and how long its hash takes.

    python benchmarks/dev/save.py                   400 MB, five rounds
    python benchmarks/dev/save.py --size 4000       MB
    python benchmarks/dev/save.py --rounds 1 --size 4

All take turns within a round, so that a slow minute of the machine hits all of them; the report has medians and the
best. "plain copy" is the shortest possible delay of a step by a background save: one copy of the state into allocated
memory. `torch.save` is a save without flush, digest and rename. Hashes that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fnmodels import tree
from train import Saver, checkpoint

HASHES: dict[str, Callable[[Any], object]] = {
    "sha256": hashlib.sha256,
    "blake2b": hashlib.blake2b,
    "crc32": zlib.crc32,
}


def timed(times: dict[str, list[float]], name: str, function: Callable[[], object]) -> None:
    begin = time.perf_counter()
    function()
    times.setdefault(name, []).append(time.perf_counter() - begin)


def hashes() -> dict[str, Callable[[Any], object]]:
    found = dict(HASHES)
    for module, name in (("xxhash", "xxh3_128"), ("blake3", "blake3")):
        if importlib.util.find_spec(module):
            found[name] = getattr(importlib.import_module(module), name)
    return found


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    leaves = 20
    state = {"params": [torch.randn(megabytes * 250_000 // leaves) for _ in range(leaves)]}
    other = tree.map(torch.empty_like, state)
    raw = memoryview(torch.cat(state["params"]).numpy()).cast("B")
    times: dict[str, list[float]] = {}
    with Saver(lambda state, step: checkpoint.save(folder / "thread", step, state, keep=1)) as saver:
        saver.save(state, 0)  # its buffer is allocated by the first save
        saver.wait()
        for step in range(1, rounds + 1):
            timed(times, "plain copy", lambda: tree.map(lambda into, leaf: into.copy_(leaf), other, state))
            timed(times, "held up by a save in a thread", lambda step=step: saver.save(state, step))
            timed(times, "until that is on disk", saver.wait)
            timed(times, "save", lambda step=step: checkpoint.save(folder / "here", step, state, keep=1))
            timed(times, "latest, which verifies", lambda: checkpoint.latest(folder / "here"))
            found = checkpoint.Checkpoint(folder / "here" / f"step-{step:08d}", step, {})
            timed(times, "load", lambda found=found: checkpoint.load(found, state))
            timed(times, "torch.save", lambda: torch.save(state, folder / "state.pt"))
            (folder / "state.pt").unlink()  # its unwritten pages must not slow the next save
            for name, function in hashes().items():
                timed(times, name, lambda function=function: function(raw))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=400, metavar="MB", help="of the state (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the system's temporary one)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        times = measure(Path(folder), arguments.size, arguments.rounds)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.size} MB, {arguments.rounds} rounds\n")
    print("| | median | best | GB/s at best |\n|---|---:|---:|---:|")
    for name, taken in times.items():
        rate = arguments.size / 1000 / min(taken)
        print(f"| {name} | {1000 * statistics.median(taken):,.0f} ms | {1000 * min(taken):,.0f} ms | {rate:.1f} |")


if __name__ == "__main__":
    main()

"""Measures how several processes of one machine read a checkpoint, each keeping its shard.

    python benchmarks/dev/load_parts.py                      2 GB of bf16 in five files, four processes, three rounds
    python benchmarks/dev/load_parts.py --checkpoint DIR     an existing checkpoint
    python benchmarks/dev/load_parts.py --quick              2 MB, two processes, to check that everything runs

Contenders take turns within a round, and in starting it; all processes start each one together. The report has medians
over rounds: the time of the slowest process, CPU time of all, bytes requested by all (pieces read, ranges of mapped
files), bytes that the system counts as read by all (`rchar` of /proc/self/io, which excludes pages of mapped files),
each also as a multiple of the files' size, and the largest memory of one process. Files are in the page cache.

    rows              params.load_pretrained(plan=) with a plan that shards each leaf by rows, into owned memory
    rows, mapped      the same in the mapped files, and then every byte is read
    tensor parallel   with a plan that shards heads and MLPs: a third of the leaves by columns
    whole             each process reads everything, and keeps its rows
    get_slice         safetensors' own way to rows, cloned: a slice is mapped
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import above  # noqa: F401
import torch
import torch.distributed as dist
from contenders import memory, reset_peak
from load import make
from ranks import together
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fnmodels
import params as P
from fnmodels import tree
from train.comm.dtensor import local_tree
from train.parallel.tensor.api import tensor_axes

AXIS = "ranks"
Flat = dict[str, Tensor]
Reader = Callable[[], tuple[Flat, int]]


def readers(folder: Path) -> dict[str, Reader]:
    """{contender: () -> (the shards of this process, bytes requested)}."""
    from safetensors import safe_open

    config = P.load_config(folder)
    family = fnmodels.family_of(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))
    rows = P.plan(family.spec(config), P.Rules(spread=AXIS), mesh)
    tensor = P.plan(family.spec(config), P.Rules(tensor_axes(config, AXIS)), mesh)
    here = {path: how.local_box() for path, how in tree.flatten(rows).items()}
    names = family.hf_names(config)

    def planned(plan: Any, copy: bool) -> tuple[Flat, int]:
        reports: list[P.LoadReport] = []
        _, params = P.load_pretrained(folder, plan=plan, copy=copy, report=reports.append)
        flat = tree.flatten(local_tree(params))
        if not copy:
            touch(flat)
        return flat, reports[0].read + reports[0].mapped

    def whole() -> tuple[Flat, int]:
        reports: list[P.LoadReport] = []
        flat = tree.flatten(P.load_pretrained(folder, copy=True, report=reports.append)[1])
        return {path: leaf[here[path]].clone() for path, leaf in flat.items()}, reports[0].read

    def get_slice() -> tuple[Flat, int]:
        flat = {}
        paths = {name: path for path, name in names.items()}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    flat[paths[name]] = opened.get_slice(name)[here[paths[name]]].clone()
        return flat, sum(leaf.nbytes for leaf in flat.values())

    return {
        "rows": lambda: planned(rows, True),
        "rows, mapped": lambda: planned(rows, False),
        "tensor parallel": lambda: planned(tensor, True),
        "whole": whole,
        "get_slice": get_slice,
    }


def touch(flat: Flat) -> int:
    """Reads every byte; the sum tells whether two contenders read the same."""
    return sum(int(leaf.contiguous().view(-1).view(torch.int16).sum()) for leaf in flat.values())


def rchar() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])


def take_turns(folder: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """In each process: the cost of every contender in every round, after one warm-up round."""
    contenders = readers(Path(folder))
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    sums: dict[str, int] = {}
    for turn in range(rounds + 1):
        order = list(contenders)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            gc.collect()
            reset_peak()
            resident = memory("VmRSS")
            dist.barrier()
            read, cpu, wall = rchar(), time.process_time(), time.perf_counter()
            flat, asked = contenders[name]()
            one = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "asked": asked}
            one |= {"system": rchar() - read, "peak": memory("VmHWM") - resident}
            if turn:
                taken[name].append(one)
            else:
                sums[name] = touch(flat)
            del flat
    same = {name: sums[name] for name in sums if name != "tensor parallel"}
    assert len(set(same.values())) == 1, f"the contenders read different bits: {same}"
    return taken


def report(found: list[dict[str, list[dict[str, float]]]], size: int) -> None:
    print("| reader | time | processor | asked for | of the files | counted | of the files | memory |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in found[0]:

        def over(what: str, join: Callable[[list[float]], float], name: str = name) -> float:
            rounds = zip(*(process[name] for process in found), strict=True)
            return statistics.median(join([one[what] for one in processes]) for processes in rounds)

        cells = [f"{over('seconds', max):.2f} s", f"{over('cpu', sum):.2f} s"]
        for what in ("asked", "system"):
            cells += [f"{over(what, sum) / 1e6:,.0f} MB", f"{over(what, sum) / size:.3f}x"]
        print(f"| {name} | {' | '.join(cells)} | {over('peak', max) / 1e6:,.0f} MB |")
    rows = sum(process["rows"][0]["system"] for process in found) / size
    print(f"\nrows: {rows:.4f} x the files in sum (target 1.1), {'met' if rows <= 1.1 else 'NOT met'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a folder of a Llama; else one is made")
    parser.add_argument("--size", type=int, default=2000, help="of the one that is made, MB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.ranks, arguments.rounds = 2, 2, 1
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.checkpoint or Path(name)
        if arguments.checkpoint is None:
            make(folder, arguments.size)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{size / 1e6:,.0f} MB, {arguments.ranks} processes of {arguments.threads} threads")
        report(together(arguments.ranks, take_turns, str(folder), arguments.rounds, threads=arguments.threads), size)


if __name__ == "__main__":
    main()

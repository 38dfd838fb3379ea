"""Compares the step time of `train.simulate` with real steps on meshes of processes on this CPU.

    python benchmarks/dev/simulate.py                  the 26M Llama of train_step.py, over the meshes below
    python benchmarks/dev/simulate.py --quick          a tiny model, one mesh of two processes, to check that it runs

The machine is measured in all processes at once, as they share the memory's bandwidth: products, attention, elementwise
operations, the cost of an operation, and a link by all-gathers of two sizes. Nothing else is fitted. Processes that are
more than the cores share these, during the measurement too.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from typing import Any

import above  # noqa: F401
import torch
import torch.distributed as dist
from contenders import our_batch, our_llama
from ranks import together
from train_step import CONFIG, draw

import params as P
import train
from fnmodels import llama, tree
from train.parallel import Mesh, Strategy
from train.parallel.pipeline.stages import init_stage, stage_plan
from train.parallel.placement import rules_of
from train.simulate import Link, Work, measured, step_time

TINY = {
    "vocab_size": 256,
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
    "sequence": 32,
}
MESHES = ("dp=1", "dp=2", "fsdp=2", "tp=2", "pp=2", "cp=2", "fsdp=2,tp=2", "pp=2,fsdp=2", "fsdp=4", "fsdp=4,tp=2")


def link_between() -> Link:
    """Latency and bandwidth of all-gathers: the time of a small one, and what more bytes take."""

    def took(size: int) -> float:
        own, ranks = torch.zeros(size), dist.get_world_size()
        into, times = [torch.zeros(size) for _ in range(ranks)], []
        for _ in range(6):
            dist.barrier()
            start = time.perf_counter()
            dist.all_gather(into, own)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    ranks, wide = dist.get_world_size(), 1 << 20
    latency = took(16)
    return Link(4 * wide * (ranks - 1) / max(took(wide) - latency, 1e-6), latency)


def real_and_simulated(config: dict[str, Any], text: str, microbatches: int, rounds: int) -> dict[str, Any]:
    """Seconds of this process's steps, and those of the simulation with what it measures."""
    mesh, drawn = Mesh.parse(text), draw(config, 0)
    ours, weights = our_llama(config, {name: leaf for name, leaf in drawn.items() if "." in name})
    devices, loss = mesh.device_mesh("cpu"), functools.partial(train.next_token_loss, config=ours)
    batch, optimizer = our_batch({name: drawn[name] for name in ("tokens", "labels")}), train.adamw(1e-3)
    plan, strategy = P.plan(llama.spec(ours), rules_of(mesh, ours), devices), Strategy(schedule="1F1B")
    if mesh.pp > 1:
        params = init_stage(ours, 0, stage_plan(plan, ours, devices, strategy))
    elif mesh.world > 1:
        params = P.init(ours, 0, plan=plan)
    else:
        params = weights
    how: Any = {"mesh": mesh, "strategy": strategy} if mesh.world > 1 else {}
    step = train.make_step(loss, optimizer, accumulate=microbatches, **how)
    state, times = train.init_state(params, optimizer), []
    for _ in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        state, metrics = step(state, batch)
        float(metrics["loss"])
        times.append(time.perf_counter() - start)
    dist.barrier()
    machine = measured(link_between() if mesh.world > 1 else None)
    work = Work(config["batch"], config["sequence"], microbatches, dtype=torch.float32)
    time_of = step_time(ours, mesh, work, machine)
    return {"real": times[2:], "simulated": time_of.seconds, "parameters": sum(x.numel() for x in tree.leaves(weights))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    config = {**CONFIG, **TINY, "sequence": 32} if arguments.quick else CONFIG
    meshes, rounds = (("fsdp=2",), 1) if arguments.quick else (arguments.meshes, arguments.rounds)
    print(f"{config['batch']} rows of {config['sequence']} tokens, fp32, {os.cpu_count()} cores")
    print("| mesh | a step | simulated | ratio |\n|---|---:|---:|---:|")
    for text in meshes:
        mesh = Mesh.parse(text)
        parts = 4 if mesh.pp > 1 else 1
        found = together(mesh.world, real_and_simulated, config, text, parts, rounds, threads=arguments.threads)
        real = statistics.median(max(times) for times in zip(*(one["real"] for one in found), strict=True))
        simulated = max(one["simulated"] for one in found)
        print(f"| {text} | {real:.3f} s | {simulated:.3f} s | {simulated / real:.2f}x |", flush=True)


if __name__ == "__main__":
    main()

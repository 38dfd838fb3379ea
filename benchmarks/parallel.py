"""Measures the cost of training over a mesh: gathered layers, and FSDP2 around the same functions and transformers.

    python benchmarks/parallel.py                      the 26M Llama of train_step.py, in one process and in two
    python benchmarks/parallel.py --gather bfloat16    parameters sent and used in bf16, gradients summed in fp32
    python benchmarks/parallel.py --quick              a tiny model, one round, to check that everything runs

For each number of processes all contenders share the processes, start each step together and take turns within a round
and in starting it. All start from the same weights and take the same batch, half of it each in two processes; losses
of the first two steps must agree. The report has medians over timed steps: wall time of the slowest process, and CPU
time of all of them, which a busy machine disturbs less.

    plain               train.make_step; in two processes each with its half of the rows, without communication: a bound
    functional          train.make_step(mesh=Mesh(fsdp=n)): layers are gathered where they run
    wrapper             train.parallel.fsdp2: the same functions, fully_shard of a thin module per layer
    transformers FSDP2  fully_shard of each decoder layer of transformers' Llama, and of the rest
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contenders import BETAS, DECAY, EPS, LR, our_batch, our_llama, torch_step, transformers_llama
from ranks import together
from train_step import CONFIG, draw

import params as P
import train
from fnmodels import llama, tree
from train.comm.collectives import summed
from train.parallel import Mesh, Strategy
from train.parallel.batch_shards import own_rows
from train.parallel.fsdp2 import Model, shard
from train.parallel.placement import rules_of

TINY = {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128}
NAMES = ("plain", "functional", "wrapper", "transformers FSDP2")
Step = Callable[[], float]


def stepping(take: Any, state: train.State, batch: Any) -> Step:
    """A step that keeps its State for the next one."""
    held = [state]

    def step() -> float:
        held[0], metrics = take(held[0], batch)
        return float(metrics["loss"])

    return step


def steps(config: dict[str, Any], gather: str | None) -> dict[str, Step]:
    """{contender: one step of this process, and its loss}."""
    drawn = draw(config, 0)
    flat = {name: leaf for name, leaf in drawn.items() if "." in name}
    ours, weights = our_llama(config, flat)
    mesh, dtype = Mesh(fsdp=dist.get_world_size()), getattr(torch, gather) if gather else None
    devices, batch = mesh.device_mesh("cpu"), our_batch({name: drawn[name] for name in ("tokens", "labels")})
    rows = tree.map(lambda x: x.contiguous(), own_rows(batch, devices))
    optimizer = train.adamw(LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    loss_fn = functools.partial(train.next_token_loss, config=ours)

    def cast_loss(params: Any, batch: Any, **more: Any) -> Any:
        return loss_fn(tree.map(lambda leaf: leaf.to(dtype), params) if dtype else params, batch, **more)

    spread = P.plan(llama.spec(ours), rules_of(mesh, ours), devices)
    parts = tree.map(lambda how, leaf: how.distribute(leaf[how.local_box()].clone()), spread, weights)
    sharded = train.make_step(loss_fn, optimizer, mesh=mesh, strategy=Strategy(gather_dtype=dtype))
    model = Model(tree.map(torch.clone, weights), llama.spec(ours))
    shard(model, devices, dtype=dtype)
    world = dist.group.WORLD
    assert world is not None

    def sums_of_modules() -> torch.Tensor:
        total, count = model(loss_fn, rows)
        return total / summed(count, world)

    wrapped = torch_step(model, sums_of_modules)

    def wrapper() -> float:
        share = torch.tensor(wrapped())
        return float(summed(share, world))

    theirs = hugging_face(config, flat, devices["fsdp"], dtype)
    forward = functools.partial(theirs, input_ids=rows["tokens"], labels=rows["tokens"], use_cache=False)
    return {
        "plain": stepping(train.make_step(cast_loss, optimizer), train.init_state(weights, optimizer), rows),
        "functional": stepping(sharded, train.init_state(parts, optimizer), batch),
        "wrapper": wrapper,
        "transformers FSDP2": torch_step(theirs, lambda: forward().loss),
    }


def hugging_face(config: dict[str, Any], flat: dict[str, Any], mesh: Any, dtype: torch.dtype | None) -> Any:
    """transformers' Llama, sharded in the usual way."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = transformers_llama(config, flat).train()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def take_turns(config: dict[str, Any], gather: str | None, rounds: int, number: int) -> dict[str, Any]:
    return in_turns(steps(config, gather), rounds, number)


def in_turns(contenders: dict[str, Step], rounds: int, number: int) -> dict[str, Any]:
    """In each process: {contender: {losses of the first steps, seconds, processor seconds}}."""
    taken: dict[str, Any] = {n: {"losses": [one(), one()], "wall": [], "cpu": []} for n, one in contenders.items()}
    gc.collect()
    gc.freeze()
    order = list(contenders)
    for turn in range(rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            for _ in range(number):
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                contenders[name]()
                taken[name]["wall"].append(time.perf_counter() - wall)
                taken[name]["cpu"].append(time.process_time() - cpu)
    return taken


def check(found: list[dict[str, Any]], tolerance: float) -> None:
    """SystemExit if the contenders' losses, averaged over processes, differ; those of "plain" cover its own rows."""
    losses = {
        name: [statistics.mean(process[name]["losses"][i] for process in found) for i in (0, 1)] for name in found[0]
    }
    print("  losses: " + ", ".join(f"{name} {one[0]:.6f} {one[1]:.6f}" for name, one in losses.items()))
    for name, one in losses.items():
        alone = name == "plain" and len(found) > 1  # each process trains on its own half
        off = max(abs(a / b - 1) for a, b in list(zip(one, losses["transformers FSDP2"], strict=True))[: 2 - alone])
        if not off < tolerance:
            raise SystemExit(f"{name} and transformers FSDP2 differ in their losses by {off:.1e}.")


def report(found: list[dict[str, Any]], tokens: int) -> None:
    def median(name: str, what: str, join: Callable[[list[float]], float]) -> float:
        rounds = zip(*(process[name][what] for process in found), strict=True)
        return statistics.median(join(list(one)) for one in rounds)

    print("| | tokens/s | a step | of plain | of FSDP2 | processor | of plain | of FSDP2 |")
    print("|---|" + "---:|" * 7)
    for name in NAMES:
        cells = [f"{tokens / median(name, 'wall', max):,.0f}"]
        for what, join in (("wall", max), ("cpu", sum)):
            own, plain, theirs = (median(n, what, join) for n in (name, "plain", "transformers FSDP2"))
            cells += [f"{own:.3f} s", f"{own / plain:.2f}x", f"{own / theirs:.2f}x"]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--gather", choices=["bfloat16"], help="dtype in which parameters are sent and used")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="timed steps in one turn")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    config = {**CONFIG, **TINY, "sequence": 32} if arguments.quick else CONFIG
    if arguments.quick:
        arguments.rounds = arguments.steps = 1
    for world in arguments.worlds:
        print(f"{world} processes of {arguments.threads} threads, {config['batch']} x {config['sequence']} tokens")
        how = (config, arguments.gather, arguments.rounds, arguments.steps)
        found = together(world, take_turns, *how, threads=arguments.threads)
        check(found, 2e-2 if arguments.gather else 1e-5)
        report(found, config["batch"] * config["sequence"])


if __name__ == "__main__":
    main()

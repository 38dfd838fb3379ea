"""Measures time and memory of this engine and of verl's FSDP2 engine, both driven by verl's TrainingWorker.

    VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=train.integrations.verl .venv-verl/bin/python benchmarks/dev/engine.py
    ... benchmarks/dev/engine.py --quick          small sizes, one round, to check that everything runs

A Llama of 27M parameters (fp32, 2 threads, one process) scores and trains on 8 packed sequences. Both engines get the
same batches in turn; nothing is timed before log-probabilities are within 5e-6 and losses within 5e-6 of each other.
Peaks are of resident memory, above that before the call: parameters and moments are in it before.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import above  # noqa: F401
import torch
from turns import give_back_memory, take_turns

from fnmodels import tree
from train.engine import Engine
from train.optim.adamw import adamw

TARGETS = {"infer": 0.8, "train": 0.9, "peak": 0.6}  # ours over verl's
LENGTHS = ((60, 140), (30, 220), (90, 70), (20, 250), (64, 128), (40, 90), (70, 160), (54, 90))
SIZES = {"vocab_size": 16384, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 512, "initializer_range": 0.02}


def flow_of(quick: bool) -> Any:
    """tests/support/verl_flow.py with the sizes of this benchmark; verl installs a package `tests` of its own."""
    path = Path(__file__).parents[2] / "tests/support/verl_flow.py"
    spec = importlib.util.spec_from_file_location("verl_flow", path)
    assert spec is not None and spec.loader is not None
    flow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(flow)
    if not quick:
        flow.SIZES, flow.LENGTHS = SIZES, LENGTHS
    return flow


def workers(flow: Any, folder: Path) -> dict[str, Any]:
    """{name: TrainingWorker} of both engines, with the PPO loss."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    flow.write_model("llama", folder)
    attention = {"model": {"override_config": {"attn_implementation": "sdpa"}}}
    made = {}
    for name, strategy, device in (("fnmodels", "fnmodels", "cpu"), ("verl fsdp2", "fsdp2", "cuda")):
        os.environ["VERL_ENGINE_DEVICE"] = device  # verl registers its own engine for that name
        made[name] = flow.worker(folder, {"strategy": strategy, **attention}, "language_model")
        actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, ppo_mini_batch_size=8)
        made[name].set_loss_fn(functools.partial(ppo_loss, actor))
    return made


def infer(flow: Any, worker: Any) -> Any:
    return worker.infer_batch(
        flow.batch(0, 1, sft=False, calculate_entropy=True, compute_loss=False, max_token_len_per_gpu=2048)
    )


def train(flow: Any, worker: Any, *, entropy: bool) -> Any:
    return worker.train_batch(
        flow.batch(0, 1, sft=False, calculate_entropy=entropy, max_token_len_per_gpu=2048, update_lr_scheduler=True)
    )


def check(flow: Any, made: dict[str, Any]) -> tuple[float, float]:
    """The largest differences of log-probabilities, and of losses over 3 steps. SystemExit beyond 5e-6."""
    ours, theirs = (flow.jagged(infer(flow, worker), "log_probs") for worker in made.values())
    scores = max(float((a[:-1] - b[:-1]).abs().max()) for a, b in zip(ours, theirs, strict=True))
    losses = 0.0
    for step in range(3):
        one, other = (flow.numbers(train(flow, worker, entropy=step == 0))["loss"] for worker in made.values())
        losses = max(losses, abs(one - other))
    if not max(scores, losses) <= 5e-6:
        raise SystemExit(f"The engines differ: log-probabilities by {scores:.1e}, losses by {losses:.1e}.")
    return scores, losses


def offloaded(other: Any) -> str:
    """The bytes of parameters and optimizer state before and while they are offloaded, and the times of both moves."""
    engine = Engine(other.config, other.params, adamw(1e-4))  # of copies, which own their memory
    leaves = tree.leaves(engine.state)

    def held() -> float:
        return sum(leaf.untyped_storage().nbytes() for leaf in leaves) / 2**20

    before, begin = held(), time.perf_counter()
    engine.offload()
    during, middle = held(), time.perf_counter()
    engine.onload()
    end = time.perf_counter()
    return f"{before:,.0f} MiB -> {during:,.0f} MiB in {middle - begin:.2f} s, back in {end - middle:.2f} s"


def main() -> None:
    give_back_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round")
    given = parser.parse_args()
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29531"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    import verl  # noqa: F401 - registers the platform

    torch.set_num_threads(given.threads)
    flow = flow_of(given.quick)
    with tempfile.TemporaryDirectory() as folder:
        made = workers(flow, Path(folder) / "model")
    torch.set_num_threads(given.threads)  # verl's workers set their own
    scores, losses = check(flow, made)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {sum(map(sum, flow.LENGTHS))} tokens")
    print(f"log-probabilities differ by {scores:.1e}, losses of 3 steps by {losses:.1e}")
    parts: dict[str, Callable[[Any], Any]] = {
        "infer, with entropy": functools.partial(infer, flow),
        "train": functools.partial(train, flow, entropy=False),
        "train, with entropy": functools.partial(train, flow, entropy=True),
    }
    for title, run in parts.items():
        taken = take_turns(
            {name: functools.partial(run, worker) for name, worker in made.items()}, 1 if given.quick else given.rounds
        )
        ours, peer = taken["fnmodels"], taken["verl fsdp2"]
        print(f"\n{title}")
        for name, one in taken.items():
            print(f"  {name:12s}{one.wall:8.3f} s{one.cpu:9.3f} s of CPU{one.peak / 2**20:9,.0f} MiB")
        target = TARGETS["infer" if title.startswith("infer") else "train"]
        print(
            f"  time {ours.wall / peer.wall:.2f} x, CPU {ours.cpu / peer.cpu:.2f} x (target {target}), "
            f"peak {ours.peak / max(peer.peak, 1):.2f} x (target {TARGETS['peak']})",
            flush=True,
        )
    print(f"\noffload of parameters and optimizer state: {offloaded(made['fnmodels'].engine.engine)}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Times recurrent layers over context parallelism: the CPU time and memory of a rank, for cp = 1, 2 and 4.

    python benchmarks/dev/recurrent_cp.py                rows of 4,096 and 32,768 tokens
    python benchmarks/dev/recurrent_cp.py --quick        short rows and one round, to check that everything runs
    python benchmarks/dev/recurrent_cp.py --write        also writes the table into dev/results/recurrent_cp.md

gdn   two Gated DeltaNet layers of Qwen3.5's form: width 128, 4 heads of 32
kda   two layers of Kimi Delta Attention, whose decay differs between the channels of a head: the same sizes
ssd   two layers of Mamba 2: width 128, 8 heads of 32, state 32

A pass is the loss and all gradients of one row of one document, in fp32, in gloo processes of one thread. A rank holds
a contiguous piece of the row; the state before it is a product of matrices from one all-gather, so that all ranks
compute at once (`train.parallel.context.state`). Times are CPU time of the slowest rank, without waiting for messages.
Before a row is timed, its loss must be that of one process.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import above  # noqa: F401
import torch
import torch.distributed as dist
from ranks import together
from turns import peak_of

import params as P
import train
from fnmodels import kimi_linear, mamba2, qwen3_next, tree
from train.comm.collectives import summed
from train.parallel.context.api import context_kernel, shard_batch

RESULTS = Path(__file__).parent / "results" / "recurrent_cp.md"
COMMON: dict[str, Any] = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2}


def config_of(layer: str) -> Any:
    if layer == "ssd":
        sizes = {"num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 1, "expand": 2}
        return mamba2.Config.from_hf({**COMMON, **sizes, "model_type": "mamba2"})
    if layer == "kda":
        inner = {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1, 2]}
        latents = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        experts = {"num_experts": 2, "num_experts_per_token": 1, "num_shared_experts": 1, "moe_intermediate_size": 64}
        rest = {"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "mla_use_nope": True}
        rest |= {"first_k_dense_replace": 2, "linear_attn_config": {**inner, "full_attn_layers": []}}
        return kimi_linear.Config.from_hf({**COMMON, **latents, **experts, **rest, "model_type": "kimi_linear"})
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    widths = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32, "intermediate_size": 256}
    layers = {"layer_types": ["linear_attention"] * 2, "model_type": "qwen3_5_text"}
    return qwen3_next.Config.from_hf({**COMMON, **heads, **widths, **layers})


def measured(layer: str, length: int, rounds: int) -> dict[str, float]:
    """Of this rank: the loss of the full row, CPU milliseconds of a pass, MiB of its peak above its start."""
    config, world = config_of(layer), dist.get_world_size()
    leaves = tree.map(lambda leaf: leaf.requires_grad_(leaf.is_floating_point()), P.init(config, seed=0))
    learning = [leaf for leaf in tree.leaves(leaves) if leaf.requires_grad]
    tokens = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": torch.arange(length)[None]}
    batch["segment_ids"] = torch.ones(1, length, dtype=torch.int64)
    group: Any = dist.group.WORLD
    kernel = context_kernel("gather", group) if world > 1 else "auto"
    part = shard_batch(batch, dist.get_rank(), world, config=config, order="auto")
    losses, times = [], []

    def run() -> None:
        total, _ = train.next_token_loss(leaves, part, config=config, kernel=kernel)
        torch.autograd.grad(total, learning, allow_unused=True)
        losses.append(total.detach())

    risen = peak_of(run)
    for _ in range(rounds):
        dist.barrier()
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    loss = float(summed(losses[0], group)) / length
    return {"loss": loss, "ms": statistics.median(times) * 1e3, "mib": risen / 2**20}


def table(lengths: list[int], rounds: int, threads: int) -> list[str]:
    lines = ["| layers | S | cp | CPU ms of a rank | x of one process | peak MiB of a rank | of one process |"]
    lines.append(f"|{'---|' * 7}")
    print("\n".join(lines))
    for layer in ("gdn", "kda", "ssd"):
        for length in lengths:
            alone: dict[str, float] = {}
            for world in (1, 2, 4):
                ranks = together(world, measured, layer, length, rounds, threads=threads)
                found = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
                alone = alone or found
                if abs(found["loss"] - alone["loss"]) > 1e-4:
                    raise AssertionError(
                        f"The loss over cp={world} is {found['loss']}, in one process {alone['loss']}."
                    )
                times, sizes = alone["ms"] / found["ms"], found["mib"] / alone["mib"]
                cells = (layer, f"{length:,}", str(world), f"{found['ms']:,.0f}", f"{times:.2f}")
                cells += (f"{found['mib']:.0f}", f"{sizes:.2f}")
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    return lines


def write(lines: list[str]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    RESULTS.write_text(
        "# Recurrent layers over context parallelism\n\n"
        f"{datetime.date.today()}, commit {commit.strip()}, torch {torch.__version__}, gloo, fp32:\n\n"
        "    python benchmarks/dev/recurrent_cp.py --write\n\n"
        "`benchmarks/dev/recurrent_cp.py` says what is computed. Times are CPU time of the slowest rank, of one\n"
        "thread each; waiting is left out.\n\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    lines = table([64] if args.quick else [4096, 32768], 1 if args.quick else args.rounds, args.threads)
    if args.write:
        write(lines)


if __name__ == "__main__":
    main()

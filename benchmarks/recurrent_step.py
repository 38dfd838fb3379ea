"""Times a training step of a small Qwen3.5 (three layers of Gated DeltaNet to one of attention) beside transformers.

    python benchmarks/recurrent_step.py             25M parameters, 2 rows of 512 tokens, fp32 and bf16
    python benchmarks/recurrent_step.py --compile   also with compiled blocks
    python benchmarks/recurrent_step.py --quick     a tiny model and one round, to check that everything runs

The step is forward, backward and AdamW, from the same weights; the first losses must agree. Contenders take turns; the
report has medians of tokens per second and of the peak of memory above the start of a step.
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from turns import give_back_memory, take_turns

import params as P
import train

# Qwen3.5-0.8B at 5/16 of its width and half its depth.
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 320,
    "intermediate_size": 1120,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 5,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of the first loss, relative


def contenders(
    dtype: torch.dtype, sizes: dict[str, Any], batch: tuple[int, int], compiled: bool
) -> dict[str, Callable[[], float]]:
    """{name: a training step that returns the loss before it}."""
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    net = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, use_cache=False, attn_implementation="sdpa")).to(dtype).train()
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        config, start = P.load_pretrained(folder, dtype=dtype, copy=True)
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, {dtype}, rows {batch}")
    tokens = torch.randint(sizes["vocab_size"], batch)
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -100)), dim=1)
    given = {"tokens": tokens, "positions": torch.arange(batch[1]).expand(batch)}
    given |= {"segment_ids": torch.ones_like(tokens), "labels": labels}
    optimizer = train.adamw(1e-4, weight_decay=0.0)
    loss = functools.partial(train.next_token_loss, config=config)

    def ours(compile: str) -> Callable[[], float]:
        run, held = train.make_step(loss, optimizer, compile=compile), [train.init_state(start, optimizer)]

        def step() -> float:
            held[0], metrics = run(held[0], given)
            return float(metrics["loss"])

        return step

    fused = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def theirs() -> float:
        logits = net(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        fused.zero_grad()
        loss.backward()
        fused.step()
        return float(loss.detach())

    blocks = {"fnmodels block-compiled": ours("block")} if compiled else {}
    return {"fnmodels": ours("none"), **blocks, "transformers": theirs}


def first_step(name: str, run: Callable[[], float]) -> float:
    """The loss of the first step, which compiles; prints its seconds."""
    begin = time.perf_counter()
    loss = run()
    print(f"{name}: first step {time.perf_counter() - begin:.1f} s", flush=True)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE))
    args = parser.parse_args()
    give_back_memory()
    torch.set_num_threads(args.threads)
    sizes, batch, rounds = MODEL, (2, 512), args.rounds
    if args.quick:
        small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "full_attention_interval": 2}
        sizes, batch, rounds = MODEL | small, (1, 80), 1
    for dtype in args.dtypes:
        runs = contenders(getattr(torch, dtype), sizes, batch, args.compile)
        first = {name: first_step(name, run) for name, run in runs.items()}
        same = all(math.isclose(loss, first["transformers"], rel_tol=TOLERANCE[dtype]) for loss in first.values())
        assert same, f"The first losses differ: {first}."
        taken = take_turns(runs, rounds)
        base = taken["transformers"]
        print("| dtype | who | tokens/s | x of transformers | by CPU time | peak MiB | of transformers' |")
        print("|---|---|---|---|---|---|---|")
        for name, one in taken.items():
            print(
                f"| {dtype} | {name} | {math.prod(batch) / one.wall:,.0f} | {base.wall / one.wall:.2f} | "
                f"{base.cpu / one.cpu:.2f} | {one.peak / 2**20:,.0f} | {one.peak / max(base.peak, 1):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

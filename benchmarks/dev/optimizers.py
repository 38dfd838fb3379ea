"""Times one optimizer step over 100M parameters against torch's fused AdamW.

    python benchmarks/dev/optimizers.py                 fp32, then bf16
    python benchmarks/dev/optimizers.py --quick         a small model and one round, to check that everything runs
    python benchmarks/dev/optimizers.py --dtype float32 --contenders "in place"

All update copies of the same Llama with the same gradients, and must agree before anything is timed. Contenders take
turns and keep the memory that they free, as `python -m train` does; the report has medians of wall and of CPU time.
"pure" makes new parameters and state, as inplace=False does; "master" and "stochastic" are the two ways of keeping
small updates of bf16 parameters, with moments in fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import above  # noqa: F401
import torch
from torch import Tensor
from turns import take_turns

import params as P
import train
from fnmodels import llama, tree

CONFIG = llama.Config(
    vocab_size=32768,
    hidden_size=640,
    intermediate_size=1728,
    num_hidden_layers=18,
    num_attention_heads=10,
    num_key_value_heads=5,
    tie_word_embeddings=True,
)
SMALL = llama.Config(512, 64, 128, 2, 4, 2, tie_word_embeddings=True)
HOW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TARGET = 1.1
TORCH = "torch fused"


def build(config: llama.Config, dtype: torch.dtype, names: list[str]) -> dict[str, tuple[Callable[[], Any], Any]]:
    """name -> (one step, its parameters in the order of the spec)."""
    start = P.init(config, 0, dtype=dtype)
    draws = torch.Generator().manual_seed(1)
    grads = tree.map(lambda p: torch.randn(p.shape, generator=draws).to(dtype) * 1e-2, start)

    def theirs() -> tuple[Callable[[], Any], Any]:
        leaves = [p.clone().requires_grad_() for p in tree.leaves(start)]
        optimizer = torch.optim.AdamW(leaves, lr=1e-3, fused=True, **HOW)
        for leaf, grad in zip(leaves, tree.leaves(grads), strict=True):
            leaf.grad = grad
        return optimizer.step, [leaf.detach() for leaf in leaves]

    def ours(wrap: Callable[[train.Optimizer], train.Optimizer]) -> tuple[Callable[[], Any], Any]:
        optimizer = wrap(train.adamw(1e-3, **HOW))
        state = train.init_state(start, optimizer)
        assert optimizer.bind is not None
        apply_ = optimizer.apply_
        return lambda: apply_(grads, state.opt_state, state.params), tree.leaves(state.params)

    def pure() -> tuple[Callable[[], Any], Any]:
        optimizer = train.adamw(1e-3, **HOW)
        held = [(start, optimizer.init(start))]

        def step() -> None:
            params, opt_state = held[0]
            updates, opt_state = optimizer.update(grads, opt_state, params)
            held[0] = (train.apply_updates(params, updates), opt_state)

        return step, held

    made: dict[str, Callable[[], tuple[Callable[[], Any], Any]]] = {
        TORCH: theirs,
        "in place": lambda: ours(lambda optimizer: optimizer),
        "pure": pure,
        "master": lambda: ours(train.optim.with_master),
        "stochastic": lambda: ours(train.optim.with_stochastic_rounding),
        "8 bits": lambda: ours(train.optim.with_small_state),
        "16 bits": lambda: ours(lambda optimizer: train.optim.with_small_state(optimizer, bits=16)),
    }
    return {name: make() for name, make in made.items() if name in names}


def check(built: dict[str, tuple[Callable[[], Any], Any]], dtype: torch.dtype) -> None:
    """After one step of each: SystemExit if one differs from torch's by more than a bit of the dtype."""
    for step, _ in built.values():
        step()
    want = built[TORCH][1]
    for name, (_, got) in built.items():
        leaves: list[Tensor] = tree.leaves(got[0][0]) if name == "pure" else got
        apart = max(float((a.float() - b.float()).abs().max()) for a, b in zip(leaves, want, strict=True))
        # 4 is the largest initial value here; its neighbors in bf16 are 2^-6 apart, in fp32 2^-22
        limit = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-20
        if not apart <= limit:
            raise SystemExit(f"{name} and {TORCH} differ by {apart:.1e} after one step, more than {limit:.0e}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["in place", "pure", "master", "stochastic", "8 bits", "16 bits"]
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a small model and one round")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    train.keep_freed_memory()
    config, rounds = (SMALL, 1) if given.quick else (CONFIG, given.rounds)
    print(f"torch {torch.__version__}, {given.threads} threads, {P.count(config) / 1e6:.1f}M parameters")
    for dtype in given.dtype:
        built = build(config, getattr(torch, dtype), [TORCH, *given.contenders])
        check(built, getattr(torch, dtype))
        taken = take_turns({name: step for name, (step, _) in built.items()}, rounds)
        print(f"\n{dtype}")
        theirs = taken[TORCH]
        for name, one in taken.items():
            ratios = f"{one.wall / theirs.wall:7.2f} x the time{one.cpu / theirs.cpu:7.2f} x the CPU"
            target = f"   (target {TARGET})" if name == "in place" else ""
            print(f"  {name:12s}{one.wall * 1e3:9.1f} ms{one.cpu * 1e3:9.1f} ms of CPU{ratios}{target}", flush=True)


if __name__ == "__main__":
    main()

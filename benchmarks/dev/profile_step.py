"""Where the time of a training step goes, and the bound of each part on this machine.

    python benchmarks/dev/profile_step.py                       26M, 100M, one block of 1B proportions; fp32 and bf16
    python benchmarks/dev/profile_step.py --sizes 26M --compile block
    python benchmarks/dev/profile_step.py --quick               a tiny model, one round, to check that it runs

Each part runs alone, forward and backward, on tensors of the step's shapes; the parts take turns, and the medians are
reported. The rest is the median of what remains in each turn. Threads that wait for each other spin, so that a step
uses all of its cores' time, but for Python's; the report says which share it had, as a table made while other work took
some of it shows that work as the rest of the step. `norm, rotary, activation` runs these functions eagerly; in compiled
blocks they are fused into fewer loops.
`Python and dispatch` is the step of a model with as many layers of 32 numbers, on 16 tokens: its tensors take no time.
`rest of the layers` is what the layers take beyond their products, attention, norms, rotary positions and activations:
residuals, copies and casts, autograd; negative where a compiled block fuses what runs alone here.

A bound is FLOPs / peak, where the peak is that of a large product timed in the same run, in the step's dtype or fp32,
whichever is faster; plus bytes / bandwidth for elementwise functions of torch, each of which reads and writes its
tensors once (`train.simulate` counts them on meta). The bandwidth is that of a copy of a layer's MLP activations, into
memory that exists.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fnmodels
import params as P
import train
from fnmodels import llama
from fnmodels.ops.attention.select import attention
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import glu
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.rotary import apply_rotary
from train.losses.lm_head import head_loss
from train.parallel import Mesh
from train.simulate import Work
from train.simulate.activations import layer_kept, microbatch

SIZES: dict[str, dict[str, int]] = {
    "26M": {"vocab": 8192, "hidden": 512, "layers": 6, "heads": 8, "kv": 4, "mlp": 1408, "rows": 4, "length": 512},
    "100M": {"vocab": 8192, "hidden": 1024, "layers": 8, "heads": 16, "kv": 8, "mlp": 2816, "rows": 2, "length": 512},
    "1B block": {
        "vocab": 256,
        "hidden": 2048,
        "layers": 1,
        "heads": 32,
        "kv": 8,
        "mlp": 8192,
        "rows": 2,
        "length": 512,
    },
    "tiny": {"vocab": 64, "hidden": 32, "layers": 2, "heads": 2, "kv": 2, "mlp": 64, "rows": 2, "length": 16},
}
ELEMENTWISE = "norm, rotary, activation"
INSIDE = ("products of the layers", "attention", ELEMENTWISE)  # of the layers
RESTS = {
    "rest of the layers": ("layers", INSIDE),
    "rest of the step": ("the step", ("layers", "head and loss", "optimizer")),
}
Run = Callable[[], Any]


def config_of(size: dict[str, int]) -> Any:
    return llama.Config.from_hf(
        {
            "model_type": "llama",
            "vocab_size": size["vocab"],
            "hidden_size": size["hidden"],
            "intermediate_size": size["mlp"],
            "num_hidden_layers": size["layers"],
            "num_attention_heads": size["heads"],
            "num_key_value_heads": size["kv"],
            "max_position_embeddings": size["length"],
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
    )


def parts(size: dict[str, int], dtype: torch.dtype, compile: str) -> dict[str, Run]:
    """{part: forward and backward of it alone}."""
    config, (rows, length, hidden) = config_of(size), (size["rows"], size["length"], size["hidden"])
    weights = P.init(config, 0, dtype=dtype)
    tokens = torch.randint(size["vocab"], (rows, length))
    batch = {
        "tokens": tokens,
        "labels": tokens,
        "positions": torch.arange(length).expand(rows, length),
        "segment_ids": torch.ones_like(tokens),
    }
    optimizer = train.adamw(1e-4)
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer, compile=compile)
    state = [train.init_state(weights, optimizer)]

    def whole() -> None:
        state[0], metrics = step(state[0], batch)
        float(metrics["loss"])

    leaves = fnmodels.tree.map(lambda leaf: leaf.clone().requires_grad_(), weights)
    inputs, masks, freqs = fnmodels.prepare(config, tokens, length=length)
    layout = fnmodels.layout(masks)  # as the step makes it
    x = torch.randn(rows, length, hidden).to(dtype).requires_grad_()
    up = torch.randn_like(x)
    layer_fn = functools.partial(torch.compile, dynamic=False) if compile == "block" else None

    def layers() -> None:
        how: Any = {"config": config, "valid": inputs["valid"], "layer_fn": layer_fn, "layout": layout}
        out = fnmodels.run_layers(leaves, x, masks, freqs, 0, size["layers"], **how)
        torch.autograd.grad(out, [x, *fnmodels.tree.leaves(leaves["layers"])], up)

    layer = fnmodels.tree.flatten(leaves["layers"][0])
    matrices = [leaf for leaf in layer.values() if leaf.ndim == 2]
    given = [torch.randn(rows, length, leaf.shape[1]).to(dtype).requires_grad_() for leaf in matrices]
    grads = [torch.randn(rows, length, leaf.shape[0]).to(dtype) for leaf in matrices]

    def products() -> None:
        for _ in range(size["layers"]):
            for value, leaf, grad in zip(given, matrices, grads, strict=True):
                torch.autograd.grad(linear(value, leaf), [value, leaf], grad)

    width = hidden // size["heads"]
    heads = [torch.randn(rows, length, size[name], width).to(dtype).requires_grad_() for name in ("heads", "kv", "kv")]
    mixed = torch.randn_like(heads[0])

    def attended() -> None:
        for _ in range(size["layers"]):
            out = attention(*heads, masks["full"], scale=width**-0.5, kernel="auto", layout=layout)
            torch.autograd.grad(out, heads, mixed)

    gates = [torch.randn(rows, length, size["mlp"]).to(dtype).requires_grad_() for _ in range(2)]
    neurons, table, scale = torch.randn_like(gates[0]), freqs["full"], leaves["layers"][0]["input_layernorm"]

    def small() -> None:
        for _ in range(size["layers"]):
            for _ in range(2):
                torch.autograd.grad(rms_norm(x, scale, eps=1e-5), [x, scale], up)
            for value in heads[:2]:
                torch.autograd.grad(apply_rotary(value, table), value, value.detach())
            torch.autograd.grad(glu(*gates, activation="silu"), gates, neurons)

    def head() -> None:
        total, _ = head_loss(leaves, x, tokens, config=config)
        torch.autograd.grad(total, [x, leaves["norm"], leaves["lm_head"]])

    sums = fnmodels.tree.map(torch.randn_like, weights)
    moments = optimizer.init(weights)

    def update() -> None:
        optimizer.apply_(sums, moments, weights)

    return {
        "the step": whole,
        "layers": layers,
        "products of the layers": products,
        "attention": attended,
        ELEMENTWISE: small,
        "head and loss": head,
        "optimizer": update,
    }


def empty_step(size: dict[str, int], dtype: torch.dtype, compile: str) -> Run:
    """The step of a model with as many layers whose tensors take no time."""
    return parts(SIZES["tiny"] | {"layers": size["layers"], "rows": 1}, dtype, compile)["the step"]


def bounds(size: dict[str, int], dtype: torch.dtype, peak: float, bandwidth: float) -> dict[str, float]:
    """{part: the seconds that its FLOPs and bytes take at least}."""
    config, tokens = config_of(size), size["rows"] * size["length"]
    layer = layer_kept(microbatch(config, Mesh(), Work(size["rows"], size["length"], dtype=dtype)), 0).forward
    found = {
        "products of the layers": 3 * size["layers"] * layer.products / peak,
        "attention": 3.5 * size["layers"] * layer.attention / peak,
        ELEMENTWISE: 3 * size["layers"] * layer.bytes / bandwidth,
        "head and loss": 6 * tokens * size["hidden"] * size["vocab"] / peak,
        "optimizer": 7 * P.count(config) * dtype.itemsize / bandwidth,
    }
    return found | {"layers": sum(list(found.values())[:3]), "the step": sum(found.values())}


def timed(runs: dict[str, Run], rounds: int) -> tuple[dict[str, float], float]:
    """({name: the median of its times}, in turns; the least share of the cores' time that `the step` had)."""
    taken: dict[str, list[float]] = {name: [] for name in (*runs, *RESTS)}
    shares = []
    for turn in range(rounds + 2):
        took = {}
        for name, run in runs.items():
            start, cpu = time.perf_counter(), time.process_time()
            run()
            took[name] = time.perf_counter() - start
            if name == "the step" and turn > 1:
                shares.append((time.process_time() - cpu) / took[name] / torch.get_num_threads())
        took |= {rest: took[of] - sum(took[part] for part in inside) for rest, (of, inside) in RESTS.items()}
        for name in taken if turn > 1 else ():
            taken[name].append(took[name])
    return {name: statistics.median(times) for name, times in taken.items()}, min(shares)


def report(name: str, dtype: torch.dtype, compile: str, rounds: int) -> None:
    size = SIZES[name]
    side = 256 if name == "tiny" else 2048
    square = torch.randn(side, side)
    narrow, copied = square.to(dtype), torch.randn(size["rows"] * size["length"], size["mlp"])
    into = torch.empty_like(copied)
    machine = {
        "product": lambda: linear(narrow, narrow),  # by the faster library
        "fp32 product": lambda: linear(square, square),
        "copy": lambda: into.copy_(copied),
        "Python and dispatch": empty_step(size, dtype, compile),
    }
    took, share = timed({**parts(size, dtype, compile), **machine}, rounds)
    peak = 2 * side**3 / min(took["product"], took["fp32 product"])
    bandwidth = 8 * copied.numel() / took["copy"]
    least, step = bounds(size, dtype, peak, bandwidth), took["the step"]
    flops = (least["products of the layers"] + least["attention"] * 3 / 3.5 + least["head and loss"]) * peak
    print(
        f"\n{name}, {str(dtype).removeprefix('torch.')}, compile={compile!r}: the step reaches "
        f"{flops / step / peak:.0%} of the peak, {peak / 1e9:,.0f} GFLOP/s; memory {bandwidth / 1e9:,.1f} GB/s; "
        f"it had {share:.0%} of its cores' time at least"
    )
    print("| part | ms | of the step | bound, ms | of the bound |\n|---|---:|---:|---:|---:|")
    order = ("the step", "layers", *INSIDE, "rest of the layers", "head and loss", "optimizer", "rest of the step")
    for part in (*order, "Python and dispatch"):
        bound = [f"{least[part] * 1e3:.1f}", f"{took[part] / least[part]:.2f}x"] if part in least else ["", ""]
        print(f"| {part} | {took[part] * 1e3:.1f} | {took[part] / step:.0%} | {' | '.join(bound)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["26M", "100M", "1B block"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--compile", nargs="+", choices=("none", "block"), default=["none"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    train.keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.sizes, arguments.dtypes, arguments.rounds = ["tiny"], ["float32"], 1
    for name in arguments.sizes:
        for dtype in arguments.dtypes:
            for compile in arguments.compile:
                report(name, getattr(torch, dtype), compile, arguments.rounds)


if __name__ == "__main__":
    main()

"""Times one decoding step of the 26M Llama of train_step.py beside transformers with its caches.

    python benchmarks/generate.py              B 1, 8, 32 x context 128, 1,024, fp32 and bf16
    python benchmarks/generate.py --quick      a tiny model and one round, to check that everything runs

transformers dynamic, static   the model's own forward with DynamicCache and StaticCache, greedy, without `generate`
fnmodels                       `decode_` on a cache of fixed size; "packed" with `params.packed`, "invariant" with
                               kernel="invariant" and packed weights; "compiled" by `fnmodels.compiled_step`
fnmodels int8, int4            `params.quantize`, with bf16 activations; beside the contenders of bf16

The contenders decode the same tokens in turn, each from a cache that holds the context, and begin anew when it is full.
Before they are timed, the next tokens must agree. The last column is the step's time over that of reading the weights
once at the machine's bandwidth (the sum of a large tensor), which no step at B = 1 can pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from contenders import transformers_llama
from torch import Tensor
from turns import give_back_memory, take_turns

import fnmodels
import params as P
from fnmodels import llama, tree

SIZES = {"vocab_size": 8192, "dim": 512, "ffn": 1536, "layers": 6, "heads": 8, "kv_heads": 4}
QUICK = {"vocab_size": 64, "dim": 64, "ffn": 96, "layers": 2, "heads": 4, "kv_heads": 2}
STEPS = 16  # tokens of one turn

Step = Callable[[Tensor], Tensor]  # tokens [B] -> logits [B, V]


def configs(sizes: dict[str, int], room: int) -> tuple[dict[str, Any], Any]:
    """(what `transformers_llama` takes, our Config)."""
    given = {**sizes, "sequence": room, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    return given, llama.Config(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["dim"],
        intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=room,
        rms_norm_eps=1e-5,
    )


def ours(params: Any, config: Any, prompt: Tensor, room: int, dtype: torch.dtype, kernel: str = "auto") -> Step:
    def filled() -> Any:
        cache = fnmodels.init_cache(config, len(prompt), room, dtype=dtype)
        step = fnmodels.prepare_step(config, prompt, cache)
        return fnmodels.decode_(params, *step, cache, config=config, at="last", kernel=kernel)[1]

    held, count = [filled()], [prompt.shape[1]]

    def run(tokens: Tensor) -> Tensor:
        if count[0] == room:
            held[0], count[0] = filled(), prompt.shape[1]
        step = fnmodels.prepare_step(config, tokens[:, None], held[0])
        logits, held[0] = fnmodels.decode_(params, *step, held[0], config=config, at="last", kernel=kernel)
        count[0] += 1
        return logits

    return run


def compiled(params: Any, config: Any, prompt: Tensor, room: int, dtype: torch.dtype) -> Step:
    step = fnmodels.compiled_step(config)

    def filled() -> Any:
        cache = fnmodels.init_cache(config, len(prompt), room, dtype=dtype)
        prepared = fnmodels.prepare_step(config, prompt, cache)
        return fnmodels.decode_(params, *prepared, cache, config=config, at="last")[1]

    held, count = [filled()], [prompt.shape[1]]

    def run(tokens: Tensor) -> Tensor:
        if count[0] == room:
            held[0], count[0] = filled(), prompt.shape[1]
        logits, held[0] = step(params, tokens[:, None], held[0])
        count[0] += 1
        return logits[:, 0]

    return run


def theirs(model: Any, prompt: Tensor, room: int, static: bool) -> Step:
    from transformers import DynamicCache, StaticCache

    def filled() -> Any:
        cache = StaticCache(config=model.config, max_cache_len=room) if static else DynamicCache(config=model.config)
        at = torch.arange(prompt.shape[1])
        model(prompt, past_key_values=cache, use_cache=True, cache_position=at, logits_to_keep=1)
        return cache

    held, count = [filled()], [prompt.shape[1]]

    def run(tokens: Tensor) -> Tensor:
        if count[0] == room:
            held[0], count[0] = filled(), prompt.shape[1]
        at = torch.tensor([count[0]])
        out = model(tokens[:, None], past_key_values=held[0], use_cache=True, cache_position=at)
        count[0] += 1
        logits: Tensor = out.logits[:, -1]
        return logits

    return run


def contenders(sizes: dict[str, int], rows: int, context: int, dtype: torch.dtype, steps: int) -> dict[str, Step]:
    room = context + 4 * steps
    given, config = configs(sizes, room)
    wide = P.init(config, seed=0)
    flat = {name: leaf.numpy() for name, leaf in P.export(config, wide)}
    model = transformers_llama(given, flat).to(dtype).eval()
    prompt = torch.randint(0, sizes["vocab_size"], (rows, context))
    params = tree.map(lambda leaf: leaf.to(dtype), wide)
    found = {
        "transformers dynamic": theirs(model, prompt, room, False),
        "transformers static": theirs(model, prompt, room, True),
        "fnmodels": ours(params, config, prompt, room, dtype),
        "fnmodels compiled": compiled(params, config, prompt, room, dtype),
    }
    if dtype is torch.float32:
        packed = P.packed(params)
        found["fnmodels packed"] = ours(packed, config, prompt, room, dtype)
        if rows > 1:  # one row's product is a loop in compiled code
            found["fnmodels compiled, packed"] = compiled(packed, config, prompt, room, dtype)
        found["fnmodels packed, invariant"] = ours(packed, config, prompt, room, dtype, "invariant")
        return found
    for kind in ("int8", "int4"):
        quantized = P.quantize(wide, config, kind=kind)
        found[f"fnmodels {kind}"] = ours(quantized, config, prompt, room, dtype)
        found[f"fnmodels compiled, {kind}"] = compiled(quantized, config, prompt, room, dtype)
    return found


def check(found: dict[str, Step], tokens: Tensor, dtype: torch.dtype) -> None:
    logits = {name: step(tokens).float() for name, step in found.items()}
    wanted = logits["transformers dynamic"]
    for name, got in logits.items():
        off = float((got - wanted).norm() / wanted.norm())
        rounding = {"int8": 0.1, "int4": 0.5}.get(name.rpartition(" ")[2], 0.05)
        bound = 1e-4 if dtype is torch.float32 else rounding
        assert off < bound, f"{name} differs from transformers by {off:.1e}, relative to its norm."


def bandwidth() -> float:
    """Bytes per second of reading memory, the best of some sums."""
    large, best = torch.ones(1 << 26), 0.0
    for _ in range(5):
        begin = time.perf_counter()
        large.sum()
        best = max(best, large.nbytes / (time.perf_counter() - begin))
    return best


def weights_read(sizes: dict[str, int]) -> int:
    """Numbers that a step reads: all weights but the embedding."""
    dim, heads = sizes["dim"], 2 * sizes["dim"] * (1 + sizes["kv_heads"] / sizes["heads"])
    return int(sizes["layers"] * dim * (heads + 3 * sizes["ffn"]) + sizes["vocab_size"] * dim)


def turn(step: Step, tokens: Tensor) -> Callable[[], list[Tensor]]:
    return lambda: [step(row) for row in tokens]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    give_back_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.quick:
        args.rows, args.contexts, args.rounds = [1, 2], [8], 1
        torch.compiler.set_stance("force_eager")  # tests of compiled steps are others
    sizes, steps = (QUICK, 2) if args.quick else (SIZES, STEPS)
    speed = bandwidth()
    print(f"{args.threads} threads, {speed / 1e9:.1f} GB/s")
    print("| dtype | B | context | who | ms/step | x of dynamic | x of static | by CPU time | x of reading weights |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for rows in args.rows:
            for context in args.contexts:
                found = contenders(sizes, rows, context, dtype, steps)
                tokens = torch.randint(0, sizes["vocab_size"], (steps, rows))
                check(found, tokens[0], dtype)
                taken = take_turns({name: turn(step, tokens) for name, step in found.items()}, args.rounds)
                dynamic, static = taken["transformers dynamic"], taken["transformers static"]
                for name, one in taken.items():
                    size = {"int8": 1, "int4": 0.5}.get(name.rpartition(" ")[2], dtype.itemsize)
                    ratios = (dynamic.wall / one.wall, static.wall / one.wall, dynamic.cpu / one.cpu)
                    cells = [str(dtype).removeprefix("torch."), rows, context, name, f"{one.wall / steps * 1e3:.1f}"]
                    cells += [f"{ratio:.2f}" for ratio in ratios]
                    cells += [f"{one.wall / steps * speed / (weights_read(sizes) * size):.1f}"]
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()

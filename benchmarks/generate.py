"""Times one decoding step beside transformers with its caches, litgpt and llama.cpp.

    python benchmarks/generate.py                       the 26M Llama of train_step.py, B 1, 8, 32 x context 128, 1,024
    python benchmarks/generate.py --model moe           Qwen3-MoE, see moe.py; hybrid: Qwen3.5, see recurrent_step.py
    python benchmarks/generate.py --quick               a tiny model and one round, to check that everything runs

transformers dynamic, static   the model's own forward with DynamicCache and StaticCache, greedy, without `generate`
litgpt, llama.cpp              where they are installed; llama.cpp's int8 and int4 are its Q8_0 and Q4_0
fnmodels                       `decode_` on a cache of fixed size; "packed" with `params.packed`, "compiled" by
                               `fnmodels.compiled_step`
fnmodels int8, int4            `params.quantize`, with bf16 activations; beside the contenders of bf16

The contenders decode the same tokens in turn, from rows that hold the same context, and go back to it after each turn.
Before they are timed, the next tokens' logits must agree. "x dynamic" and "x static": how many times as fast as these
of transformers, by wall time, then by CPU time; "of llama.cpp": the time over llama.cpp's; "of reading": the time over
that of reading the weights once at the machine's bandwidth (the sum of a large tensor), a bound for B = 1
without experts.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import moe
import recurrent_step
import torch
from contenders import transformers_llama
from decoders import Decoder, Start, installed, litgpt, llama_cpp, ours, transformers, write_gguf
from torch import Tensor
from turns import Taken, give_back_memory, take_turns

import fnmodels
import params as P
from fnmodels import llama, tree

SIZES = {"vocab_size": 8192, "dim": 512, "ffn": 1536, "layers": 6, "heads": 8, "kv_heads": 4}
QUICK = {"vocab_size": 64, "dim": 64, "ffn": 96, "layers": 2, "heads": 4, "kv_heads": 2}
STEPS = 16  # tokens of one turn,
FEW = 4  # and with that many cached tokens:
MANY = 1 << 14


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


@dataclass(frozen=True)
class Pair:
    """A model in both libraries, with the same fp32 weights. given: of a Llama, what other libraries take."""

    config: Any
    params: Any
    theirs: Any
    given: dict[str, Any] | None = None


def pair(model: str, sizes: dict[str, int], room: int) -> Pair:
    if model == "llama":
        given, config = configs(sizes, room)
        params = P.init(config, seed=0)
        return Pair(config, params, transformers_llama(given, exported(config, params)), given)
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if model == "moe":
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**moe.MODEL | {"max_position_embeddings": room}))
    else:
        theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**recurrent_step.MODEL | {"max_position_embeddings": room}))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        config, params = P.load_pretrained(folder, dtype=torch.float32, copy=True)
    return Pair(config, params, theirs)


def exported(config: Any, params: Any) -> dict[str, Any]:
    return {name: leaf.numpy() for name, leaf in P.export(config, params)}


def contenders(pair: Pair, start: Start, threads: int, folder: Path) -> dict[str, Callable[[], Decoder]]:
    """{name: a function that prepares the contender}."""
    dtype, config, params = start.dtype, pair.config, tree.map(lambda leaf: leaf.to(start.dtype), pair.params)
    theirs = pair.theirs.to(dtype).eval()
    found = {
        "transformers dynamic": partial(transformers, theirs, start, static=False),
        "transformers static": partial(transformers, theirs, start, static=True),
    }
    kinds = ["int8", "int4"] if dtype is torch.bfloat16 and pair.given is not None else []
    if pair.given is not None:
        flat = exported(config, pair.params)
        if installed("litgpt"):
            found["litgpt"] = partial(litgpt, pair.given, flat, start)
        for kind in ["", *kinds] if installed("llama_cpp", "gguf") else []:
            path = folder / f"{kind}.gguf"
            write_gguf(path, pair.given, flat, kind or str(dtype).removeprefix("torch."))
            found[f"llama.cpp {kind}".rstrip()] = partial(llama_cpp, path, config.vocab_size, start, threads)
    forms = {"": params} | {f" {kind}": P.quantize(pair.params, config, kind=kind) for kind in kinds}
    for form, leaves in forms.items():
        found[f"fnmodels{form}"] = partial(ours, leaves, config, start)
        found[f"fnmodels compiled{form}"] = partial(ours, leaves, config, start, step=fnmodels.compiled_step(config))
    if dtype is torch.float32:
        params = P.packed(params)
        found["fnmodels packed"] = partial(ours, params, config, start)
        if start.rows > 1:  # one row's product is a loop in compiled code
            found["fnmodels compiled, packed"] = partial(
                ours, params, config, start, step=fnmodels.compiled_step(config)
            )
    return found


def rounding_of(kind: str, layers: int) -> float:
    """How far rounded normal weights move the logits of a Llama, relative to their norm: 0.024 and 0.26 for 6 layers.

    A weight's error is uniform within a step, so of deviation e = step / sqrt(12). int8 has 254 steps in twice the
    largest of a row, 3.2 deviations of 512 weights; int4 15 steps in the range of 32 weights, 4.1 deviations. Three
    products in turn give a sublayer's output an error of variance 3 e^2 beside the one of its input. The residual
    stream is a sum of n such outputs, whose relative error has the variance 3 e^2 (1 + 1/2 + ... + 1/n), about
    3 e^2 (1 + ln n).
    """
    e = {"int8": 2 * 3.2 / 254, "int4": 4.1 / 15}[kind] / 12**0.5
    return e * (3 * (1 + math.log(2 * layers))) ** 0.5


def check(found: dict[str, Decoder], tokens: Tensor, dtype: torch.dtype, layers: int) -> None:
    """The next tokens' logits agree, so far as roundings allow: half as much again as `rounding_of`, for the spread.

    bf16: 0.05 where experts may be chosen differently; beside rounded weights 0.02, twice what it moves a Llama by.
    """
    logits = {name: decoder.step(tokens).float() for name, decoder in found.items()}
    wanted = next(iter(logits.values()))
    for name, got in logits.items():
        off = float((got - wanted).norm() / wanted.norm())
        kind = name.rpartition(" ")[2]
        rounding = 1.5 * rounding_of(kind, layers) + 0.02 if kind in ("int8", "int4") else 0.05
        bound = 1e-4 if dtype is torch.float32 else rounding
        assert off < bound, f"{name} differs from {next(iter(logits))} by {off:.1e}, relative to its norm."


def bandwidth() -> float:
    """Bytes per second of reading memory, the best of some sums."""
    large, best = torch.ones(1 << 26), 0.0
    for _ in range(5):
        begin = time.perf_counter()
        large.sum()
        best = max(best, large.nbytes / (time.perf_counter() - begin))
    return best


def weights_read(pair: Pair) -> int:
    """Elements that a step reads: all weights but the embedding, unless the head is the same."""
    sizes = {path: leaf.numel() for path, leaf in tree.flatten(pair.params).items()}
    return sum(sizes.values()) - (sizes["embed_tokens"] if "lm_head" in sizes else 0)


def turn(decoder: Decoder, tokens: Tensor) -> Callable[[], None]:
    def run() -> None:
        decoder.rewind()
        for row in tokens:
            decoder.step(row)

    return run


def report(cell: list[Any], taken: dict[str, Taken], steps: int, read: float) -> None:
    """read: seconds of reading each element of the weights in one byte."""
    theirs = [taken.get(f"transformers {cache}") for cache in ("dynamic", "static")]
    size = 4 if cell[0] == "float32" else 2
    for name, one in taken.items():
        form = name.rpartition(" ")[2]
        kind = form if form in ("int8", "int4") else ""
        other = taken.get(f"llama.cpp {kind}".rstrip())
        ratios = [[t.wall / one.wall, t.cpu / one.cpu] if t else ["", ""] for t in theirs]
        cells = [*cell, name, f"{one.wall / steps * 1e3:.2f}"]
        cells += [f"{ratio:.2f}" if ratio else "" for pair in zip(*ratios, strict=True) for ratio in pair]
        cells += ["" if other is None else f"{one.wall / other.wall:.2f}"]
        cells += [f"{one.wall / steps / (read * {'int8': 1, 'int4': 0.5}.get(kind, size)):.1f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", choices=("llama", "moe", "hybrid"), default="llama")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=[], help="contenders (default all)")
    args = parser.parse_args()
    give_back_memory()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, for its former name of the cache
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.quick:
        args.rows, args.contexts, args.rounds = [1, 2], [8], 1
        torch.compiler.set_stance("force_eager")  # tests of compiled steps are others
    sizes = QUICK if args.quick else SIZES
    speed = bandwidth()
    print(f"{args.model}, {args.threads} threads, {speed / 1e9:.1f} GB/s")
    print(
        "| dtype | B | context | who | ms/step | x dynamic | x static | by CPU | by CPU | of llama.cpp | of reading |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    cells = [(dtype, rows, context) for dtype in args.dtypes for rows in args.rows for context in args.contexts]
    for name, rows, context in cells:
        steps = 2 if args.quick else STEPS if rows * context < MANY else FEW
        models = pair(args.model, sizes, context + steps)
        vocab, recurrent = models.config.vocab_size, args.model == "hybrid"
        start = Start(torch.randint(0, vocab, (1, context)), rows, steps, getattr(torch, name), recurrent)
        tokens = torch.randint(0, vocab, (steps, rows))
        with tempfile.TemporaryDirectory() as folder:
            made = contenders(models, start, args.threads, Path(folder))
            found = {who: make() for who, make in made.items() if who in args.only or not args.only}
        check(found, tokens[0], start.dtype, models.config.num_hidden_layers)
        taken = take_turns({who: turn(decoder, tokens) for who, decoder in found.items()}, args.rounds)
        report([name, rows, context], taken, steps, weights_read(models) / speed)


if __name__ == "__main__":
    main()

"""Times steps of decoding in bf16 on one GPU: launches one by one, compiled, and as a CUDA graph.

    python benchmarks/dev/gpu_decode.py                     Llamas of 26M, 1B and 8B proportions, B 1 and 32
    python benchmarks/dev/gpu_decode.py --quick --device cputiny models on a CPU, without graphs, to check that it runs

fnmodels             `decode_` on a cache of fixed size, `compiled_step`, `captured_step`
transformers         its own forward with a DynamicCache, and with a StaticCache compiled in the mode "reduce-overhead",
                     which captures graphs

All decode the same tokens after a context of --context tokens, and must agree on the first logits. "of reading": the
time over that of reading weights and cached keys and values once, at the bandwidth of a copy in the same run.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import above  # noqa: F401
import torch
from decoders import Decoder, Start, ours, transformers
from gpu import SIZES, config_of, timed, waits
from gpu_twin import transformers_model
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree

STEPS = 32  # tokens of one turn
APART = 0.1  # largest accepted difference of logits relative to their norm: bf16 keeps 8 bits


def captured(params: Any, config: Any, start: Start) -> Decoder:
    return ours(params, config, start, step=fnmodels.cache.captured_step(config))


def compiled(params: Any, config: Any, start: Start) -> Decoder:
    return ours(params, config, start, step=fnmodels.compiled_step(config))


def static(model: Any, start: Start) -> Decoder:
    """A copy of the model whose forward is compiled, as `generate` of transformers does for a StaticCache."""
    own = copy.copy(model)
    own.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    return replace(transformers(own, start, static=True), rewind=lambda: None)  # there is room for all turns


def contenders(config: Any, params: Any, start: Start, device: str) -> dict[str, Callable[[], Decoder]]:
    model = transformers_model(config, params, attention="sdpa").eval()
    found: dict[str, Callable[[], Decoder]] = {
        "fnmodels": partial(ours, params, config, start),
        "fnmodels, graph": partial(captured, params, config, start),
        "fnmodels, compiled": partial(compiled, params, config, start),
        "transformers dynamic": partial(transformers, model, start, static=False),
        "transformers static, compiled": partial(static, model, start),
    }
    if device == "cpu":
        found = {name: build for name, build in found.items() if name in ("fnmodels", "transformers dynamic")}
    return found


def decoded(decoder: Decoder, tokens: Tensor, device: str) -> float:
    """Seconds of one step: the median of three turns of STEPS."""

    def turn() -> None:
        for now in tokens:
            decoder.step(now)

    run, seconds = waits(turn, device), []
    for _ in range(4):  # the first one captures and compiles
        seconds.append(timed(run, 1))
        decoder.rewind()
    return sorted(seconds[1:])[1] / len(tokens)


def bandwidth(device: str, quick: bool) -> float:
    """Bytes per second that a copy moves, read and written."""
    source = torch.empty(2**20 if quick else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    run = waits(lambda: target.copy_(source), device)
    run()
    return 2 * source.nbytes / timed(run, 10)


def report(size: str, layers: int | None, rows: int, options: argparse.Namespace, rate: float) -> None:
    config = config_of(size, layers)
    params = P.init(config, 0, dtype=torch.bfloat16, device=options.device)
    generator = torch.Generator().manual_seed(0)
    steps = 2 if options.quick else STEPS
    tokens = torch.randint(config.vocab_size, (steps, rows), generator=generator).to(options.device)
    context = torch.randint(config.vocab_size, (1, options.context), generator=generator).to(options.device)
    start = Start(context, rows, 5 * steps, torch.bfloat16)
    read = {name: leaf for name, leaf in params.items() if name != "embed_tokens"}
    weights = sum(leaf.nbytes for leaf in tree.leaves(read))
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    cached = rows * (options.context + steps // 2) * config.num_hidden_layers * heads * 2 * 2
    floor = (weights + cached) / rate
    print(f"\n{size}, {config.num_hidden_layers} layers, {rows} rows of {options.context} tokens", end=": ")
    print(f"reading takes {floor * 1e3:.3f} ms")
    print("| | a step | tokens/s | of reading |\n|---|---:|---:|---:|")
    wanted: Tensor | None = None
    for name, build in contenders(config, params, start, options.device).items():
        try:
            with torch.no_grad():
                decoder = build()
                logits = decoder.step(tokens[0]).float()
                decoder.rewind()
                wanted = logits if wanted is None else wanted
                apart = float((logits - wanted).norm() / wanted.norm())
                assert apart < APART, f"{name}: the first logits are off by {apart:.2f}, relative to their norm"
                seconds = decoded(decoder, tokens, options.device)
            print(f"| {name} | {seconds * 1e3:.3f} ms | {rows / seconds:,.0f} | {seconds / floor:.2f} |", flush=True)
        except (RuntimeError, ValueError, NotImplementedError) as error:  # what one contender cannot do
            print(f"| {name} | {str(error).splitlines()[0][:100]} | | |", flush=True)
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["26M", "1B", "8B"])
    parser.add_argument("--layers", type=int, help="number of layers (default: that of the size)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here; --quick --device cpu checks that the script runs.")
    torch.set_num_threads(options.threads)
    if options.quick:
        options.sizes, options.context = ["tiny"], 16
    rate = bandwidth(options.device, options.quick)
    for size in options.sizes:
        for rows in options.rows:
            report(size, options.layers, rows, options, rate)


if __name__ == "__main__":
    main()

"""Times training steps with each path of `fnmodels/ops/cpu` and without it: what a path earns of a whole step.

    python benchmarks/dev/cpu_paths.py                                every model, fp32 and bf16
    python benchmarks/dev/cpu_paths.py --models llama --dtypes float32
    python benchmarks/dev/cpu_paths.py --compiled                     block-compiled steps, and compiled decoding steps
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/dev/cpu_paths.py  as on a CPU with AVX2 alone
    python benchmarks/dev/cpu_paths.py --quick                           tiny models, to check that everything runs

The step as it is and those without one path take turns in one process. A figure is the median of the CPU time of a
step without the path over that of the step as it is, less 1: the path earns so much.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import above  # noqa: F401
import moe
import recurrent_step
import torch
import torch.nn.functional as F
import train_step

import fnmodels
import params as P
import train
from fnmodels.models.common.registry import config_class
from fnmodels.ops.moe import experts
from fnmodels.ops.moe.dispatch import combine

Patches = dict[str, Any]  # by dotted name, what stands there instead


def never(*args: Any, **more: Any) -> bool:
    return False


def nothing(*args: Any, **more: Any) -> None:
    return None


def _generic_rows(*args: Any) -> Any:
    return experts.sorted_rows(*args)


PATHS: dict[str, Patches] = {
    "linear, onednn, product_table": {"fnmodels.ops.linear.is_large": never},
    "norm": {"fnmodels.ops.norm.takes_large_norm": never},
    "tiled, tiled_kernel": {"fnmodels.ops.attention.block_sparse.tiles_are_faster": never},
    "dispatch": {
        "fnmodels.ops.moe.experts.sorted_rows_cpu": _generic_rows,
        "fnmodels.ops.moe.experts.combine_cpu": combine,
    },
    "recurrent/scan, chunks": {"fnmodels.ops.cpu.recurrent.scan.is_plain_eager": never},
    "recurrent/delta_per_head": {"fnmodels.ops.cpu.recurrent.delta_per_head.by_hand": nothing},
    "recurrent/ssd_chunk": {"fnmodels.ops.cpu.recurrent.ssd_chunk.by_hand": nothing},
    "recurrent/conv": {"fnmodels.ops.recurrent.conv.is_plain_eager": never},
}
COMPILED: dict[str, Patches] = {  # of blocks that are compiled
    "linear_op": {"fnmodels.ops.linear.linear_in_graph": F.linear},
    "tiled_op": {"fnmodels.ops.attention.block_sparse.tiles_are_faster": never},
    "recurrent/scan_op": {"fnmodels.ops.cpu.recurrent.scan.in_graph": never},
}
PATHS |= COMPILED
DECODED: dict[str, Patches] = {  # of compiled decoding steps, made and first run under the patches
    "linear (one row)": {"fnmodels.ops.cpu.linear._one_row": never},
}
OF_COMPILED = {"llama": ("linear_op", "tiled_op"), "qwen3_5": ("recurrent/scan_op",)}
DENSE = ("linear, onednn, product_table", "norm", "tiled, tiled_kernel")
RECURRENT = ("recurrent/scan, chunks", "recurrent/conv")


def _llama() -> dict[str, Any]:
    c = train_step.CONFIG
    names = {"dim": "hidden_size", "ffn": "intermediate_size", "layers": "num_hidden_layers"}
    names |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "sequence": "max_position_embeddings"}
    kept = {name: c[name] for name in ("vocab_size", "rms_norm_eps", "rope_theta")}
    return {"model_type": "llama", "tie_word_embeddings": False, **kept, **{to: c[of] for of, to in names.items()}}


MAMBA = {
    "model_type": "mamba2",
    "vocab_size": 4096,
    "hidden_size": 320,
    "num_hidden_layers": 12,
    "state_size": 64,
    "num_heads": 10,
    "head_dim": 64,
    "n_groups": 1,
    "tie_word_embeddings": True,
}
# name -> (the values of config.json, those of a tiny model, the paths that it takes)
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "llama": (_llama(), {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}, DENSE),
    "gpt2": (
        {
            "model_type": "gpt2",
            "vocab_size": 8192,
            "n_embd": 512,
            "n_layer": 6,
            "n_head": 8,
            "n_positions": 512,
            "activation_function": "gelu_new",
        },
        {"n_layer": 1, "n_embd": 64},
        ("linear, onednn, product_table", "norm"),
    ),
    "moe": (
        {"model_type": "qwen3_moe", **moe.MODEL},
        {"hidden_size": 64, "num_experts": 8, "moe_intermediate_size": 64, "num_hidden_layers": 1},
        ("dispatch", "tiled, tiled_kernel", "norm"),
    ),
    "qwen3_5": (
        {"model_type": "qwen3_5_text", **recurrent_step.MODEL},
        {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48},
        (*RECURRENT, "recurrent/delta_per_head"),
    ),
    "mamba2": (MAMBA, {"num_hidden_layers": 1}, (*RECURRENT, "recurrent/ssd_chunk")),
}


@contextlib.contextmanager
def without(path: str | None) -> Iterator[None]:
    """A scope in which the library does not take this path."""
    with contextlib.ExitStack() as stack:
        for name, other in (PATHS | DECODED)[path].items() if path else ():
            stack.enter_context(mock.patch(name, other))
        yield


def make_step(
    values: dict[str, Any], dtype: torch.dtype, batch: tuple[int, int], compile: str = "none"
) -> Callable[[], Any]:
    config = config_class(fnmodels.family_for(values["model_type"])).from_hf(values)
    params = P.init(config, 0, dtype=dtype)
    tokens = torch.randint(0, values["vocab_size"], batch, generator=torch.Generator().manual_seed(0))
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -100)), 1)
    positions = torch.arange(batch[1]).expand(batch).contiguous()
    given = {"tokens": tokens, "labels": labels, "positions": positions, "segment_ids": torch.ones_like(tokens)}
    optimizer = train.adamw(1e-4)
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer, compile=compile)
    held = [train.init_state(params, optimizer)]

    def run() -> None:
        held[0], _ = step(held[0], given)

    return run


def compare(
    name: str, dtype: torch.dtype, rounds: int, quick: bool, batch: tuple[int, int], compiled: bool = False
) -> None:
    values, tiny, paths = MODELS[name]
    paths = OF_COMPILED[name] if compiled else paths
    how = "block" if compiled else "none"
    run = make_step(values | tiny if quick else values, dtype, (2, 16) if quick else batch, how)
    taken: dict[str | None, list[float]] = {path: [] for path in (None, *paths)}
    for index in range(rounds + 1):
        for path, times in taken.items():
            with without(path):
                start = time.process_time()
                run()
            if index:  # the first round warms up
                times.append(time.process_time() - start)
    base = statistics.median(taken[None])
    print(f"{name} {str(dtype).removeprefix('torch.')}, compile={how!r}: {1e3 * base:.0f} ms of CPU a step")
    for path in paths:
        print(f"  {path}: {statistics.median(taken[path]) / base - 1:+.1%}", flush=True)


def compare_decoding(dtype: torch.dtype, rounds: int, quick: bool) -> None:
    """Compiled steps of the Llama for one row in a cache of 512 places; each form has its own params and cache."""
    values, tiny, _ = MODELS["llama"]
    config = config_class(fnmodels.family_for("llama")).from_hf(values | tiny if quick else values)
    token, taken = torch.zeros(1, 1, dtype=torch.int64), dict[str | None, list[float]]()
    runs: dict[str | None, Callable[[], None]] = {}
    for path in (None, *DECODED):
        with without(path):
            runs[path] = _decoding(config, P.init(config, 0, dtype=dtype), token)
    for _ in range(8 * rounds):
        for path, run in runs.items():
            start = time.process_time()
            for _ in range(4):
                run()
            taken.setdefault(path, []).append((time.process_time() - start) / 4)
    base = statistics.median(taken[None])
    print(f"generate {str(dtype).removeprefix('torch.')}, compiled: {1e3 * base:.2f} ms of CPU a step")
    for path in DECODED:
        print(f"  {path}: {statistics.median(taken[path]) / base - 1:+.1%}", flush=True)


def _decoding(config: Any, params: Any, token: torch.Tensor) -> Callable[[], None]:
    step, held = fnmodels.compiled_step(config), [fnmodels.init_cache(config, 1, 512, dtype=params["norm"].dtype)]

    def run() -> None:
        if int(held[0].slots["full"].occupied.sum()) == 512:
            held[0] = fnmodels.truncate(held[0], 256)
        held[0] = step(params, token, held[0])[1]

    for _ in range(4):
        run()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs=2, default=(4, 512))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = 1 if args.quick else args.rounds
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for name in (n for n in args.models if not args.compiled or n in OF_COMPILED):
            compare(name, dtype, rounds, args.quick, tuple(args.batch), args.compiled)
        if args.compiled and "llama" in args.models:
            compare_decoding(dtype, rounds, args.quick)


if __name__ == "__main__":
    main()

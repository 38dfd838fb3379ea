"""Times training steps on one GPU: model FLOPs utilization beside modules, float8, experts, launches, loading.

    python benchmarks/gpu.py                          all parts on the first CUDA device
    python benchmarks/gpu.py steps --sizes 8B --layers 8
    python benchmarks/gpu.py --quick --device cpu     tiny models on a CPU, to check that everything runs

steps    forward, backward and AdamW in bf16 of Llamas with the proportions of 26M, 1B and 8B, on 4 rows of 4,096
         tokens and on one packed row of 32,768: fnmodels eager, with compiled blocks and with float8 in them, by the
         attention kernels that the device has; the same model as nn.Modules (gpu_twin.py), eager and with compiled
         layers; transformers with SDPA or flash attention; torchtitan's Llama where it is installed
         (gpu_torchtitan.py). All must agree on the first loss. --layers: how many; one that does not fit or compile
         is reported as such.
experts  one layer of experts, forward and backward, by each of our ways, bf16, and its products alone in float8,
         casts included.
launch   the step of the 26M Llama by each attention kernel on 4 rows of 4,096 tokens, eager, with compiled blocks and
         as one graph (compile="step"): seconds, for how many of them the device computes, and how often the host
         launches something.
load     seconds and GB/s of reading a checkpoint of bf16 straight to the device, beside a plain read of the files.

MFU is FLOPs of the model / seconds / peak, of which recomputation is no part; documents count by their own lengths. The
peak is --peak, or what `train.simulate` knows of the device, or that of a large product here.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_torchtitan import folder, torchtitan_step
from gpu_twin import Step, transformers_step, twin_step
from packed_rows import packed_rows
from torch import Tensor

import params as P
import train
from fnmodels import llama, tree
from fnmodels.models.common.spec import Constant
from fnmodels.ops.float8 import cast, product
from fnmodels.options import Kernel
from train.job.flops import flops_per_token
from train.simulate import MACHINES

Batch = dict[str, Tensor]
Fresh = Callable[[], Any]  # draws the parameters
SIZES: dict[str, dict[str, int]] = {
    "26M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    | {"num_attention_heads": 8, "num_key_value_heads": 4},
    "1B": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "8B": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 12}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
}
DOCUMENTS = (1024, 512, 768, 896, 256, 640)  # of 4,096 tokens; eight times as long in a row of 32,768
LOSS_APART = 0.05  # largest accepted difference of first losses: bf16 keeps 8 bits, float8 three
KERNELS = {"cuda": ("varlen", "flex", "sdpa"), "cpu": ("sdpa",)}


@dataclass(frozen=True)
class Rows:
    """A batch: `rows` rows, each of one document or of `documents`."""

    name: str
    rows: int
    documents: tuple[int, ...]

    @property
    def seen(self) -> float:
        """The mean length of a document, over tokens."""
        return sum(length * length for length in self.documents) / sum(self.documents)

    def batch(self, vocabulary: int, device: str) -> Batch:
        return packed_rows(self.documents, self.rows, vocabulary, device)


def rows_of(quick: bool) -> list[Rows]:
    unit = 64 if quick else 1
    long = tuple(8 * length // unit for length in DOCUMENTS)
    length = sum(DOCUMENTS) // unit
    packed = Rows(f"packed, 1 row of {sum(long)}", 1, long)
    return [Rows(f"4 rows of {length}", 4, (length,)), packed]


def config_of(size: str, layers: int | None) -> llama.Config:
    own = SIZES[size] | ({} if layers is None else {"num_hidden_layers": layers})
    more = {"model_type": "llama", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    return llama.Config.from_hf({**own, **more, "tie_word_embeddings": False})


def drawn(config: llama.Config, device: str) -> Any:
    """Parameters in bf16, the same in every call. `P.init` draws on the CPU, which takes a minute for 8B."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(leaf: Any) -> Tensor:
        made = torch.empty(leaf.shape, dtype=torch.bfloat16, device=device)
        norm = isinstance(leaf.init, Constant)
        return made.fill_(leaf.init.value) if norm else made.normal_(0, leaf.init.std, generator=generator)

    return tree.map(draw, llama.spec(config))


def our_step(config: llama.Config, fresh: Fresh, batch: Batch, *, compile: str = "none", **options: Any) -> Step:
    loss = functools.partial(train.next_token_loss, config=config, **options)
    optimizer = train.adamw(1e-5)
    step = train.make_step(loss, optimizer, compile=compile)
    held = [train.init_state(fresh(), optimizer, copy=False)]

    def run() -> float:
        held[0], metrics = step(held[0], batch)
        return float(metrics["loss"])  # waits for the update too: all of it is in one stream

    return run


def contenders(config: llama.Config, fresh: Fresh, batch: Batch) -> dict[str, Callable[[], Step]]:
    """{name: a function that builds its step}, so that only one of them holds memory."""
    ours = functools.partial(our_step, config, fresh, batch)
    found: dict[str, Callable[[], Step]] = {"fnmodels": ours}
    for kernel in KERNELS[batch["tokens"].device.type]:  # each compiled anew
        found[f"fnmodels {kernel}, compiled blocks"] = functools.partial(ours, kernel=kernel, compile="block")
    eight = {"layer_fn": train.float8_layers, "compile": "block"}
    found["fnmodels float8, compiled blocks"] = functools.partial(ours, **eight)
    found["modules"] = functools.partial(twin_step, config, fresh, batch, compiled=False)
    found["modules, compiled layers"] = functools.partial(twin_step, config, fresh, batch, compiled=True)
    if importlib.util.find_spec("transformers"):
        flash = importlib.util.find_spec("flash_attn") is not None
        attention = "flash_attention_2" if flash and batch["tokens"].is_cuda else "sdpa"
        theirs = functools.partial(transformers_step, config, fresh, batch, attention=attention)
        found[f"transformers {attention}"] = theirs
    if folder():
        theirs = functools.partial(torchtitan_step, config, fresh, batch)
        found["torchtitan"] = functools.partial(theirs, compiled=False)
        found["torchtitan, compiled layers"] = functools.partial(theirs, compiled=True)
    return found


def steps(options: argparse.Namespace) -> None:
    peak = peak_of(options)
    for size in options.sizes:
        config = config_of(size, options.layers)
        fresh = functools.partial(drawn, config, options.device)
        for rows in [each for i, each in enumerate(rows_of(options.quick)) if i in options.rows]:
            batch = rows.batch(config.vocab_size, options.device)
            tokens = batch["tokens"].numel()
            flops = tokens * flops_per_token(config, llama.spec(config), int(rows.seen))
            layers, millions = config.num_hidden_layers, P.count(config) / 1e6
            print(f"\n{size}, {layers} layers, {millions:,.0f}M parameters, {rows.name}, bf16")
            print("| | tokens/s | MFU | peak memory | first loss |\n|---|---:|---:|---:|---:|")
            first: float | None = None
            for name, build in contenders(config, fresh, batch).items():
                if options.only and not any(word in name for word in options.only):
                    continue
                found = attempt(functools.partial(one_contender, build, options))
                if isinstance(found, str):
                    print(f"| {name} | {found} | | | |", flush=True)
                    continue
                loss, seconds, memory = found
                first = loss if first is None else first
                if not abs(loss - first) < LOSS_APART:
                    print(f"| {name} | wrong: the first loss is not {first:.4f} | | | {loss:.4f} |", flush=True)
                    continue
                rate, share = tokens / seconds, flops / seconds / peak
                print(f"| {name} | {rate:,.0f} | {share:.1%} | {memory:,.0f} MiB | {loss:.4f} |", flush=True)


def one_contender(build: Callable[[], Step], options: argparse.Namespace) -> tuple[float, float, float]:
    """(first loss, median seconds, MiB at the peak)."""
    clear(options.device)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = build()
    loss = step()
    step()
    seconds = timed(step, options.rounds)
    memory = torch.cuda.max_memory_allocated() / 2**20 if options.device == "cuda" else float("nan")
    return loss, seconds, memory


def clear(device: str) -> None:
    """Forgets compiled code, which contenders would share and which counts against limits, and frees memory."""
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def attempt(run: Callable[[], Any]) -> Any:
    """What `run` returns, or as text why it failed: one contender's mask, dtype, memory or compiler ends no others.

    Any `Exception`, for those of Triton and of other libraries have no common class. It is not kept, since its frames
    hold the contender's tensors.
    """
    try:
        return run()
    except Exception as error:
        text = " ".join(str(error).split()).replace("|", "/")  # one cell of a table; compilers put the cause in line 2
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
            return "does not fit"
        return f"{type(error).__name__}: {text[:160]}"


def timed(run: Callable[[], Any], rounds: int) -> float:
    """The median of the times of a function that waits for its result."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def waits(run: Callable[[], Any], device: str) -> Callable[[], None]:
    def both() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    return both


def peak_of(options: argparse.Namespace) -> float:
    """The device's FLOP/s in bf16."""
    if options.peak:
        return options.peak * 1e12
    name = torch.cuda.get_device_name().lower() if options.device == "cuda" else "cpu"
    known = next((machine.peak for key, machine in MACHINES.items() if key in name), None)
    if known is not None:
        print(f"{name}: {known / 1e12:,.0f} TFLOP/s by its data sheet")
        return known
    side = 256 if options.quick else 8192
    square = torch.randn(side, side, dtype=torch.bfloat16, device=options.device)
    run = waits(lambda: square @ square, options.device)
    run()
    found = 2 * side**3 / timed(run, 10)
    print(f"{name}: {found / 1e12:,.3f} TFLOP/s by a product of {side} x {side}")
    return found


def experts(options: argparse.Namespace) -> None:
    from moe import BLOCK, block  # here, for it imports transformers

    sizes = BLOCK | ({"hidden_size": 64, "moe_intermediate_size": 64, "tokens": 64} if options.quick else {})
    print(f"\none layer of experts, forward and backward, bf16, {sizes}")
    times(block(torch.bfloat16, sizes, options.device), options)
    groups, width, inner = sizes["num_experts"], sizes["hidden_size"], sizes["moe_intermediate_size"]
    rows = sizes["tokens"] * sizes["num_experts_per_tok"]
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=options.device)
    weights = torch.randn(groups, inner, width, dtype=torch.bfloat16, device=options.device)
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=options.device) * (rows // groups)
    forms: dict[str, Callable[[], Any]] = {
        "grouped_mm bf16": lambda: torch.nn.functional.grouped_mm(x, weights.mT, offs=ends),
        "one product in float8": lambda: product(
            cast(x, torch.float8_e4m3fn), cast(weights[0], torch.float8_e4m3fn), torch.bfloat16
        ),
    }
    if options.device == "cuda":  # torch has no grouped product in float8 on a CPU
        forms["scaled_grouped_mm float8"] = functools.partial(grouped_float8, x, weights, ends)
    print(f"the products of {rows} rows, forward")
    times(forms, options)


def times(forms: dict[str, Callable[[], Any]], options: argparse.Namespace) -> None:
    """Prints the median time of each."""
    for name, run in forms.items():
        both = waits(run, options.device)
        found = attempt(lambda both=both: [timed(both, 1), timed(both, options.rounds)][1])
        print(f"  {name:26s}{found if isinstance(found, str) else f'{found * 1e3:10.3f} ms'}", flush=True)


def grouped_float8(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [rows, in] times the weights [E, out, in] of their experts, with a scale per row of each."""
    rowwise = torch.nn.functional.ScalingType.RowWise

    def scaled(value: Tensor) -> tuple[Tensor, Tensor]:
        scale = value.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return (value / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)

    (left, left_scale), (right, right_scale) = scaled(x), scaled(weights)
    y: Tensor = torch.nn.functional.scaled_grouped_mm(
        left, right.mT, left_scale, rowwise, right_scale, rowwise, offs=ends, output_dtype=torch.bfloat16
    )
    return y


def launch(options: argparse.Namespace) -> None:
    config = config_of("tiny" if options.quick else "26M", None)
    fresh = functools.partial(drawn, config, options.device)
    length = 64 if options.quick else 4096
    batch = packed_rows(tuple(n * length // 4096 for n in DOCUMENTS), 4, config.vocab_size, options.device)
    clear(options.device)

    def warm(kernel: Kernel, compile: str) -> tuple[Step, float]:
        step = our_step(config, fresh, batch, kernel=kernel, compile=compile)
        step(), step(), step()  # the third is captured
        return step, timed(step, options.rounds)

    ways = ("none", "step") if options.quick else ("none", "block", "step")
    forms = [(kernel, how) for kernel in KERNELS[options.device] for how in ways]
    found = {form: attempt(functools.partial(warm, *form)) for form in forms}
    print(f"\n4 packed rows of {length}: the step, and how long the device computes in it")
    print("| kernel | compiled | a step | computing | operations | launches |\n|---|---|---:|---:|---:|---:|")
    for (kernel, how), made in found.items():  # all have been timed: a profiler can slow what runs after it
        if isinstance(made, str):
            print(f"| {kernel} | {how} | {made} | | | |", flush=True)
            continue
        step, seconds = made
        busy, *counts = computing(step, options.device)
        cells = f"{seconds * 1e3:.2f} ms | {busy * 1e3:.2f} ms | {counts[0]} | {counts[1]}"
        print(f"| {kernel} | {how} | {cells} |", flush=True)


def computing(run: Step, device: str) -> tuple[float, int, int]:
    """(seconds for which the device computes in one run, the number of its operations, that of the host's launches)."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CUDA, kinds.CPU] if device == "cuda" else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run()
    rows = list(profile.key_averages())
    launched = [row for row in rows if re.match("cu(da)?(Launch|Graph|Memcpy|Memset)", row.key)]
    launches = sum(row.count for row in launched)
    if device == "cuda":
        # Compiled code names its regions, and each such name spans the time of its kernels once more.
        rows = [row for row in rows if str(row.device_type).endswith("CUDA") and not row.is_user_annotation]
        return sum(row.self_device_time_total for row in rows) / 1e6, sum(row.count for row in rows), launches
    return sum(row.self_cpu_time_total for row in rows) / 1e6, sum(row.count for row in rows), launches


def load(options: argparse.Namespace) -> None:
    config = config_of("tiny", None) if options.quick else config_of("8B", options.layers or 32)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        P.save_pretrained(place, config, drawn(config, options.device))
        files = sorted(Path(place).glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        for name, run in reads(place, files, options.device):
            seconds = timed(waits(run, options.device), min(options.rounds, 3))  # of 16 GB each
            print(f"  {name:32s}{seconds:8.2f} s{size / seconds / 1e9:10.2f} GB/s", flush=True)


def reads(place: str, files: list[Path], device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    print("\nreading a checkpoint in bf16, after a first reading")
    yield "plain read of the files", lambda: [len(file.read_bytes()) for file in files]
    yield "fnmodels, to the device", lambda: P.load_pretrained(place, device=device, copy=True)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "steps": steps,
    "experts": experts,
    "launch": launch,
    "load": load,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["26M", "1B", "8B"])
    parser.add_argument("--layers", type=int, help="number of layers (default: that of the size)")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="0: 4 rows of 4,096; 1: a packed one of 32,768 (default: both)"
    )
    parser.add_argument("--only", nargs="+", help="contenders of `steps` whose name has one of these words")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device in bf16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", help="where `load` makes its checkpoint (default: a temporary folder)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here; --quick --device cpu checks that the script runs.")
    if unknown := [part for part in options.parts if part not in PARTS]:
        raise SystemExit(f"There is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}.")
    torch.set_num_threads(options.threads)
    if options.quick:
        options.sizes, options.rounds = ["tiny"], 1
    options.rows = options.rows or ([1] if options.quick else [0, 1])
    for part in options.parts or PARTS:
        PARTS[part](options)


if __name__ == "__main__":
    main()

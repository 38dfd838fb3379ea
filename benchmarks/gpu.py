"""Times training steps on one GPU: model FLOPs utilization beside modules, float8, experts, launches, loading.

    python benchmarks/gpu.py                          all parts on the first CUDA device
    python benchmarks/gpu.py steps --sizes 8B --layers 8
    python benchmarks/gpu.py --quick --device cpu     tiny models on a CPU, to check that everything runs

steps    forward, backward and AdamW in bf16 of Llamas with the proportions of 26M, 1B and 8B, on 4 rows of 4,096
         tokens and on one packed row of 32,768: fnmodels eager, with compiled blocks and with float8 in them, by the
         attention kernels that the device has; the same model as nn.Modules (gpu_twin.py), eager and with compiled
         layers; transformers with SDPA or flash attention. All must agree on the first loss. --layers: how many; one
         that does not fit is reported as such.
experts  one layer of experts, forward and backward, by each of our ways, bf16, and its products alone in float8.
launch   the step of the 26M Llama by each attention kernel on 4 rows of 4,096 tokens: seconds, and for how many of
         them the device computes; what is left are launches.
load     seconds and GB/s of reading a checkpoint of bf16 straight to the device, beside a plain read of the files.

MFU is FLOPs of the model / seconds / peak, of which recomputation is no part; documents count by their own lengths. The
peak is --peak, or what `train.simulate` knows of the device, or that of a large product here.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attention import packed_rows
from gpu_twin import Twin
from moe import BLOCK, block
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import llama, tree
from fnmodels.ops.float8 import cast, product
from train.job.flops import flops_per_token
from train.simulate import MACHINES

Batch = dict[str, Tensor]
Step = Callable[[], float]
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
    return [packed] if quick else [Rows(f"4 rows of {length}", 4, (length,)), packed]


def config_of(size: str, layers: int | None) -> llama.Config:
    own = SIZES[size] | ({} if layers is None else {"num_hidden_layers": layers})
    more = {"model_type": "llama", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    return llama.Config.from_hf({**own, **more, "tie_word_embeddings": False})


def our_step(config: llama.Config, weights: Any, batch: Batch, *, compile: str = "none", **options: Any) -> Step:
    loss = functools.partial(train.next_token_loss, config=config, **options)
    optimizer = train.adamw(1e-5)
    step = train.make_step(loss, optimizer, compile=compile)
    held = [train.init_state(weights, optimizer)]

    def run() -> float:
        held[0], metrics = step(held[0], batch)
        return float(metrics["loss"])

    return run


def module_step(model: torch.nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)

    def run() -> float:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return run


def twin_step(config: llama.Config, weights: Any, batch: Batch, *, compiled: bool) -> Step:
    own = {name: batch[name] for name in ("positions", "segment_ids")}
    _, masks, tables = fnmodels.prepare(config, batch["tokens"], **own)
    single = bool((batch["segment_ids"] == 1).all())
    mask = None if single else masks["full"].dense()
    model = Twin(config, weights, compiled)
    return module_step(model, lambda: model(batch["tokens"], batch["labels"], tables["full"], mask))


def transformers_model(config: llama.Config, weights: Any, *, attention: str) -> Any:
    """transformers' Llama with these weights."""
    import transformers

    names = llama.hf_names(config)
    settings = transformers.LlamaConfig(**{k: v for k, v in config.to_hf().items() if k != "model_type"})
    settings._attn_implementation = attention
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(settings)
    flat = P.flatten(weights)
    model.load_state_dict({names[path]: leaf for path, leaf in flat.items()}, strict=True, assign=True)
    with next(iter(flat.values())).device:
        model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    return model


def transformers_step(config: llama.Config, weights: Any, batch: Batch, *, attention: str) -> Step:
    model = transformers_model(config, tree.map(Tensor.clone, weights), attention=attention)
    model.train()

    def loss_of() -> Tensor:
        logits = model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    return module_step(model, loss_of)


def contenders(config: llama.Config, weights: Any, batch: Batch) -> dict[str, Callable[[], Step]]:
    """{name: a function that builds its step}, so that only one of them holds memory."""
    ours = functools.partial(our_step, config, weights, batch)
    found: dict[str, Callable[[], Step]] = {"fnmodels": ours}
    for kernel in KERNELS[batch["tokens"].device.type]:  # each compiled anew
        found[f"fnmodels {kernel}, compiled blocks"] = functools.partial(ours, kernel=kernel, compile="block")
    eight = {"layer_fn": train.float8_layers, "compile": "block"}
    found["fnmodels float8, compiled blocks"] = functools.partial(ours, **eight)
    found["modules"] = functools.partial(twin_step, config, weights, batch, compiled=False)
    found["modules, compiled layers"] = functools.partial(twin_step, config, weights, batch, compiled=True)
    if importlib.util.find_spec("transformers"):
        flash = importlib.util.find_spec("flash_attn") is not None
        attention = "flash_attention_2" if flash and batch["tokens"].is_cuda else "sdpa"
        theirs = functools.partial(transformers_step, config, weights, batch, attention=attention)
        found[f"transformers {attention}"] = theirs
    return found


def steps(options: argparse.Namespace) -> None:
    peak = peak_of(options)
    for size in options.sizes:
        config = config_of(size, options.layers)
        weights = P.init(config, 0, dtype=torch.bfloat16, device=options.device)
        for rows in [each for i, each in enumerate(rows_of(options.quick)) if i in options.rows]:
            batch = rows.batch(config.vocab_size, options.device)
            tokens = batch["tokens"].numel()
            flops = tokens * flops_per_token(config, llama.spec(config), int(rows.seen))
            layers, millions = config.num_hidden_layers, P.count(config) / 1e6
            print(f"\n{size}, {layers} layers, {millions:,.0f}M parameters, {rows.name}, bf16")
            print("| | tokens/s | MFU | peak memory | first loss |\n|---|---:|---:|---:|---:|")
            first: float | None = None
            for name, build in contenders(config, weights, batch).items():
                if options.only and not any(word in name for word in options.only):
                    continue
                found = one_contender(build, options)
                if isinstance(found, str):
                    print(f"| {name} | {found} | | | |", flush=True)
                    continue
                loss, seconds, memory = found
                first = loss if first is None else first
                assert abs(loss - first) < LOSS_APART, f"{name}: the first loss is {loss}, not {first}"
                rate, share = tokens / seconds, flops / seconds / peak
                print(f"| {name} | {rate:,.0f} | {share:.1%} | {memory:,.0f} MiB | {loss:.4f} |", flush=True)


def one_contender(build: Callable[[], Step], options: argparse.Namespace) -> tuple[float, float, float] | str:
    """(first loss, median seconds, MiB at the peak); or why there is none."""
    gc.collect()
    torch.compiler.reset()  # contenders share code, and each has graphs of its own
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = build()
        loss = step()
        step()
        seconds = timed(step, options.rounds)
    except torch.OutOfMemoryError:
        return "does not fit"
    except (ValueError, NotImplementedError, RuntimeError) as error:  # a kernel without such a mask, dtype or backward
        return f"{type(error).__name__}: {str(error).partition('.')[0][:200]}"
    memory = torch.cuda.max_memory_allocated() / 2**20 if options.device == "cuda" else float("nan")
    return loss, seconds, memory


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
    sizes = BLOCK | ({"hidden_size": 64, "moe_intermediate_size": 64, "tokens": 64} if options.quick else {})
    print(f"\none layer of experts, forward and backward, bf16, {sizes}")
    for name, run in block(torch.bfloat16, sizes, options.device).items():
        both = waits(run, options.device)
        both()
        print(f"  {name:24s}{timed(both, options.rounds) * 1e3:10.3f} ms", flush=True)
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
    for name, run in forms.items():
        both = waits(run, options.device)
        both()
        print(f"  {name:24s}{timed(both, options.rounds) * 1e3:10.3f} ms, {rows} rows", flush=True)


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
    weights = P.init(config, 0, dtype=torch.bfloat16, device=options.device)
    length = 64 if options.quick else 4096
    batch = packed_rows(tuple(n * length // 4096 for n in DOCUMENTS), 4, config.vocab_size, options.device)
    print(f"\n4 packed rows of {length}: the step, and how long the device computes in it")
    print("| kernel | compiled | a step | computing | operations |\n|---|---|---:|---:|---:|")
    for kernel in KERNELS[options.device]:
        for compile in ("none",) if options.quick else ("none", "block"):
            step = our_step(config, weights, batch, kernel=kernel, compile=compile)
            step(), step()
            seconds, (busy, count) = timed(step, options.rounds), computing(step, options.device)
            print(f"| {kernel} | {compile} | {seconds * 1e3:.2f} ms | {busy * 1e3:.2f} ms | {count} |", flush=True)


def computing(run: Step, device: str) -> tuple[float, int]:
    """(seconds for which the device computes in one run, the number of its operations)."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CUDA, kinds.CPU] if device == "cuda" else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run()
    rows = list(profile.key_averages())
    if device == "cuda":
        rows = [row for row in rows if str(row.device_type).endswith("CUDA")]
        return sum(row.self_device_time_total for row in rows) / 1e6, sum(row.count for row in rows)
    return sum(row.self_cpu_time_total for row in rows) / 1e6, sum(row.count for row in rows)


def load(options: argparse.Namespace) -> None:
    config = config_of("tiny", None) if options.quick else config_of("8B", 32)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        P.save_pretrained(place, config, P.init(config, 0, dtype=torch.bfloat16))
        files = sorted(Path(place).glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        for name, run in reads(place, files, options.device):
            seconds = timed(waits(run, options.device), options.rounds)
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
        "--rows", type=int, nargs="+", default=[0, 1], help="0: 4 rows of 4,096; 1: a packed one of 32,768"
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
    for part in options.parts or PARTS:
        PARTS[part](options)


if __name__ == "__main__":
    main()

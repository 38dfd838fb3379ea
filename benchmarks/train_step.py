"""Times one training step (forward, backward, AdamW) of the same 26M-parameter Llama in several libraries.

    python benchmarks/train_step.py                      all contenders, fp32 and bf16
    python benchmarks/train_step.py --quick              a tiny model, one step, to check that everything runs
    python benchmarks/train_step.py --dtype float32 --contenders fnmodels transformers
    python benchmarks/train_step.py --out FOLDER         also draws the chart; --readme updates the README's table

Every contender is a process of its own (contenders.py) that stays alive; each in turn takes a few steps, A B C, A B C,
..., so that a slow minute of the machine hits all of them. The report has medians over all timed steps and ratios of
medians. All keep the memory that they free, as `python -m train` does, and start from the same weights and batch;
before anything is timed fnmodels and transformers must agree on the first loss and on the updated weights. litgpt and
JAX may live in other environments: --litgpt-python and --jax-python, or the variables FNMODELS_BENCH_LITGPT and
FNMODELS_BENCH_JAX, name their interpreters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CONFIG: dict[str, Any] = {
    "vocab_size": 8192,
    "dim": 512,
    "layers": 6,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn": 1408,
    "batch": 4,
    "sequence": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QUICK = {"vocab_size": 512, "dim": 128, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 256, "batch": 2, "sequence": 64}
# name -> (library, compiled). "compiled" is compile="block" for fnmodels, torch.compile(model) for the modules.
CONTENDERS: dict[str, tuple[str, bool]] = {
    "fnmodels": ("fnmodels", False),
    "fnmodels block-compiled": ("fnmodels", True),
    "transformers": ("transformers", False),
    "transformers compiled": ("transformers", True),
    "litgpt": ("litgpt", False),
    "litgpt compiled": ("litgpt", True),
    "JAX jit": ("jax", True),
}
MARKERS = ("<!-- bench:train_step -->", "<!-- /bench:train_step -->")
PAIRS = (("fnmodels", "transformers"), ("fnmodels block-compiled", "transformers compiled"))
# Largest accepted distance of the updated weights, |ours - theirs| / |theirs - start|. AdamW's first update is about
# lr * sign(gradient), so that a gradient near zero may flip; in bf16 gradients differ by rounding, about 2^-8.
TOLERANCE = {"float32": {"loss": 1e-5, "update": 1e-2}, "bfloat16": {"loss": 2e-2, "update": 0.3}}


@dataclass
class Contender:
    name: str
    process: subprocess.Popen[str]
    version: str = ""
    before: int = 0  # resident bytes after the imports, before the weights
    first_seconds: float = 0.0
    first_loss: float = 0.0
    peak: int = 0  # highest resident bytes while the timed steps ran
    peak_start: int = 0  # the same from the build to the second step, compiling included
    seconds: list[float] = field(default_factory=list)

    def ask(self, kind: str, **request: Any) -> dict[str, Any]:
        """Sends one request and returns its answer; an answer with an error raises it here."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"kind": kind, **request}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended without an answer"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def flops_per_step(config: dict[str, Any]) -> float:
    """Per token 2 per weight of a matmul and 2 S D per layer for causal attention; times 3 with the backward."""
    dim, kv_dim = config["dim"], config["kv_heads"] * config["head_dim"]
    weights = (
        config["layers"] * (2 * dim * dim + 2 * dim * kv_dim + 3 * dim * config["ffn"]) + config["vocab_size"] * dim
    )
    attention = config["layers"] * 2 * config["sequence"] * dim
    return 3.0 * config["batch"] * config["sequence"] * (2 * weights + attention)


def draw(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """The common start: fp32 weights under Hugging Face names, one batch of tokens and shifted labels."""
    rng = np.random.default_rng(seed)
    dim, kv_dim, ffn = config["dim"], config["kv_heads"] * config["head_dim"], config["ffn"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], dim)}
    for i in range(config["layers"]):
        names = {"q_proj": (dim, dim), "k_proj": (kv_dim, dim), "v_proj": (kv_dim, dim), "o_proj": (dim, dim)}
        shapes |= {f"model.layers.{i}.self_attn.{name}.weight": shape for name, shape in names.items()}
        names = {"gate_proj": (ffn, dim), "up_proj": (ffn, dim), "down_proj": (dim, ffn)}
        shapes |= {f"model.layers.{i}.mlp.{name}.weight": shape for name, shape in names.items()}
    shapes["lm_head.weight"] = (config["vocab_size"], dim)
    start = {name: rng.standard_normal(shape, dtype=np.float32) * 0.02 for name, shape in shapes.items()}
    norms = [
        f"model.layers.{i}.{n}.weight"
        for i in range(config["layers"])
        for n in ("input_layernorm", "post_attention_layernorm")
    ]
    start |= {name: np.ones(dim, np.float32) for name in [*norms, "model.norm.weight"]}
    tokens = rng.integers(0, config["vocab_size"], (config["batch"], config["sequence"]))
    labels = np.concatenate([tokens[:, 1:], np.full_like(tokens[:, :1], -100)], axis=1)
    return start | {"tokens": tokens, "labels": labels}


def launch(name: str, python: str, scratch: Path) -> Contender:
    environment = dict(os.environ)
    # An empty cache for each, so that the first step counts what compiling costs on a fresh machine.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / f"inductor-{name.replace(' ', '-')}")
    # All keep their freed memory, as `train.keep_freed_memory` has it for one of them.
    environment |= dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**31 - 1))
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), environment.get("PYTHONPATH", "")])
    errors = (scratch / f"{name}.log").open("w")
    process = subprocess.Popen(
        [python, str(HERE / "contenders.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=scratch,
        env=environment,
    )
    return Contender(name, process)


def start(
    names: list[str], pythons: dict[str, str], dtype: str, config: dict[str, Any], threads: int, scratch: Path
) -> list[Contender]:
    """Builds every contender and takes its first two steps; one that cannot run is reported and skipped."""
    started = []
    for name in names:
        library, compiled = CONTENDERS[name]
        one = launch(name, pythons[library], scratch)
        data = str(scratch / "start.npz")
        try:
            built = one.ask(
                "build", library=library, threads=threads, data=data, config=config, dtype=dtype, compiled=compiled
            )
            one.version, one.before = built["version"], built["before"]
            one.ask("reset_peak")
            first = one.ask("steps", count=1)
            one.first_seconds, one.first_loss = first["seconds"][0], first["losses"][0]
            one.ask("weights", path=str(scratch / f"{name}.npz"))
            one.ask("steps", count=1)
            one.peak_start = one.ask("memory")["peak"]
            one.ask("reset_peak")
        except (RuntimeError, OSError) as error:
            print(f"  {name}: left out ({error})", flush=True)
            one.close()
            continue
        print(f"  {name} {one.version}: first step {one.first_seconds:.1f} s, loss {one.first_loss:.6f}", flush=True)
        started.append(one)
    return started


def update_distance(ours: Path, theirs: Path, begin: Path) -> float:
    """|ours - theirs| / |theirs - start| over all weights."""
    a, b, zero = np.load(ours), np.load(theirs), np.load(begin)
    apart = sum(float(((a[name] - b[name]) ** 2).sum()) for name in b.files)
    moved = sum(float(((b[name] - zero[name]) ** 2).sum()) for name in b.files)
    return (apart / moved) ** 0.5


def check(started: list[Contender], dtype: str, scratch: Path) -> dict[str, dict[str, float]]:
    """First loss and first update against transformers; raises when fnmodels disagrees."""
    base = next((one for one in started if one.name == "transformers"), None)
    if base is None:
        return {}
    found = {}
    for one in started:
        distance = update_distance(scratch / f"{one.name}.npz", scratch / "transformers.npz", scratch / "start.npz")
        found[one.name] = {"loss": abs(one.first_loss - base.first_loss), "update": distance}
        print(
            f"  {one.name}: first loss off by {found[one.name]['loss']:.1e}, first update by {distance:.1e} (relative)"
        )
        if one.name.startswith("fnmodels"):
            for key, limit in TOLERANCE[dtype].items():
                if not found[one.name][key] <= limit:
                    gap = f"{found[one.name][key]:.2e} > {limit:.0e}"
                    raise SystemExit(f"{one.name} and transformers differ in {key} ({dtype}): {gap}")
    return found


def measure(started: list[Contender], dtype: str, rounds: int, steps: int, matmul: int) -> float:
    """Runs the rounds; returns the best matmul rate seen, in FLOP/s. The order of contenders rotates."""
    gauge = next((one for one in started if CONTENDERS[one.name][0] != "jax"), None)
    peak = 0.0
    for i in range(rounds):
        if gauge is not None:
            peak = max(peak, gauge.ask("matmul", dtype=dtype, size=matmul)["flops"])
        turn = i % len(started)
        for one in started[turn:] + started[:turn]:
            one.seconds += one.ask("steps", count=steps)["seconds"]
        print(
            f"  round {i + 1}/{rounds}: " + ", ".join(f"{one.name} {one.seconds[-1]:.2f} s" for one in started),
            flush=True,
        )
    for one in started:
        one.peak = one.ask("memory")["peak"]
    return peak


def run(names: list[str], pythons: dict[str, str], dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    print(f"{dtype}: starting", flush=True)
    config, matmul = (CONFIG | QUICK, 128) if options.quick else (CONFIG, 2048)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        np.savez(scratch / "start.npz", **draw(config, options.seed))
        started = start(names, pythons, dtype, config, options.threads, scratch)
        try:
            checks = check(started, dtype, scratch)
            peak = measure(started, dtype, options.rounds, options.steps, matmul) if started else 0.0
        finally:
            for one in started:
                one.close()
    tokens = config["batch"] * config["sequence"]
    rows = {}
    for one in started:
        median = statistics.median(one.seconds)
        rows[one.name] = {
            "version": one.version,
            "tokens_per_second": tokens / median,
            "median_seconds": median,
            "spread_seconds": [min(one.seconds), max(one.seconds)],
            "share_of_matmul_peak": flops_per_step(config) / median / peak if peak else None,
            "first_step_seconds": one.first_seconds,
            "first_loss": one.first_loss,
            "peak_bytes": one.peak,
            "peak_bytes_above_imports": one.peak - one.before,
            "peak_bytes_first_steps": one.peak_start,
            **({"against_transformers": checks[one.name]} if one.name in checks else {}),
        }
    return {"dtype": dtype, "matmul_peak_flops": peak, "contenders": rows, "ratios": ratios(rows)}


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ours over theirs: speed above 1 and memory below 1 are good."""
    pairs = [*PAIRS, ("fnmodels", "JAX jit"), ("fnmodels block-compiled", "JAX jit")]
    pairs += [(ours, ours.replace("fnmodels block-", "litgpt ").replace("fnmodels", "litgpt")) for ours, _ in PAIRS]
    return {
        f"{ours} / {theirs}": {
            "speed": rows[ours]["tokens_per_second"] / rows[theirs]["tokens_per_second"],
            "peak": rows[ours]["peak_bytes"] / max(1, rows[theirs]["peak_bytes"]),
        }
        for ours, theirs in pairs
        if ours in rows and theirs in rows
    }


def table(results: list[dict[str, Any]]) -> str:
    """Two Markdown tables: each contender's figures, and ours over theirs; the dtypes side by side."""
    dtypes = [result["dtype"] for result in results]
    names = [name for name in CONTENDERS if any(name in result["contenders"] for result in results)]
    rows = [[name, *(_cells(result["contenders"].get(name)) for result in results)] for name in names]
    columns = " | ".join(f"{dtype}: tokens/s | of matmul peak | peak memory | first step" for dtype in dtypes)
    lines = [f"| | {columns} |", "|---|" + "---:|" * 4 * len(dtypes)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    pairs = [pair for pair in results[0]["ratios"] if all(pair in result["ratios"] for result in results)]
    if pairs:
        columns = " | ".join(f"{dtype}: speed | peak memory" for dtype in dtypes)
        lines += ["", f"| ours / theirs | {columns} |", "|---|" + "---:|" * 2 * len(dtypes)]
    for pair in pairs:
        found = [result["ratios"][pair] for result in results]
        cells = [f"{one['speed']:.2f}x | {one['peak']:.2f}x" for one in found]
        lines.append(f"| {' | '.join([pair, *cells])} |")
    return "\n".join(lines)


def _cells(row: dict[str, Any] | None) -> str:
    if row is None:
        return "- | - | - | -"
    speed, share = row["tokens_per_second"], row["share_of_matmul_peak"]
    memory, first = row["peak_bytes"] / 2**20, row["first_step_seconds"]
    return f"{speed:,.0f} | {f'{share:.0%}' if share else '-'} | {memory:,.0f} MiB | {first:.1f} s"


def into_readme(text: str, picture: Path, readme: Path) -> None:
    """Writes the table of ratios and the chart between the README's two markers."""
    opening, closing = MARKERS
    before, start, rest = readme.read_text().partition(opening)
    _, end, after = rest.partition(closing)
    if not end:
        raise SystemExit(f"{readme} has no lines {opening} and {closing}.")
    block = f"\n{text}\n\n![tokens per second]({picture.resolve().relative_to(readme.parent).as_posix()})\n"
    readme.write_text(before + start + block + end + after)


def chart(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {"fnmodels": "#1b6ca8", "transformers": "#e0a030", "litgpt": "#8f8f8f", "jax": "#7a5195"}
    tallest = max(len(result["contenders"]) for result in results)
    figure, axes = plt.subplots(1, len(results), figsize=(5.6 * len(results), 0.9 + 0.42 * tallest), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        names = list(result["contenders"])[::-1]
        speeds = [result["contenders"][name]["tokens_per_second"] for name in names]
        bars = axis.barh(names, speeds, color=[colors[CONTENDERS[name][0]] for name in names], height=0.7)
        shares = [result["contenders"][name]["share_of_matmul_peak"] or 0.0 for name in names]
        texts = [f"{speed:,.0f}  ({share:.0%})" for speed, share in zip(speeds, shares, strict=True)]
        axis.bar_label(bars, texts, padding=3, fontsize=8.5)
        axis.set_xlim(0, max(speeds) * 1.28)
        axis.set_title(f"{result['dtype']}: tokens/s (share of matmul peak)", fontsize=10)
        axis.tick_params(labelsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16"],
        default=["float32", "bfloat16"],
        help="of parameters, activations and moments",
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=list(CONTENDERS),
        default=list(CONTENDERS),
        metavar="NAME",
        help=", ".join(CONTENDERS),
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender (default 6)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in one turn (default 3)")
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="cores for each process (default 2)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round of one step; nothing written")
    parser.add_argument("--out", type=Path, help="folder for the picture train_step.png")
    parser.add_argument(
        "--readme", action="store_true", help="with --out: also writes the README's table of ratios and its chart"
    )
    for library in ("litgpt", "jax"):
        default = os.environ.get(f"FNMODELS_BENCH_{library.upper()}", sys.executable)
        parser.add_argument(
            f"--{library}-python", default=default, metavar="PYTHON", help=f"interpreter that has {library}"
        )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.quick:
        options.rounds, options.steps = 1, 1
    pythons = {library: sys.executable for library, _ in CONTENDERS.values()}
    pythons |= {"litgpt": options.litgpt_python, "jax": options.jax_python}
    results = [run(options.contenders, pythons, dtype, options) for dtype in options.dtype]
    text = table(results)
    print("\n" + text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        chart(results, options.out / "train_step.png")
        if options.readme:
            into_readme(text.partition("\n\n")[2], options.out / "train_step.png", HERE.resolve().parent / "README.md")


if __name__ == "__main__":
    main()

"""Measures time and peak memory of loading a sharded bf16 checkpoint, unchanged and cast to fp32.

    python benchmarks/load.py                    2 GB in five files, six rounds
    python benchmarks/load.py --size 50          MB, to check that everything runs
    python benchmarks/load.py --folder DIR       where the checkpoint is made; default: a temporary folder

Contenders are `params.load_pretrained`, `safetensors.torch.load_file` over the files, and transformers'
`AutoModelForCausalLM.from_pretrained`. Each reading is a process of its own, so that peaks do not mix. Imports are not
timed. All must give the same bits. Peak is the largest resident memory during the reading, above that of the process
before; pages of a mapped file count once they are touched.

The cost of touching a mapped file depends more on the state of the page cache than on the reader. A file that was
written in one go is cached in large folios, and 2 GB take 3,700 page faults; parts that were evicted since, because
memory ran short, return in small folios, with 13,500 faults and twice the time for the same reader and file, and the
first reader waits for the disk. So every file is read through before the clock of a reading starts, the rounds use
all orders of the contenders (none always follows transformers), and only readings of one round, which had the same
cache, are compared: the verdict is the median of their ratios.

    lazy       the call alone
    touched    and then every byte is read
    owned      in owned memory: copy=True; load_file and a clone of each tensor; transformers as it is
    fp32       cast: dtype=torch.float32, the same of transformers; load_file and .float() of each tensor
    checks     ours only: config.json and headers checked, and no tensor
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODES = ("lazy", "touched", "owned", "fp32")
SHARDS = 5
Flat = dict[str, Tensor]


def with_fnmodels(folder: Path, mode: str) -> Flat:
    import params as P

    _, params = P.load_pretrained(folder, copy=mode == "owned", dtype=torch.float32 if mode == "fp32" else None)
    return P.flatten(params)


def with_safetensors(folder: Path, mode: str) -> Flat:
    from safetensors.torch import load_file

    flat = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            flat[name] = tensor.float() if mode == "fp32" else tensor.clone() if mode == "owned" else tensor
    return flat


def with_transformers(folder: Path, mode: str) -> Flat:
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())


def checks(folder: Path, mode: str) -> Flat:
    from params.checkpoint.header_checks import check_folder

    with ExitStack() as stack:
        check_folder(folder, stack)
    return {}


CONTENDERS: dict[str, Callable[[Path, str], Flat]] = {
    "fnmodels": with_fnmodels,
    "safetensors load_file": with_safetensors,
    "transformers": with_transformers,
}

IMPORTS = {
    "fnmodels": ("params",),
    "safetensors load_file": ("safetensors.torch",),
    "transformers": ("transformers.models.llama.modeling_llama",),
}


def make(folder: Path, megabytes: int) -> None:
    """Makes a Llama of about this size, in SHARDS files."""
    import params as P
    from fnmodels import llama

    layer = 4 * 1024 * 1024 + 3 * 1024 * 4096
    layers = max(1, round((megabytes * 500_000 - 2 * 8192 * 1024) / layer))
    sizes: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096}
    config = llama.Config(**sizes, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8)
    params = P.init(config, 0, dtype=torch.bfloat16)
    P.save_pretrained(folder, config, params, max_shard_size=2 * P.count(config) // SHARDS + 40_000_000 // SHARDS)


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def page_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def touch(flat: Flat) -> int:
    """Reads every byte; the sum (of machine words, for speed) tells whether two contenders read the same."""
    return sum(int(tensor.reshape(-1).view(torch.int64).sum()) for tensor in flat.values())


def read_through(folder: Path) -> None:
    """Brings every file into the page cache, in case parts were evicted since the last reading."""
    buffer = bytearray(1 << 22)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def child(contender: str, mode: str, folder: Path) -> dict[str, float]:
    """What one reading costs."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    read = checks if mode == "checks" else CONTENDERS[contender]
    for module in IMPORTS[contender]:
        importlib.import_module(module)
    if contender == "fnmodels":
        importlib.import_module("fnmodels").families()  # which imports them all
    read_through(folder)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, faults = memory("VmRSS"), page_faults()
    begin = time.perf_counter()
    flat = read(folder, mode)
    total = touch(flat) if mode == "touched" else None
    seconds = time.perf_counter() - begin
    faults = page_faults() - faults
    peak, size = memory("VmHWM") - before, sum(tensor.nbytes for tensor in flat.values())
    largest = max((tensor.nbytes for tensor in flat.values()), default=0)
    total = touch(flat) if total is None else total
    return {"seconds": seconds, "faults": faults, "peak": peak, "size": size, "largest": largest, "sum": total}


def in_a_process(threads: int, *reading: str) -> dict[str, float]:
    """What `child` returns in a process of its own; in one that is forked if BENCHMARK_START says so, for tests."""
    if os.environ.get("BENCHMARK_START") == "fork":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(child, (*reading[:2], Path(reading[2])))
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": root, "TQDM_DISABLE": "1"}
    command = [sys.executable, __file__, "--child", *reading]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2000, help="of the checkpoint, MB")
    parser.add_argument("--rounds", type=int, default=6, help="six have each order of three contenders once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--child", nargs=3, metavar=("CONTENDER", "MODE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child[0], arguments.child[1], Path(arguments.child[2]))))
        return
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make(Path(name), arguments.size)
        names = arguments.contenders
        orders = list(itertools.permutations(names))
        for turn in range(arguments.rounds):
            runs = [(contender, mode) for mode in MODES for contender in orders[turn % len(orders)]]
            for contender, mode in runs + [("fnmodels", "checks")] * ("fnmodels" in names):
                found.setdefault((contender, mode), []).append(in_a_process(arguments.threads, contender, mode, name))
    for mode in MODES:
        sums = {contender: found[contender, mode][0]["sum"] for contender in arguments.contenders}
        assert len(set(sums.values())) == 1, f"{mode}: the contenders read different bits: {sums}"
    report(found, arguments.contenders)


def report(found: dict[tuple[str, str], list[dict[str, Any]]], contenders: list[str]) -> None:
    """The table, in Markdown."""

    def median(contender: str, mode: str, key: str) -> float:
        return statistics.median(run[key] for run in found[contender, mode])

    print("| reader |", " | ".join(f"{mode} | peak" for mode in MODES), "|")
    print("|---|" + "---:|" * 2 * len(MODES))
    for contender in contenders:
        cells = []
        for mode in MODES:
            cells.append(f"{1e3 * median(contender, mode, 'seconds'):,.0f} ms")
            cells.append(f"{median(contender, mode, 'peak') / 1e6:,.0f} MB")
        print(f"| {contender} |", " | ".join(cells), "|")
    one = found[contenders[0], "owned"][0]
    print(f"\n{one['size'] / 1e6:,.0f} MB, the largest tensor {one['largest'] / 1e6:,.0f} MB")
    faults = (f"{name} {median(name, 'touched', 'faults'):,.0f}" for name in contenders)
    print(f"page faults of touched: {', '.join(faults)}")
    if "fnmodels" not in contenders:
        return
    ours, others = "fnmodels", [name for name in contenders if name != "fnmodels"]
    allowed = median(ours, "checks", "seconds") + 0.05
    if "safetensors load_file" in others:
        allowed += median("safetensors load_file", "lazy", "seconds")
        lazy = median(ours, "lazy", "seconds")
        say("lazy: load_file, our checks and 50 ms", 1e3 * lazy, 1e3 * allowed, "ms")
    if others:
        of_round = [[run["seconds"] for run in found[name, "touched"]] for name in (ours, *others)]
        ratio = statistics.median(first / min(rest) for first, *rest in zip(*of_round, strict=True))
        say("touched: over the faster of the others, round by round", ratio, 1.1, "x")
    for mode in ("owned", "fp32"):
        most = max(run["size"] + run["largest"] for run in found[ours, mode])
        say(f"{mode}: the result and one tensor", median(ours, mode, "peak") / 1e6, most / 1e6, "MB")


def say(what: str, value: float, most: float, unit: str) -> None:
    verdict = "met" if value <= most else "NOT met"
    print(f"{what}: {value:,.3g} {unit} of {most:,.3g} {unit}, {verdict}")


if __name__ == "__main__":
    main()

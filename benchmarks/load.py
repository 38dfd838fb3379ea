"""Time and peak memory of loading a sharded bf16 checkpoint, as it is and cast to fp32.

    python benchmarks/load.py                    2 GB in five files, three rounds
    python benchmarks/load.py --size 50          MB, to see that everything runs
    python benchmarks/load.py --folder DIR       where the checkpoint is made, if not among the temporary files

Contenders are `params.load_pretrained`, `safetensors.torch.load_file` over the files, and transformers'
`AutoModelForCausalLM.from_pretrained`. Each reading is a process of its own, so that peaks do not mix; they take turns
within a round, and in beginning it, so that a slow minute of the machine hits all of them; reported are medians.
Imports are not timed, and the files are in the page cache. All must give the same bits. Peak is the largest resident
memory during the reading, above what the process had before; pages of a mapped file count once they are touched.

    lazy       the call alone
    touched    and then every byte is read
    owned      in memory of its own: copy=True; load_file and a clone of each tensor; transformers as it is
    fp32       cast: dtype=torch.float32, the same of transformers; load_file and .float() of each tensor
    checks     of ours alone: config.json and headers checked, and no tensor
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
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
    from params.load import check

    with ExitStack() as stack:
        check(folder, stack)
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
    """A Llama of about this size, in SHARDS files."""
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


def touch(flat: Flat) -> int:
    """Read every byte; the sum, of whole words and therefore quick, says whether two contenders read the same."""
    return sum(int(tensor.reshape(-1).view(torch.int64).sum()) for tensor in flat.values())


def child(contender: str, mode: str, folder: Path) -> None:
    """One reading, told as JSON."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    read = checks if mode == "checks" else CONTENDERS[contender]
    for module in IMPORTS[contender]:
        importlib.import_module(module)
    if contender == "fnmodels":
        importlib.import_module("fnmodels").families()  # which imports them all
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    begin = time.perf_counter()
    flat = read(folder, mode)
    total = touch(flat) if mode == "touched" else None
    seconds = time.perf_counter() - begin
    peak, size = memory("VmHWM") - before, sum(tensor.nbytes for tensor in flat.values())
    largest = max((tensor.nbytes for tensor in flat.values()), default=0)
    total = touch(flat) if total is None else total
    print(json.dumps({"seconds": seconds, "peak": peak, "size": size, "largest": largest, "sum": total}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2000, help="of the checkpoint, MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--child", nargs=3, metavar=("CONTENDER", "MODE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1], Path(arguments.child[2]))
        return
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make(Path(name), arguments.size)
        names = arguments.contenders
        for turn in range(arguments.rounds):
            # Each begins in its turn: the first to touch the files after someone's large allocations pays for these.
            turned = names[turn % len(names) :] + names[: turn % len(names)]
            runs = [(contender, mode) for mode in MODES for contender in turned]
            for contender, mode in runs + [("fnmodels", "checks")] * ("fnmodels" in names):
                command = [sys.executable, __file__, "--child", contender, mode, name]
                root = str(Path(__file__).parents[1])
                environment = os.environ | {
                    "OMP_NUM_THREADS": str(arguments.threads),
                    "PYTHONPATH": root,
                    "TQDM_DISABLE": "1",
                }
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                found.setdefault((contender, mode), []).append(json.loads(done.stdout))
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
    if "fnmodels" not in contenders:
        return
    ours, others = "fnmodels", [name for name in contenders if name != "fnmodels"]
    allowed = median(ours, "checks", "seconds") + 0.05
    if "safetensors load_file" in others:
        allowed += median("safetensors load_file", "lazy", "seconds")
        lazy = median(ours, "lazy", "seconds")
        say("lazy: load_file, our checks and 50 ms", 1e3 * lazy, 1e3 * allowed, "ms")
    if others:
        fastest = min(median(name, "touched", "seconds") for name in others)
        say("touched: 1.1 x the faster of the others", median(ours, "touched", "seconds"), 1.1 * fastest, "s")
    for mode in ("owned", "fp32"):
        most = max(run["size"] + run["largest"] for run in found[ours, mode])
        say(f"{mode}: the result and one tensor", median(ours, mode, "peak") / 1e6, most / 1e6, "MB")


def say(what: str, value: float, most: float, unit: str) -> None:
    verdict = "met" if value <= most else "NOT met"
    print(f"{what}: {value:,.3g} {unit} of {most:,.3g} {unit}, {verdict}")


if __name__ == "__main__":
    main()

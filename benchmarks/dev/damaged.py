"""Reads the corpus of damaged checkpoints (tests/params/checkpoint/damage) with fnmodels and with other readers.

    python benchmarks/dev/damaged.py                           about five minutes on one core
    python benchmarks/dev/damaged.py --only format/ --list     one group, and the outcome of each case

transformers is `AutoModelForCausalLM.from_pretrained(folder)`; huggingface_hub is `load_torch_model(model, folder,
strict=True)` into a model of the undamaged configuration, so damage to config.json does not affect it. Each case
is read in a child process with a time limit and at most 6 GB of memory. An error is bare where neither its message
nor anything printed names a file, a tensor or a field; an acceptance is silent where nothing is printed or logged.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).parents[2]))

import huggingface_hub
import torch
import transformers

import params as P
from tests.params.checkpoint.damage import BASES, Damage, corpus, make_bases

Reader = Callable[[Path, Damage], object]
MEMORY = 6 << 30  # bytes beyond what the process has
COLUMNS = ("refused", "bare error", "warned", "silent", "hang", "crash")
TITLES = {
    "refused": "refused, and the place is named",
    "bare error": "bare error",
    "warned": "accepted with a warning",
    "silent": "accepted silently",
    "hang": "over 10 s",
    "crash": "crash",
}


def by_fnmodels(folder: Path, damage: Damage) -> object:
    return P.load_pretrained(folder, check_finite=damage.check_finite)


def by_transformers(folder: Path, damage: Damage) -> object:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def by_hub(folder: Path, damage: Damage) -> object:
    config = BASES[damage.base][0].to_hf()
    kind = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(kind)
    return huggingface_hub.load_torch_model(model, folder, strict=True)


READERS: dict[str, Reader] = {"fnmodels": by_fnmodels, "transformers": by_transformers, "huggingface_hub": by_hub}


# Cases that fnmodels refuses as unsupported and other readers may support; and shards that others ignore by rule.
OURS = (
    "config/an interleaved rotation",
    "config/cross attention",
    "config/the quantization gptq",
    "config/the quantization bitsandbytes",
)
OURS += ("config/a part of the head that rotates", "config/an architecture with another head")
OURS += ("config/heads that are pruned", "config/GPT-2 with heads that are pruned")
OURS += ("config/attention in both directions", "config/100,000 heads for further tokens")
OURS += ("index/a shard that the index does not name", "index/one file, and shards that nothing names")
# huggingface_hub does not read config.json, and reads a file as well as a folder, and a single file of any name.
NOT_HUBS = ("config/", "tensors/config tied", "tensors/files tied", "tensors/fp8", "tensors/good: fp8", "files/model-")
NOT_HUBS += ("files/a save that was cut short", "files/a file for the folder", "files/adapter", "files/consolidated.s")


def applies(name: str, damage: Damage) -> bool:
    """Whether the case applies to this reader. Only fnmodels checks for values that are not finite."""
    if name == "fnmodels":
        return True
    return not (
        damage.check_finite
        or damage.name.startswith(OURS)
        or (name == "huggingface_hub" and damage.name.startswith(NOT_HUBS))
    )


def outcome(reader: Reader, folder: Path, damage: Damage, limit: float) -> tuple[str, str]:
    """(one of COLUMNS, the message), from a child that reads the folder."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if not child:
            _child(reader, folder, damage, said.fileno(), answer.fileno())
        begin, status = time.monotonic(), 0
        while time.monotonic() - begin < limit:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.005)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hang", f"after {limit:g} s"
        said.seek(0)
        answer.seek(0)
        text, result = said.read().strip(), answer.read()
    if not result:
        return "crash", f"status {status}"
    error = json.loads(result)
    if error is None:
        return ("warned" if text else "silent"), text
    return ("refused" if _names(folder, damage, f"{error} {text}") else "bare error"), error


def _child(reader: Reader, folder: Path, damage: Damage, said: int, answer: int) -> None:
    """Read, and write null or the error's text to `answer`. Never returns."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(said, 1)
    os.dup2(said, 2)
    warnings.simplefilter("always")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    error = None
    try:
        reader(folder, damage)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answer, json.dumps(error).encode())
    os._exit(0)


def _names(folder: Path, damage: Damage, text: str) -> bool:
    """Whether the message names the place: a file, a tensor, or a field of config.json, also in plain words."""
    quoted = [part for words in damage.words for part in re.findall(r"'([^']+)'", words)]
    fields = [] if not damage.name.startswith("config/") else [*BASES[damage.base][0].to_hf(), "rope"]
    known = (str(folder), ".json", ".safetensors", "model.", "lm_head", "h.0.", *quoted, *fields)
    return any(part in text or part in text.replace(" ", "_") for part in known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases begin with this")
    parser.add_argument("--readers", nargs="*", default=list(READERS), choices=list(READERS))
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for each case")
    parser.add_argument("--list", action="store_true", help="say what became of each case that was not refused")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    cases = [damage for damage in corpus() if damage.name.startswith(arguments.only)]
    bad: dict[str, Counter[str]] = {name: Counter() for name in arguments.readers}
    good: dict[str, Counter[str]] = {name: Counter() for name in arguments.readers}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_bases(place / "bases")
        for reader in arguments.readers:  # late imports happen before the first fork
            for base in BASES:
                with contextlib.suppress(RuntimeError):  # huggingface_hub calls a tied head missing
                    READERS[reader](place / "bases" / base, Damage("", lambda folder: None, base=base))
        for damage in cases:
            for reader in arguments.readers:
                if not applies(reader, damage):
                    continue
                (place / "case").mkdir()
                folder = place / "case" / "model"
                shutil.copytree(place / "bases" / damage.base, folder)
                folder = damage.do(folder) or folder
                what, text = outcome(READERS[reader], folder, damage, arguments.limit)
                (bad if damage.kind else good)[reader][what] += 1
                if arguments.list and what not in (("refused",) if damage.kind else ("silent", "warned")):
                    print(f"{damage.name:60} {reader:16} {what:10} {' '.join(text.split())[:150]}", flush=True)
                shutil.rmtree(place / "case")
    report(bad, good)


def report(bad: dict[str, Counter[str]], good: dict[str, Counter[str]]) -> None:
    """The table, in Markdown."""
    print("| reader | bad ones |", " | ".join(TITLES[column] for column in COLUMNS), "| good ones | loaded |")
    print("|---|" + "---:|" * (len(COLUMNS) + 3))
    for name, counts in bad.items():
        version = "" if name == "fnmodels" else f" {importlib.metadata.version(name)}"
        row = [str(counts[column]) for column in COLUMNS]
        loaded = good[name]["silent"] + good[name]["warned"]
        print(f"| {name}{version} | {counts.total()} |", " | ".join(row), f"| {good[name].total()} | {loaded} |")


if __name__ == "__main__":
    main()

"""Memory and speed of training on a stream against text in memory.

    python benchmarks/dev/stream.py --measure speed --steps 50 --rounds 2      # three minutes on two cores
    python benchmarks/dev/stream.py --measure memory --steps 20 --rounds 1     # a corpus of 2 GB

A corpus of random words is written to a temporary folder, which is deleted at the end. Each run is a process of the
main job: 20 MB in memory, the same 20 MB as a stream, and for memory all of it as a stream, in turns. The table has the
peak of resident memory, and the tokens per second of the steps' wall time, which includes waiting for batches.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = 20_000_000  # bytes


def write_corpus(path: Path, size: int) -> None:
    """Lines of JSON with texts of random words, of `size` bytes in all."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(5000)]
    blocks = [" ".join(draw.choices(words, k=150)) for _ in range(2000)]
    with path.open("w") as file:
        number = 0
        while file.tell() < size:
            for _ in range(1000):
                text = f"document {number}. " + " ".join(draw.choices(blocks, k=draw.randint(1, 4)))
                file.write(json.dumps({"text": text}) + "\n")
                number += 1


def measured(folder: Path, name: str, data: Path, flags: list[str]) -> tuple[float, float]:
    """(peak MB, tokens per second of the steps behind the first ten) of a run of the main job."""
    run = folder / f"run-{name}-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "train", "--run", str(run), "--data", str(data), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"XDG_CACHE_HOME": str(folder)})
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the run on {data} ended with {os.waitstatus_to_exitcode(status)}")
    rows = [json.loads(line) for line in (run / "speed.jsonl").read_text().splitlines()]
    tokens = [row["tokens_per_second"] * row["seconds"] for row in rows[10:]]
    scale = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return usage.ru_maxrss / scale, sum(tokens) / sum(row["seconds"] for row in rows[10:])


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--megabytes", type=int, default=2000)
    command.add_argument("--steps", type=int, default=60)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--measure", choices=("speed", "memory"), default="memory")
    arguments = command.parse_args()
    flags = ["--steps", str(arguments.steps), "--save-every", str(arguments.steps), "--eval-rows", "4"]
    flags += ["--sample-tokens", "4", "--eval-every", str(arguments.steps)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_corpus(folder / "small.jsonl", SMALL)
        kinds: dict[str, tuple[str, list[str]]] = {
            "20 MB in memory": ("small.jsonl", []),
            "20 MB as a stream": ("small.jsonl", ["--stream", "1024"]),
        }
        if arguments.measure == "memory":
            write_corpus(folder / "large.jsonl", arguments.megabytes * 1_000_000)
            kinds[f"{arguments.megabytes} MB as a stream"] = "large.jsonl", ["--stream", "1024"]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for _ in range(arguments.rounds):
            for name, (file, more) in kinds.items():
                found[name].append(measured(folder, file, folder / file, flags + more))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    first = medians["20 MB in memory"]
    print("| corpus | peak, MB | above the first | tokens/s | by the first |\n|---|---|---|---|---|")
    for name, (peak, speed) in medians.items():
        print(f"| {name} | {peak:,.0f} | {peak - first[0]:+,.0f} | {speed:,.0f} | {speed / first[1]:.1%} |")


if __name__ == "__main__":
    main()

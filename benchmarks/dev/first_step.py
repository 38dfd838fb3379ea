"""Times the first step of compiled models in new processes: with an empty disk cache of Inductor, and a second start.

    python benchmarks/dev/first_step.py
    python benchmarks/dev/first_step.py --quick --contenders "fnmodels block-compiled"

The model is the 26M Llama of train_step.py, on rows of 512 tokens. A first step traces, compiles and runs; the second
start finds what the first left on the disk. Each start is a process of its own; imports are not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import above  # noqa: F401
import numpy as np
from train_step import CONFIG, CONTENDERS, QUICK, draw, launch

COMPILED = ("fnmodels block-compiled", "transformers compiled")
STARTS = ("an empty cache", "second start")


def first_step(name: str, python: str, scratch: Path, options: argparse.Namespace, dtype: str) -> float:
    """Seconds of the first step of a new process, whose cache is that of the last one of this name."""
    library, compiled = CONTENDERS[name]
    one = launch(name, python, scratch)
    try:
        given = {"library": library, "compiled": compiled, "config": options.config, "dtype": dtype}
        one.ask("build", threads=options.threads, data=str(scratch / "start.npz"), **given)
        return float(one.ask("steps", count=1)["seconds"][0])
    finally:
        one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=COMPILED, default=COMPILED)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the contenders")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.config = CONFIG | QUICK if options.quick else CONFIG
    print(f"| | {' | '.join(f'{dtype}, {start}' for dtype in options.dtype for start in STARTS)} |")
    print("|---|" + "---:|" * len(options.dtype) * len(STARTS))
    for name in options.contenders:
        cells = []
        for dtype in options.dtype:
            with tempfile.TemporaryDirectory() as folder:
                scratch = Path(folder)
                np.savez(scratch / "start.npz", **draw(options.config, 0))
                cells += [f"{first_step(name, options.python, scratch, options, dtype):.1f} s" for _ in STARTS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

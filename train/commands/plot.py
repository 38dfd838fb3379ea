"""loss.png: train and held-out loss over the steps, and what zlib reaches on the same held-out text; below, what else
there is to watch: learning rate, gradient norm, tokens per second, the share of the peak, how even experts are used.

python -m train.plot RUN [RUN ...] draws the curves of several runs on one picture.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from train.command_line import Parser, run_command
from train.job.pictures import draw_losses


def parser() -> Parser:
    made = Parser(prog="python -m train.plot", description="The loss curves of several runs on one picture.")
    made.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    made.add_argument("--out", type=Path, default=Path("curves.png"), metavar="PNG", help="default %(default)s")
    return made


def plot(arguments: argparse.Namespace) -> int:
    draw_losses(arguments.out, {str(run): run for run in arguments.runs})
    print(f"curves: {arguments.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("python -m train.plot", parser, plot, argv, needs=("matplotlib", "tensorboard"))

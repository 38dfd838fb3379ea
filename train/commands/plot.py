"""python -m train.plot RUN [RUN ...]: plots the loss curves of several runs into one figure.

Panels below the losses show learning rate, gradient norm, tokens per second, MFU and expert load.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from train.command_line import Parser, program_name, run_command
from train.job.pictures import draw_losses


def _name() -> str:
    return program_name("fnmodels-plot", "train.plot")


def parser() -> Parser:
    flags = Parser(prog=_name(), description="Plot the loss curves of several runs into one figure.")
    flags.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    flags.add_argument("--out", type=Path, default=Path("curves.png"), metavar="PNG", help="default %(default)s")
    return flags


def plot(arguments: argparse.Namespace) -> int:
    draw_losses(arguments.out, {str(run): run for run in arguments.runs})
    print(f"curves: {arguments.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, plot, argv, needs=("matplotlib", "tensorboard"))

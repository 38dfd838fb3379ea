"""loss.png: train and held-out loss over the steps, and what zlib reaches on the same held-out text.

python -m train.plot RUN [RUN ...] draws the curves of several runs on one picture.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from train.commands import Parser, run_command
from train.errors import UserError
from train.files import write_atomic
from train.metrics import Row, read_rows

NATS_PER_BIT = math.log(2)


def loss_picture(
    path: Path, rows: list[Row], *, bytes_per_token: float, zlib_bits: float, final_loss: float | None = None
) -> None:
    """Draw the rows of metrics.jsonl. No pyplot: a figure of our own leaves the caller's backend and figures alone.

    `bytes_per_token` of the held-out text turns nats per token (left) into bits per byte (right); `zlib_bits` is in
    bits per byte; `final_loss` is the loss over all held-out documents, of which the curve sees a part.
    """
    to_nats = NATS_PER_BIT * bytes_per_token
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    trained = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    held = [(row["step"], row["heldout_loss"]) for row in rows if row.get("heldout_loss") is not None]
    if trained:
        steps, losses = zip(*trained, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="train, each step")
        axes.plot(steps, smooth(losses), color="tab:blue", linewidth=1.6, label="train, running mean")
    if held:
        axes.plot(*zip(*held, strict=True), color="tab:orange", marker="o", markersize=4, label="held out, a sample")
    if final_loss is not None and rows:
        axes.plot(rows[-1]["step"], final_loss, "*", color="tab:red", markersize=12, label="held out, all files")
    axes.axhline(zlib_bits * to_nats, color="tab:gray", linestyle="--", label=f"zlib -9: {zlib_bits:.2f} bits per byte")
    axes.set(xlabel="step", ylabel="loss in nats per token", title=title(final_loss, to_nats))
    bits = axes.secondary_yaxis(
        "right", functions=(lambda y: np.asarray(y) / to_nats, lambda y: np.asarray(y) * to_nats)
    )
    bits.set_ylabel("bits per byte of held-out text")
    axes.grid(alpha=0.3)
    axes.legend()
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))


def title(final_loss: float | None, to_nats: float) -> str:
    return "Loss" if final_loss is None else f"Loss; at the end {final_loss / to_nats:.3f} bits per byte held out"


def smooth(losses: tuple[float, ...]) -> list[float]:
    """Running mean over the last tenth of what was seen, at most 50 steps: follows the steep start, calms the rest."""
    means = []
    for index in range(len(losses)):
        window = losses[index - min(index // 10, 49) : index + 1]
        means.append(sum(window) / len(window))
    return means


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, train loss) of a run folder. UserError where it has none."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{run} is no run folder: it has no {file.name}")
    found = [(row["step"], row["loss"]) for row in read_rows(file) if row.get("loss") is not None]
    if not found:
        raise UserError(f"{file} has no loss in it yet")
    return found


def curves(path: Path, runs: Mapping[str, Path]) -> None:
    """Running means of the train losses of {name: run folder}, each step's own pale behind them."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, run in runs.items():
        steps, values = zip(*losses(run), strict=True)
        (line,) = axes.plot(steps, smooth(values), linewidth=1.6, label=name)
        axes.plot(steps, values, color=line.get_color(), alpha=0.2, linewidth=0.8)
    axes.set(xlabel="step", ylabel="train loss in nats per token", title="Running mean, and each step")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))


def parser() -> Parser:
    made = Parser(prog="python -m train.plot", description="The loss curves of several runs on one picture.")
    made.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    made.add_argument("--out", type=Path, default=Path("curves.png"), metavar="PNG", help="default %(default)s")
    return made


def plot(arguments: argparse.Namespace) -> int:
    curves(arguments.out, {str(run): run for run in arguments.runs})
    print(f"curves: {arguments.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("python -m train.plot", parser, plot, argv, needs=("matplotlib", "tensorboard"))


if __name__ == "__main__":
    sys.exit(main())

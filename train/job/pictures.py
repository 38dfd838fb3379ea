"""Loss curves and other pictures of runs, drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fnmodels.errors import UserError
from params.io.files import write_atomic
from train.job.metrics_log import Row, read_rows

NATS_PER_BIT = math.log(2)


PICTURES = (".png", ".svg", ".pdf")


BELOW = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU",
    "expert_load": "busiest expert / mean",
}


@dataclass(frozen=True)
class Run:
    """The rows of metrics.jsonl and of speed.jsonl."""

    rows: list[Row]
    costs: list[Row]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever there is one, of either file."""
        return [(row["step"], row[name]) for row in (*self.rows, *self.costs) if row.get(name) is not None]


def loss_picture(
    path: Path,
    run: Run,
    *,
    bytes_per_token: float,
    zlib_bits: float,
    final_loss: float | None = None,
    train: str = "train",
    heldout: str = "held out",
) -> None:
    """Draw a run. No pyplot: a figure of our own leaves the caller's backend and figures alone.

    `bytes_per_token` of the held-out text turns nats per token (left) into bits per byte (right); `zlib_bits` is in
    bits per byte; `final_loss` is the loss over all held-out documents, of which the curve sees a part; `train` and
    `heldout` are what the curves are called.
    """
    to_nats = NATS_PER_BIT * bytes_per_token
    figure, axes = sheet({"": run})
    trained, held = run.curve("loss"), run.curve("heldout_loss")
    if trained:
        steps, losses = zip(*trained, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label=f"{train}, each step")
        axes.plot(steps, smooth(losses), color="tab:blue", linewidth=1.6, label=f"{train}, running mean")
    if held:
        axes.plot(*zip(*held, strict=True), color="tab:orange", marker="o", markersize=4, label=f"{heldout}, a sample")
    if final_loss is not None and run.rows:
        axes.plot(run.rows[-1]["step"], final_loss, "*", color="tab:red", markersize=12, label=f"{heldout}, all files")
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


def sheet(runs: Mapping[str, Run]) -> tuple[Figure, Axes]:
    """A figure with place for the losses, and below it a small picture of each quantity that a run has."""
    present = [name for name in BELOW if any(run.curve(name) for run in runs.values())]
    if not present:
        figure = Figure(figsize=(8, 5), layout="constrained")
        return figure, figure.subplots()
    figure = Figure(figsize=(8, 7), layout="constrained")
    grid = figure.add_gridspec(2, len(present), height_ratios=(5, 2))
    for place, name in enumerate(present):
        axes = figure.add_subplot(grid[1, place])
        for color, run in zip(colors(), runs.values(), strict=False):  # there is no end of colors
            if curve := run.curve(name):
                axes.plot(*zip(*curve, strict=True), color=color, linewidth=0.8)
        axes.set_title(BELOW[name], fontsize="x-small")
        axes.tick_params(labelsize="x-small")
        axes.grid(alpha=0.3)
    return figure, figure.add_subplot(grid[0, :])


def colors() -> Iterator[str]:
    """Matplotlib's own, without end."""
    return (f"C{number}" for number in count())


def read_run(folder: Path) -> Run:
    """UserError where it is no run folder, or has no loss yet."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{folder} is no run folder: it has no {file.name}")
    run = Run(read_rows(file), read_rows(folder / "speed.jsonl"))
    if not run.curve("loss"):
        raise UserError(f"{file} has no loss in it yet")
    return run


def check_name(path: Path) -> None:
    if path.suffix not in PICTURES:
        raise UserError(f"--out {path}: the name of a picture ends in {' or '.join(PICTURES)}")


def curves(path: Path, folders: Mapping[str, Path]) -> None:
    """Running means of the train losses of {name: run folder}, each step's own pale behind; held-out ones dotted."""
    check_name(path)
    runs = {name: read_run(folder) for name, folder in folders.items()}
    figure, axes = sheet(runs)
    for color, (name, run) in zip(colors(), runs.items(), strict=False):  # there is no end of colors
        steps, values = zip(*run.curve("loss"), strict=True)
        axes.plot(steps, smooth(values), color=color, linewidth=1.6, label=name)
        axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
        if held := run.curve("heldout_loss"):
            axes.plot(*zip(*held, strict=True), "o:", color=color, markersize=3, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss in nats per token", title="Train loss: running mean, and each step")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))

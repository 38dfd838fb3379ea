"""Plots of runs with matplotlib: loss curves, and panels of learning rate, gradient norm, speed, memory and MFU."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fnmodels.errors import UserError
from fnmodels.files import write_atomic
from train.job.metrics_log import Row, read_rows

NATS_PER_BIT = math.log(2)
IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
PANELS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "peak_memory": "peak memory, GiB",
    "mfu": "MFU",
    "expert_load": "busiest expert / mean",
    "turns": "turns of a conversation",
    "mistakes": "refused calls",
}


@dataclass(frozen=True)
class RunRows:
    """The rows of a run's metrics.jsonl and speed.jsonl."""

    rows: list[Row]
    costs: list[Row]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of all rows of either file that have the value."""
        return [(row["step"], row[name]) for row in (*self.rows, *self.costs) if row.get(name) is not None]


@contextmanager
def plain_style() -> Iterator[None]:
    """matplotlib's own defaults, and texts as they are, for as long as a block or a decorated function.

    A matplotlibrc in the working folder, perhaps a stranger's, would apply otherwise: it can start LaTeX.
    """
    with rc_context({**rcParamsDefault, "text.parse_math": False}):
        yield


@plain_style()
def draw_run(
    path: Path,
    run: RunRows,
    *,
    bytes_per_token: float,
    zlib_bits: float,
    final_loss: float | None = None,
    train: str = "train",
    heldout: str = "held out",
) -> None:
    """Plots the losses of one run to `path`, without pyplot, which would touch the caller's backend and figures.

    bytes_per_token: of the held-out text, converts nats per token (left axis) to bits per byte (right axis). zlib_bits:
    bits per byte of zlib, a horizontal line. final_loss: over all held-out documents, while the curve is over a sample.
    train, heldout: the labels of the curves.
    """
    to_nats = NATS_PER_BIT * bytes_per_token
    figure, axes = figure_with_panels({"": run})
    trained, held = run.curve("loss"), run.curve("heldout_loss")
    if trained:
        steps, losses = zip(*trained, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label=f"{train}, each step")
        axes.plot(steps, running_mean(losses), color="tab:blue", linewidth=1.6, label=f"{train}, running mean")
    if held:
        axes.plot(*zip(*held, strict=True), color="tab:orange", marker="o", markersize=4, label=f"{heldout}, a sample")
    if final_loss is not None and run.rows:
        axes.plot(run.rows[-1]["step"], final_loss, "*", color="tab:red", markersize=12, label=f"{heldout}, all files")
    axes.axhline(zlib_bits * to_nats, color="tab:gray", linestyle="--", label=f"zlib -9: {zlib_bits:.2f} bits per byte")
    bits = axes.secondary_yaxis(
        "right", functions=(lambda y: np.asarray(y) / to_nats, lambda y: np.asarray(y) * to_nats)
    )
    bits.set_ylabel("bits per byte of held-out text")
    at_end = "" if final_loss is None else f"; at the end {final_loss / to_nats:.3f} bits per byte held out"
    save_losses(path, figure, axes, f"Loss{at_end}")


def save_losses(
    path: Path,
    figure: Figure,
    axes: Axes,
    title: str,
    unit: str = " in nats per token",
    *,
    x: str = "step",
    y: str = "loss",
) -> None:
    axes.set(xlabel=x, ylabel=f"{y}{unit}", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))


UNITS = {"peak_memory": 2.0**30}  # what a panel divides by


def running_mean(losses: tuple[float, ...]) -> list[float]:
    """Running mean over the last tenth of the steps so far, at most 50: follows the steep start, smooths the rest."""
    means = []
    for index in range(len(losses)):
        window = losses[index - min(index // 10, 49) : index + 1]
        means.append(sum(window) / len(window))
    return means


def figure_with_panels(runs: Mapping[str, RunRows]) -> tuple[Figure, Axes]:
    """A figure with axes for the losses, and below them a small panel per quantity that some run has."""
    present = [name for name in PANELS if any(run.curve(name) for run in runs.values())]
    if not present:
        figure = Figure(figsize=(8, 5), layout="constrained")
        return figure, figure.subplots()
    figure = Figure(figsize=(8, 7), layout="constrained")
    grid = figure.add_gridspec(2, len(present), height_ratios=(5, 2))
    for column, name in enumerate(present):
        axes = figure.add_subplot(grid[1, column])
        for number, run in enumerate(runs.values()):
            if curve := [(step, value / UNITS.get(name, 1.0)) for step, value in run.curve(name)]:
                axes.plot(*zip(*curve, strict=True), color=f"C{number}", linewidth=0.8)
        axes.set_title(PANELS[name], fontsize="x-small")
        axes.tick_params(labelsize="x-small")
        axes.grid(alpha=0.3)
    return figure, figure.add_subplot(grid[0, :])


def read_run(folder: Path, curves: Sequence[str] = ("loss",)) -> RunRows:
    """Reads a run folder. UserError where it is none, or has none of these curves yet."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{folder} is no run folder: it has no {file.name}")
    run = RunRows(read_rows(file), read_rows(folder / "speed.jsonl"))
    if not any(map(run.curve, curves)):
        raise UserError(f"{file} has no {curves[0]} in it yet")
    return run


def check_suffix(path: Path, flag: str = "--out") -> None:
    if path.suffix not in IMAGE_SUFFIXES:
        raise UserError(f"{flag} {path}: the name of a picture ends in {' or '.join(IMAGE_SUFFIXES)}")


def draw_losses(path: Path, folders: Mapping[str, Path]) -> None:
    """`draw_runs` of {name: run folder}, or `draw_rewards` of runs of reinforcement learning.

    UserError where one is no run folder, they are of both kinds, or the file's name is no picture's.
    """
    check_suffix(path)
    runs = {name: read_run(folder, ("loss", "reward")) for name, folder in folders.items()}
    rewarded = [name for name, run in runs.items() if run.curve("reward")]
    if rewarded and len(rewarded) < len(runs):
        raise UserError(f"{rewarded[0]} has rewards and others have losses: draw the two kinds apart")
    (draw_rewards if rewarded else draw_runs)(path, runs)


@plain_style()
def draw_rewards(path: Path, runs: Mapping[str, RunRows]) -> None:
    """Plots the mean reward of each update of runs of reinforcement learning, raw and as running means."""
    figure, axes = figure_with_panels(runs)
    for number, (name, run) in enumerate(runs.items()):
        updates, values = zip(*run.curve("reward"), strict=True)
        near = [values[max(0, at - 1) : at + 2] for at in range(len(values))]
        axes.plot(updates, [sum(some) / len(some) for some in near], color=f"C{number}", linewidth=1.6, label=name)
        axes.plot(updates, values, ".", color=f"C{number}", alpha=0.5, markersize=4)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))  # rewards mostly begin at 0
    title = "Mean reward of each update, and the mean of the nearest three"
    save_losses(path, figure, axes, title, "", x="update", y="mean reward")


@plain_style()
def draw_runs(path: Path, runs: Mapping[str, RunRows], *, unit: str = " in nats per token") -> None:
    """Plots the train losses of runs, raw and as running means, and the held-out losses, dotted."""
    figure, axes = figure_with_panels(runs)
    for number, (name, run) in enumerate(runs.items()):
        color = f"C{number}"
        steps, values = zip(*run.curve("loss"), strict=True)
        axes.plot(steps, running_mean(values), color=color, linewidth=1.6, label=name)
        axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
        if held := run.curve("heldout_loss"):
            axes.plot(*zip(*held, strict=True), "o:", color=color, markersize=3, label=f"{name}, held out")
    save_losses(path, figure, axes, "Train loss: running mean, and each step", unit)

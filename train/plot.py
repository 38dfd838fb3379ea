"""loss.png: train and held-out loss over the steps, and what zlib reaches on the same held-out text."""

import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from train.files import write_atomic
from train.metrics import Row

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
    trained = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
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

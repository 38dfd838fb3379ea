"""Metrics of a run: metrics.jsonl with one flushed row per optimizer step, speed.jsonl, trackers, and divergence.

metrics.jsonl has the same bytes for a resumed run as for an uninterrupted one: no value in it depends on the clock.
Times and memory go into speed.jsonl.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor

from fnmodels.errors import UserError
from fnmodels.files import open_append, read_bytes, write_text
from params.io.files import parse_line
from train.command_line import DIVERGED
from train.run_options import Balance

from .run_folder import METRICS, SAMPLES, SPEED
from .trackers import Tracker

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The complete rows of a file, up to the first line that is damaged or cut short by a kill."""
    rows: list[Row] = []
    if os.path.lexists(path):
        for text in read_bytes(path).splitlines(keepends=True):
            try:
                row = parse_line(text)
            except ValueError:
                break
            if not text.endswith(b"\n") or not isinstance(row, dict) or not _is_row(row):
                break
            rows.append(row)
    return rows


def _is_row(row: Row) -> bool:
    losses = (row.get("loss"), row.get("heldout_loss"))
    return type(row.get("step")) is int and all(value is None or type(value) in (int, float) for value in losses)


def truncate_after(path: Path, step: int, *, needed: bool = True) -> list[Row]:
    """Removes the rows after `step` from the file, and returns the others.

    UserError where a row up to `step` is damaged or missing, for rows are on disk before the checkpoint of their step.
    not needed: for resuming; damaged rows are removed with those after them, and an absent file stays absent.
    """
    rows = read_rows(path)
    if not (needed or path.exists()):
        return rows
    if needed and path.exists() and (rows[-1]["step"] if rows else 0) < step:
        raise UserError(
            f"{path}: line {len(rows) + 1} is damaged or missing, but step {step} was saved after it was written: "
            "repair the file, or move it away to resume without its rows"
        )
    kept = [row for row in rows if row["step"] <= step]
    write_text(path, "".join(map(json_line, kept)))
    return kept


def diverged_since(rows: Sequence[Row]) -> int | None:
    """The first of the steps up to the last whose loss or gradient norm is not finite; None where the last one's are.

    rows: of metrics.jsonl, where such a number is null.
    """
    first = None
    for row in reversed(rows):
        if all(_is_finite(row.get(name)) for name in ("loss", "grad_norm")):
            break
        first = row["step"]
    return first


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def exit_code(rows: Sequence[Row], heldout_loss: float = 0.0) -> int:
    """The exit code of a run that is complete: 0, or `DIVERGED` after one line on standard error."""
    first = diverged_since(rows)
    if first is not None:
        what = (
            f"the loss or its gradient is not finite from step {first} to the last, {rows[-1]['step']}, so these steps "
            f"changed no weights, which are those of step {first - 1}"
        )
    elif not math.isfinite(heldout_loss):
        what = "the loss on held-out text is not finite"
    else:
        return 0
    print(f"The run has diverged: {what}; a lower --learning-rate in a new --run may keep it finite.", file=sys.stderr)
    return DIVERGED


def warn_at_resume(rows: Sequence[Row]) -> None:
    """One line on standard error where the saved step that a run is resumed from has diverged."""
    if (first := diverged_since(rows)) is not None:
        print(
            f"The run that is resumed has diverged: since step {first} the loss or its gradient is not finite, and no "
            "step has changed the weights.",
            file=sys.stderr,
        )


def json_line(row: Row) -> str:
    """One row as a line of JSON, which has no NaN: a value that is not finite is written as null."""
    bad = {name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(row | dict.fromkeys(bad)) + "\n"


def fp32_decimal(value: Tensor) -> float:
    """The shortest decimal that rounds to the same fp32 number."""
    return float(str(np.float32(value.item())))


def step_metrics(
    measured: Mapping[str, Any], bits_per_byte: Callable[[float], float] | None, balance: Balance | None = None
) -> Row:
    """The row of metrics.jsonl for what `make_step`'s step returned.

    loss: without the weighted terms that `balance` adds; these get columns of their own, unweighted. bits_per_byte:
    None where the loss is no plain cross entropy; the row then has no perplexity either. expert_load: the tokens of the
    busiest expert over the mean of its layer's experts, in the layer where this is largest.
    """
    row: Row = {"finite": bool(measured["finite"])}
    row |= {name: fp32_decimal(measured[name]) for name in ("loss", "lr", "grad_norm")}
    added = {} if balance is None else {"sequence_balance": balance.sequence, "router_z": balance.z}
    for name in [name for name, weight in added.items() if weight]:
        row[name] = six_digits(float(measured["aux"][name] / measured["count"].clamp(min=1)))
        row["loss"] = six_digits(row["loss"] - added[name] * row[name])
    if bits_per_byte is not None:
        row["perplexity"] = six_digits(math.exp(row["loss"]) if row["loss"] < 700 else math.inf)
        row["bits_per_byte"] = six_digits(bits_per_byte(row["loss"]))
    if "lr_of" in measured:
        row["lr_of"] = {name: fp32_decimal(rate) for name, rate in measured["lr_of"].items()}
    if "counts" in measured.get("aux", {}):
        counts = measured["aux"]["counts"].cpu().double()
        row["expert_load"] = fp32_decimal((counts.amax(-1) / counts.mean(-1).clamp(min=1e-9)).max())
    return row


def six_digits(value: float) -> float:
    """Rounds to six significant digits, which is about the precision of fp32."""
    return float(f"{value:.6g}")


def scalars(row: Row, name: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of a row; nested dicts are flattened to a/b."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{name}{key}/")
        elif key not in ("step", "finite"):
            yield name + key, value


class MetricsLog:
    """The metrics files of the run folder `run`, open for appending, and the same values in `trackers`; closes both."""

    def __init__(self, run: Path, trackers: Sequence[Tracker]) -> None:
        self.run, self.trackers, self.files = run, trackers, ExitStack()
        for tracker in trackers:
            self.files.callback(tracker.close)
        self.close = self.files.close
        self.opened: dict[str, TextIO] = {}

    def write(self, row: Row, cost: Row) -> None:
        """Writes the rows of one step for metrics.jsonl and speed.jsonl."""
        self.append(METRICS, row)
        self.append(SPEED, cost)
        for tracker in self.trackers:
            tracker.scalars(dict(scalars(row | cost)), row["step"])

    def sample(self, step: int, text: str) -> None:
        self.append(SAMPLES, {"step": step, "text": text})
        for tracker in self.trackers:
            tracker.text("sample", text, step)

    def append(self, name: str, row: Row) -> None:
        if name not in self.opened:
            self.opened[name] = self.files.enter_context(open_append(self.run / name))
        self.opened[name].write(json_line(row))
        self.opened[name].flush()

    def sync(self) -> None:
        """Flushes to disk, so that a state saved after this call never has more steps than metrics.jsonl has rows."""
        os.fsync(self.opened[METRICS].fileno())
        for tracker in self.trackers:
            tracker.flush()

"""metrics.jsonl: one flushed row per optimizer step, the same bytes for a resumed run as for an uninterrupted one.

Nothing in a row depends on the clock: what a step cost goes into speed.jsonl. TensorBoard has both.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from fnmodels.errors import UserError
from params.io.files import write_text
from train.losses.moe_balance import Balance

from .run_folder import BOARD, METRICS, SAMPLES, SPEED

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The complete rows; a line that a kill cut short, and what follows it, are left out."""
    rows: list[Row] = []
    if path.exists():
        for text in path.read_bytes().splitlines(keepends=True):
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                break
            if not text.endswith(b"\n") or not isinstance(row, dict) or not _is_row(row):
                break
            rows.append(row)
    return rows


def _is_row(row: Row) -> bool:
    losses = (row.get("loss"), row.get("heldout_loss"))
    return type(row.get("step")) is int and all(value is None or type(value) in (int, float) for value in losses)


def cut_after(path: Path, step: int) -> list[Row]:
    """Drop the rows past `step` from the file, and return those that stay.

    UserError where rows up to `step` cannot be read: they were on disk before the step was, and would be lost here.
    """
    rows = read_rows(path)
    if path.exists() and (rows[-1]["step"] if rows else 0) < step:
        raise UserError(
            f"{path}: line {len(rows) + 1} is damaged or missing, but step {step} was saved after it was written: mend "
            "the file, or move it away to go on without"
        )
    kept = [row for row in rows if row["step"] <= step]
    write_text(path, "".join(map(line, kept)))
    return kept


def line(row: Row) -> str:
    """One row of the file. JSON knows no NaN: a value that is not finite is written as null."""
    return json.dumps({name: value if is_finite(value) else None for name, value in row.items()}) + "\n"


def shortest(value: Tensor) -> float:
    """An fp32 number as the decimal of fewest digits that is read back as the same fp32 number."""
    return float(str(np.float32(value.item())))


def is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def of_step(
    measured: Mapping[str, Any], bits_per_byte: Callable[[float], float] | None, balance: Balance | None = None
) -> Row:
    """What a step returned, as numbers for the row.

    loss: of the tokens alone, without what `balance` adds to it; that stands beside it, without its weights.
    bits_per_byte: None where it is more than a cross entropy; then there is no perplexity either.
    expert_load: in the layer where they differ most, the tokens of the busiest expert over the mean of all experts'.
    """
    row: Row = {"finite": bool(measured["finite"])}
    row |= {name: shortest(measured[name]) for name in ("loss", "lr", "grad_norm")}
    added = {} if balance is None else {"sequence_balance": balance.sequence, "router_z": balance.z}
    for name in [name for name, weight in added.items() if weight]:
        row[name] = short(float(measured["aux"][name] / measured["count"].clamp(min=1)))
        row["loss"] = short(row["loss"] - added[name] * row[name])
    if bits_per_byte is not None:
        row["perplexity"] = short(math.exp(row["loss"]) if row["loss"] < 700 else math.inf)
        row["bits_per_byte"] = short(bits_per_byte(row["loss"]))
    if "lr_of" in measured:
        row["lr_of"] = {name: shortest(rate) for name, rate in measured["lr_of"].items()}
    if "aux" in measured:
        counts = measured["aux"]["counts"].float()
        row["expert_load"] = shortest((counts.amax(-1) / counts.mean(-1).clamp(min=1e-9)).max())
    return row


def short(value: float) -> float:
    """Six digits: enough to read, and no more than what fp32 gives."""
    return float(f"{value:.6g}")


def cut_beside(path: Path, step: int) -> list[Row]:
    """The same for a file that nobody needs in full: from a damaged row on it is left out."""
    if not path.exists():
        return []
    kept = [row for row in read_rows(path) if row["step"] <= step]
    write_text(path, "".join(map(line, kept)))
    return kept


def scalars(row: Row, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row by their names, a/b where one is of several."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{name}{key}/")
        elif key not in ("step", "finite"):
            yield name + key, value


class Log:
    """The files of the folder `run`, and their TensorBoard twin."""

    def __init__(self, run: Path, board: SummaryWriter, files: ExitStack) -> None:
        self.run, self.board, self.files = run, board, files
        self.opened: dict[str, TextIO] = {}

    def write(self, row: Row, cost: Row) -> None:
        """Two rows of one step, the second being what it cost."""
        self.append(METRICS, row)
        self.append(SPEED, cost)
        for name, value in scalars(row | cost):
            self.board.add_scalar(name, value, row["step"])

    def sample(self, step: int, text: str) -> None:
        self.append(SAMPLES, {"step": step, "text": text})
        self.board.add_text("sample", text, step)

    def append(self, name: str, row: Row) -> None:
        if name not in self.opened:
            self.opened[name] = self.files.enter_context((self.run / name).open("a", encoding="utf-8"))
        self.opened[name].write(line(row))
        self.opened[name].flush()

    def sync(self) -> None:
        """To disk, so that a state saved after this call never knows more steps than metrics.jsonl has rows."""
        os.fsync(self.opened[METRICS].fileno())
        self.board.flush()


@contextmanager
def log(run: Path, *, after: int) -> Iterator[Log]:
    """Append to the files; TensorBoard hides what an earlier run wrote past the step `after`."""
    with ExitStack() as files:
        writer = SummaryWriter(str(run / BOARD), purge_step=after + 1)
        try:
            yield Log(run, writer, files)
        finally:
            writer.close()

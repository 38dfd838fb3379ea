"""metrics.jsonl: one flushed row per optimizer step, the same bytes for a resumed run as for an uninterrupted one.

Nothing in a row depends on the clock: speeds go to TensorBoard and to the progress bar.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from train.errors import UserError
from train.files import write_text

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


class Log:
    """The open metrics file and its TensorBoard twin."""

    def __init__(self, file: TextIO, board: SummaryWriter) -> None:
        self.file, self.board = file, board

    def write(self, row: Row, **timed: float) -> None:
        self.file.write(line(row))
        self.file.flush()
        for name, value in (row | timed).items():
            if name not in ("step", "finite"):
                self.board.add_scalar(name, value, row["step"])

    def sync(self) -> None:
        """To disk, so that a state saved after this call never knows more steps than the file has rows."""
        os.fsync(self.file.fileno())
        self.board.flush()


@contextmanager
def log(path: Path, board: Path, *, after: int) -> Iterator[Log]:
    """Append to the file; TensorBoard hides what an earlier run wrote past the step `after`."""
    with open(path, "a", encoding="utf-8") as file:
        writer = SummaryWriter(str(board), purge_step=after + 1)
        try:
            yield Log(file, writer)
        finally:
            writer.close()

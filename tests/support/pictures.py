"""Pictures of test runs without pixels: the curves of each kind of run are drawn once, and no image is rendered.

Drawing takes a third of a tiny run of the main job, and rendering longer than all of it. Tests that open a picture
render it.
"""

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from train.job import report
from train.job.pictures import RunRows, draw_run

PNG = b"\x89PNG"  # the first bytes of a file
_drawn: set[Any] = set()


def leave_out_pixels(patch: pytest.MonkeyPatch) -> None:
    """Pictures of runs are the first bytes of a PNG file."""
    patch.setattr(Figure, "savefig", lambda figure, path, **options: path.write_bytes(PNG))
    patch.setattr(report, "draw_run", _draw_once)


def _draw_once(path: Path, run: RunRows, **options: Any) -> None:
    """Draws what no run of this process has had: other quantities, one row or none, values that are not finite."""
    values = [value for row in (*run.rows, *run.costs) for value in row.values()]
    finite = all(math.isfinite(value) for value in values if isinstance(value, float))
    names = frozenset(name for row in (*run.rows, *run.costs) for name in row)
    kind = (names, min(len(run.rows), 2), min(len(run.costs), 2), finite, options["final_loss"] is None)
    if kind in _drawn:
        path.write_bytes(PNG)
        return
    _drawn.add(kind)
    draw_run(path, run, **options)

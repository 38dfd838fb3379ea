"""Pictures of test runs without pixels: the curves are drawn, and no image is rendered of them.

Rendering takes longer than a tiny run of the main job. Tests that open a picture render it.
"""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure


def leave_out_pixels(patch: pytest.MonkeyPatch) -> None:
    """Figures are saved as the first bytes of a PNG file."""
    patch.setattr(Figure, "savefig", _save)


def _save(figure: Figure, path: Path, **options: Any) -> None:
    path.write_bytes(b"\x89PNG")

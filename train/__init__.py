"""Step functions, losses, optimizers, schedules, data, and the main job `python -m train`."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "fnmodels" / "siblings.py"))["require"](__file__, "fnmodels", "params")

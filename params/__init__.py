"""The tree of parameters: made, counted, loaded and saved. Users write `import params as P`."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "fnmodels" / "siblings.py"))["require"](__file__, "fnmodels")

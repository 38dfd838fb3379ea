"""Runs the cells of a notebook in their order, as a kernel does: `python -m tests.support.notebook FILE`.

Figures are drawn where a cell ends, and nothing is stored. To start a kernel and import torch in it takes 5 s.
"""

import json
import linecache
import sys
from pathlib import Path
from types import ModuleType


def main(path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.show = lambda *_, **__: None
    module = sys.modules["__main__"] = ModuleType("__main__")
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        source, name = "".join(cell["source"]), f"{path.name}, cell {number}"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # for tracebacks
        exec(compile(source, name, "exec"), module.__dict__)
        for figure in map(plt.figure, plt.get_fignums()):
            figure.canvas.draw()
        plt.close("all")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The short set: one figure of each benchmark beside the usual library, in ten minutes, as one picture.

    python benchmarks/short.py                     writes runs/bench/short.png, and a record of each script beside it
    python benchmarks/short.py --only moe load     some of them
    python benchmarks/short.py --minutes 20        on a machine that is busy

A bar is how many times as fast as the other library ours is, by medians of turns; 1 is as fast. Few rounds make a bar
good to some 10%. What fails or has no time left is named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from record import Table, run, write

HERE = Path(__file__).parent
DECODING = ("transformers dynamic", "transformers static", "fnmodels compiled")


def cell(found: Sequence[Table], column: str, *words: str) -> float:
    """The number in a column of the one row that has all of these cells."""
    rows = [(t, row) for t in found if column in t.columns for row in t.rows if set(words) <= set(row)]
    (table, row) = rows[0]
    number = re.match(r"[\d,.]+", row[table.columns.index(column)])
    assert number is not None, f"{row} has no number in the column {column!r}"
    return float(number[0].replace(",", ""))


@dataclass(frozen=True)
class Figure:
    """label: what is compared with what. ratio: theirs over ours, from the tables that the script prints."""

    label: str
    flags: tuple[str, ...]
    ratio: Callable[[Sequence[Table]], float]


FIGURES = {
    "train_step": Figure(
        "training step, fp32 / transformers",
        ("--rounds", "2", "--steps", "1", "--dtype", "float32", "--contenders", "fnmodels", "transformers"),
        lambda found: cell(found, "float32: speed", "fnmodels / transformers"),
    ),
    "small": Figure(
        "step of a tiny Llama, eager / hand-written torch",
        ("--sizes", "tiny", "--tasks", "step", "--rounds", "5"),
        lambda found: 1 / cell(found, "x", "fnmodels"),
    ),
    "moe": Figure(
        "experts, a block in fp32 / grouped of transformers",
        ("--part", "block", "--dtype", "float32", "--rounds", "3"),
        lambda found: cell(found, "x transformers grouped", "fnmodels"),
    ),
    "recurrent": Figure(
        "Gated DeltaNet, forward and backward / transformers",
        ("--layers", "gdn", "--lengths", "512", "--dtypes", "float32", "--rounds", "2"),
        lambda found: cell(found, "x of transformers", "fnmodels", "forward + backward"),
    ),
    "generate": Figure(
        "compiled step of decoding / transformers",
        ("--rows", "1", "--contexts", "128", "--dtypes", "float32", "--rounds", "3", "--only", *DECODING),
        lambda found: cell(found, "x dynamic", "fnmodels compiled"),
    ),
    "encoders": Figure(
        "ViT-B/16 forward / transformers",
        ("--parts", "vit", "--rounds", "1"),
        lambda found: cell(found, "x as fast is fnmodels", "transformers"),
    ),
    "load": Figure(
        "a checkpoint of 100 MB, owned / transformers",
        ("--size", "100", "--rounds", "2"),
        lambda found: cell(found, "owned", "transformers") / cell(found, "owned", "fnmodels"),
    ),
    "research": Figure(
        "Hessian-vector product / transformers",
        ("--only", "hvp", "--rounds", "3"),
        lambda found: cell(found, "ratio", "hvp", "transformers"),
    ),
    "parallel": Figure(
        "two processes / FSDP2 around transformers",
        ("--worlds", "2", "--rounds", "1", "--steps", "1"),
        lambda found: 1 / cell(found, "of FSDP2", "functional"),
    ),
}


def picture(ratios: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.42 * len(ratios)))
    axis.axvline(1, color="#444444", linewidth=0.8, zorder=0)
    bars = axis.barh(list(ratios)[::-1], list(ratios.values())[::-1], color="#1b6ca8", height=0.7)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0}
    axis.bar_label(bars, [f"{bar.get_width():.2f}x" for bar in bars], padding=4, fontsize=8.5, bbox=behind)
    axis.set_xlim(0, max(ratios.values()) * 1.15)
    axis.set_title("fnmodels: times as fast as the other library", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "bench")
    options = parser.parse_args()
    end, ratios, failed = time.monotonic() + 60 * options.minutes, dict[str, float](), list[str]()
    for name in options.only:
        figure, begin = FIGURES[name], time.monotonic()
        try:
            if begin >= end:
                raise RuntimeError(f"benchmarks/{name}.py has no time left of {options.minutes:g} minutes.")
            limit = min(end - begin, 20 * options.minutes)  # a third of all: none leaves the others without time
            record = run(f"{name}.py", list(figure.flags), limit=limit)
        except RuntimeError as error:
            failed.append(str(error))
            continue
        write(record, options.out)
        ratios[figure.label] = figure.ratio(record.tables)
        print(f"-- {figure.label}: {ratios[figure.label]:.2f}x, in {time.monotonic() - begin:.0f} s\n", flush=True)
    if ratios:
        picture(ratios, options.out / "short.png")
        print(f"written: {options.out / 'short.png'}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()

"""What is shown of the facts of all ranks: tables, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from train.files import write_atomic

from .facts import HELD, RankFacts


def table(found: Sequence[RankFacts], memory: float | None) -> str:
    """Memory and waiting of each place in the pipeline; where it has more than `memory` bytes, that is said."""
    lines: list[tuple[str, ...]] = [("pp", "layers", *HELD, "all", "waits")]
    for rank in found:
        layers = " ".join(f"{lo}-{hi - 1}" for lo, hi in rank.layers)
        sizes = (*(rank.held[name] for name in HELD), rank.total)
        lines.append((str(rank.pp), layers, *map(shown, sizes), f"{rank.waits:.1%}"))
    text = _aligned(lines)
    if memory is not None:
        over = [rank for rank in found if rank.total > memory]
        worst = max(found, key=lambda rank: rank.total)
        if over:
            places = ", ".join(str(rank.pp) for rank in over)
            text += (
                f"\n\nDOES NOT FIT: {len(over)} of {len(found)} places in the pipeline (pp {places}) need more than "
                f"{shown(memory)}, up to {shown(worst.total)}, most of it "
                f"{max(HELD, key=lambda name: worst.held[name])}."
            )
        else:
            text += f"\n\nIt fits: at most {shown(worst.total)} of {shown(memory)}, on pp {worst.pp}."
    return text


def traffic(found: Sequence[RankFacts]) -> str:
    """Messages of a step, of the rank with the most bytes of each kind."""
    lines = [("message", "over", "of", "count", "bytes", "on pp")]
    kinds = dict.fromkeys((m.kind, m.dim, m.what) for rank in found for m in rank.messages)
    for kind in kinds:
        sent = [(m, rank.pp) for rank in found for m in rank.messages if (m.kind, m.dim, m.what) == kind]
        most, place = max(sent, key=lambda entry: entry[0].bytes)
        lines.append((*kind, f"{most.count:,}", shown(most.bytes), str(place)))
    return _aligned(lines) if len(lines) > 1 else "No messages: one rank."


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def shown(size: float) -> str:
    """Bytes in units of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError


def picture(path: Path, found: Sequence[RankFacts], memory: float | None, title: str) -> None:
    """Memory of each place in the pipeline, stacked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 2.5 + 0.6 * len(found)), 5), layout="constrained")
    axes = figure.subplots()
    places, below = [str(rank.pp) for rank in found], [0.0] * len(found)
    for name in HELD:
        sizes = [rank.held[name] / 2**30 for rank in found]
        if any(sizes):
            axes.bar(places, sizes, bottom=below, label=name)
            below = [low + size for low, size in zip(below, sizes, strict=True)]
    if memory is not None:
        axes.axhline(memory / 2**30, color="black", linestyle="--", label="memory of the device")
    axes.set(xlabel="place in the pipeline", ylabel="GiB per rank", title=title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")  # as they are stacked
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))

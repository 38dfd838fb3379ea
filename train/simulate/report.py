"""Tables and a picture of the facts of all pipeline ranks."""

from collections.abc import Sequence
from pathlib import Path

from fnmodels.files import write_atomic

from .facts import HELD, RankFacts
from .search import Plan
from .step_time import StepTime

TIGHT = 0.9  # share of the memory; the driver, NCCL and fragmentation easily take the rest


def table(found: Sequence[RankFacts], memory: float | None) -> str:
    """Memory and idle time of each pipeline rank, and a verdict if `memory` bytes are given."""
    lines: list[tuple[str, ...]] = [("pp", "layers", *HELD, "all", "waits")]
    for rank in found:
        sizes = (*(rank.held[name] for name in HELD), rank.total)
        lines.append((str(rank.pp), " ".join(_layers(rank)), *map(shown, sizes), f"{rank.waits:.1%}"))
    text = _aligned(lines)
    return text if memory is None else f"{text}\n\n{_verdict(found, memory)}"


def _verdict(found: Sequence[RankFacts], memory: float) -> str:
    """Whether it fits, in a sentence."""
    worst = max(found, key=lambda rank: rank.total)
    where = f", on pp {worst.pp}" if len(found) > 1 else ""
    needs = f"at most {shown(worst.total)} of {shown(memory)}{where}"
    if over := [str(rank.pp) for rank in found if rank.total > memory]:
        several = f" {len(over)} of {len(found)} pipeline ranks (pp {', '.join(over)})" if len(found) > 1 else ""
        return (
            f"DOES NOT FIT:{several or ' each rank'} need{'s' if len(over) == 1 else ''} more than {shown(memory)}, up "
            f"to {shown(worst.total)}, most of it {max(HELD, key=lambda name: worst.held[name])}."
        )
    if worst.total > TIGHT * memory:
        return f"It fits, but with little to spare for what is not counted (see docs/parallel.md): {needs}."
    return f"It fits: {needs}."


def traffic(found: Sequence[RankFacts]) -> str:
    """Messages of a step, of the rank with the most bytes of each kind."""
    lines = [("message", "over", "of", "count", "bytes", "on pp")]
    kinds = dict.fromkeys((m.kind, m.dim, m.what) for rank in found for m in rank.messages)
    for kind in kinds:
        sent = [(m, rank.pp) for rank in found for m in rank.messages if (m.kind, m.dim, m.what) == kind]
        most, place = max(sent, key=lambda entry: entry[0].bytes)
        lines.append((*kind, f"{most.count:,}", shown(most.bytes), str(place)))
    return _aligned(lines) if len(lines) > 1 else "No messages: one rank."


def seconds(time: StepTime) -> str:
    """The time of a step, in two lines."""
    parts = {
        "computes": time.compute,
        "waits for messages": time.exposed,
        "waits for other stages": time.idle,
        "updates": time.update,
    }
    share = ", ".join(f"{name} {part / time.seconds:.1%}" for name, part in parts.items())
    return (
        f"a step takes {time.seconds:,.4g} s: {time.tokens_per_second:,.0f} tokens/s, "
        f"{time.flops_per_device / 1e12:,.3g} TFLOP/s per device, {time.utilization:.1%} of the peak\n"
        f"the slowest rank {share}"
    )


def plans(found: Sequence[Plan]) -> str:
    """A table of plans."""
    lines: list[tuple[str, ...]] = [
        ("mesh", "microbatches", "schedule", "remat", "memory", "seconds", "tokens/s", "of the peak")
    ]
    for plan in found:
        schedule = plan.work.schedule if plan.mesh.pp > 1 else "-"
        time = plan.time
        figures = (f"{time.seconds:,.4g}", f"{time.tokens_per_second:,.0f}", f"{time.utilization:.1%}")
        how = (str(plan.work.microbatches), schedule, plan.work.remat, shown(plan.memory))
        lines.append((str(plan.mesh), *how, *figures))
    return _aligned(lines)


def _layers(rank: RankFacts) -> list[str]:
    """The first and the last layer of each of its stages."""
    return [f"{lo}-{hi - 1}" if hi - lo > 1 else str(lo) for lo, hi in rank.layers]


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
    """Draws the memory of each pipeline rank as stacked bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 2.5 + 0.6 * len(found)), 5), layout="constrained")
    axes = figure.subplots()
    below = [0.0] * len(found)
    places = ["\n".join((str(rank.pp), *_layers(rank))) for rank in found]
    for index, name in enumerate(HELD):
        sizes = [rank.held[name] / 2**30 for rank in found]
        if any(sizes):
            axes.bar(places, sizes, bottom=below, label=name, color=f"C{index}")
            below = [low + size for low, size in zip(below, sizes, strict=True)]
    if memory is not None:
        axes.axhline(memory / 2**30, color="black", linestyle="--", label="memory of the device")
    axes.set(xlabel="pipeline rank, its layers", ylabel="GiB per rank", title=title)
    middle, half = (len(found) - 1) / 2, max(len(found), 3) / 2 + 0.25
    axes.set_xlim(middle - half, middle + half)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")  # in stacking order
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))

"""Output of a run: lines on standard output, and loss.png by `draw_run`."""

import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fnmodels import tree
from fnmodels.files import write_text
from train.command_line import sentence, terminal_text

from . import run_folder
from .blueprint import Blueprint
from .pictures import draw_run as draw_run
from .pictures import draw_runs as draw_runs
from .settings import RunSettings, to_toml


def damaged(problems: list[str]) -> None:
    for problem in problems:
        print(sentence(problem), file=sys.stderr)


def skipped(path: Path, what: Sequence[str], duplicates: int) -> None:
    """Writes what was skipped into the run folder, and prints the first of it. duplicates: documents left out."""
    if what:
        write_text(path / run_folder.SKIPPED, "".join(f"{one}\n" for one in what))
        more = f", ...; all are in {path / run_folder.SKIPPED}" if len(what) > 5 else ""
        print(terminal_text(f"skipped {len(what)} files or records: {', '.join(what[:5])}{more}"))
    if duplicates:
        print(f"left out {duplicates} documents that are copies of others: a weight repeats a source")


def settings(chosen: RunSettings) -> None:
    print("settings:\n" + terminal_text(textwrap.indent(to_toml(chosen), "  ")), end="")


def data(what: str, seconds: float) -> None:
    print(f"{terminal_text(what)}, ready in {seconds:.0f} s")


def model(blueprint: Blueprint, work: str) -> None:
    """One line of the model's size and of the run's work."""
    sizes = [math.prod(leaf.shape) for leaf in tree.leaves(blueprint.spec_of_weights)]
    trainable = sum(math.prod(leaf.shape) for leaf in tree.leaves(blueprint.spec) if leaf.trainable)
    adapters = f", and adapters with {trainable:,} the only trainable ones" if blueprint.adapters else ""
    name = blueprint.config.model_type
    print(f"model: {name} with {sum(sizes) / 1e6:.1f} million parameters{adapters}; {work}", flush=True)


def mfu(peak_flops: float | None, flops_per_token: float) -> None:
    """How MFU is computed, or that --peak-flops is missing for it."""
    flops = f"{flops_per_token / 1e6:,.1f} million FLOPs per token"
    if peak_flops is None:
        print(f"MFU: not computed: give the machine's peak with --peak-flops ({flops})")
    else:
        print(f"MFU: tokens per second x {flops} / {peak_flops:.3g} FLOP/s, in {run_folder.SPEED}")


def result(summary: dict[str, Any], path: Path) -> None:
    """The last lines of a run of a language model."""
    averaged = summary.get("ema") is not None
    by = f", by the average of the weights (--ema {summary['ema']})" if averaged else ""
    print(
        f"held out{by}: {summary['heldout_bits_per_byte']:.3f} bits per byte over {summary['heldout_bytes']:,} bytes "
        f"(zlib -9, each source as one stream: {summary['zlib_bits_per_byte']:.3f})"
    )
    print(f"a sample:\n{terminal_text(summary['sample'])}\n")
    also = f", and of the average {path / run_folder.EMA}" if averaged else ""
    print(f"curves: {path / run_folder.PICTURE}\ncheckpoint: {path}{also}")

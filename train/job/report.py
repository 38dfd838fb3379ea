"""Output of a run: lines on standard output, and loss.png by `draw_run`."""

import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fnmodels import tree
from fnmodels.files import write_text
from train.checkpoint import saved_steps
from train.command_line import BAD_STEPS, sentence, terminal_text

from . import run_folder
from .blueprint import Blueprint
from .pictures import draw_run as draw_run
from .pictures import draw_runs as draw_runs
from .settings import RunSettings, as_flag


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


def settings(path: Path, chosen: RunSettings, defaults: RunSettings) -> None:
    """One line of the settings that are not the defaults; all are in the run folder."""
    names = [entry.name for entry in fields(chosen) if getattr(chosen, entry.name) != getattr(defaults, entry.name)]
    differ = ", ".join(f"{name} {as_flag(getattr(chosen, name))}" for name in names)
    print(terminal_text(f"settings: {differ or 'the defaults'} (all: {path / run_folder.SETTINGS})"))


def data(what: str, seconds: float) -> None:
    print(f"{terminal_text(what)}, ready in {seconds:.0f} s")


def model(blueprint: Blueprint, work: str) -> None:
    """One line of the model's size and of the run's work."""
    sizes = [math.prod(leaf.shape) for leaf in tree.leaves(blueprint.spec_of_weights)]
    trainable = sum(math.prod(leaf.shape) for leaf in tree.leaves(blueprint.spec) if leaf.trainable)
    adapters = f", and adapters with {trainable:,} the only trainable ones" if blueprint.adapters else ""
    name = blueprint.config.model_type
    print(f"model: {name} with {_brief(sum(sizes))} parameters{adapters}; {work}", flush=True)


def _brief(number: int) -> str:
    """A number in three digits, in thousands, millions or billions."""
    scale, letter = next(((s, n) for s, n in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= s), (1, ""))
    return f"{number / scale:.3g}{letter}"


def mfu(peak_flops: float | None, flops_per_token: float) -> None:
    """Prints how MFU is computed, or, on a GPU, that --peak-flops is missing for it."""
    flops = f"{flops_per_token / 1e6:,.1f} million FLOPs per token"
    if peak_flops is not None:
        print(f"MFU: tokens per second x {flops} / {peak_flops:.3g} FLOP/s, in {run_folder.SPEED}")
    elif torch.cuda.is_available():
        print(f"MFU: not computed: give the device's peak with --peak-flops ({flops})")


def expected(step_seconds: float, steps: int) -> None:
    """One line of how long the steps will take, before the first of them."""
    length = timedelta(seconds=round(step_seconds * steps))
    print(f"{steps:,} steps will take about {length}, by the time of a forward pass (evaluations aside)", flush=True)


def stopped_after_bad(path: Path, step: int, bad: int) -> int:
    """Says that bad steps ended the run, and returns its exit code."""
    saved = saved_steps.steps(path / run_folder.STEPS)
    what = f"--resume goes on from the save of step {saved[-1]}" if saved else "nothing was saved before them"
    print(
        f"The run has ended at step {step}, as its last {bad} steps were bad ones; {what}, and a lower --learning-rate "
        "in a new --run may keep it finite.",
        file=sys.stderr,
    )
    return BAD_STEPS


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

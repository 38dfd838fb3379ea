"""Output of the main job: lines on standard output, and loss.png."""

import math
import sys
import textwrap
from pathlib import Path

import params as P
from fnmodels import tree
from fnmodels.files import write_text
from train.command_line import sentence, terminal_text

from . import run_folder
from .metrics_log import Row
from .pictures import RunRows, draw_run
from .recipe import is_cross_entropy
from .settings import Settings, to_toml
from .setup import Job, Json


def draw(job: Job, rows: list[Row], costs: list[Row], final_loss: float | None) -> None:
    heldout = job.dataset.heldout
    draw_run(
        job.path / run_folder.PICTURE,
        RunRows(rows, costs),
        bytes_per_token=heldout.bytes / job.heldout_targets,
        zlib_bits=8 * job.dataset.zlib_bytes / heldout.bytes,
        final_loss=final_loss,
        train="train" if is_cross_entropy(job.settings) else "train (smoothed, or with z-loss)",
        heldout="held out" if job.settings.ema is None else "held out, average of the weights",
    )


def damaged(problems: list[str]) -> None:
    for problem in problems:
        print(sentence(problem), file=sys.stderr)


def skipped(job: Job) -> None:
    found = job.texts.skipped + job.dataset.skipped
    if found:
        write_text(job.path / run_folder.SKIPPED, "".join(f"{what}\n" for what in found))
        more = f", ...; all are in {job.path / run_folder.SKIPPED}" if len(found) > 5 else ""
        print(terminal_text(f"skipped {len(found)} files or records: {', '.join(found[:5])}{more}"))
    if job.texts.duplicates:
        print(f"left out {job.texts.duplicates} documents that are copies of others: a weight repeats a source")


def settings(chosen: Settings) -> None:
    print("settings:\n" + terminal_text(textwrap.indent(to_toml(chosen), "  ")), end="")


def prepared(job: Job, seconds: float) -> None:
    what = terminal_text(job.settings.data or "the Python standard library")
    sizes = job.dataset.train.bytes / 1e6, job.dataset.heldout.bytes / 1e6
    print(f"text: {what}, {sizes[0]:.2f} MB to train on and {sizes[1]:.2f} MB held out, ready in {seconds:.0f} s")
    for part in job.model.dropped:
        print(f"left out: {part}, a part of the checkpoint that next-token prediction does not use")
    trainable = sum(math.prod(leaf.shape) for leaf in tree.leaves(job.model.spec) if leaf.trainable)
    adapters = f", and adapters with {trainable:,} the only trainable ones" if job.settings.lora else ""
    config = job.model.config
    print(
        f"model: {config.model_type} with {P.count(config) / 1e6:.1f} million parameters{adapters}; "
        f"{job.settings.steps} steps of {job.settings.batch_rows} rows of {job.mixture.length} tokens, "
        f"{job.mixture.fill:.1%} of them text",
        flush=True,
    )


def mfu(job: Job) -> None:
    """How MFU is computed, or that --peak-flops is missing for it."""
    flops = f"{job.flops_per_token / 1e6:,.1f} million FLOPs per token"
    if job.settings.peak_flops is None:
        print(f"MFU: not computed: give the machine's peak with --peak-flops ({flops})")
    else:
        print(f"MFU: tokens per second x {flops} / {job.settings.peak_flops:.3g} FLOP/s, in {run_folder.SPEED}")


def is_complete(summary: Json | None) -> bool:
    """Whether summary.json is complete and valid: it has no checksum."""
    numbers = ("heldout_bits_per_byte", "heldout_bytes", "zlib_bits_per_byte")
    found = summary or {}
    return all(type(found.get(name)) in (int, float) for name in numbers) and isinstance(found.get("sample"), str)


def result(summary: Json, path: Path) -> None:
    averaged = summary.get("ema") is not None
    by = f", by the average of the weights (--ema {summary['ema']})" if averaged else ""
    print(
        f"held out{by}: {summary['heldout_bits_per_byte']:.3f} bits per byte over {summary['heldout_bytes']:,} bytes "
        f"(zlib -9, each source as one stream: {summary['zlib_bits_per_byte']:.3f})"
    )
    print(f"a sample:\n{terminal_text(summary['sample'])}\n")
    also = f", and of the average {path / run_folder.EMA}" if averaged else ""
    print(f"curves: {path / run_folder.PICTURE}\ncheckpoint: {path}{also}")

"""The report of a recipe: one HTML file without scripts and without references to other files."""

import shlex
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from fnmodels.files import read_text
from train.job import metrics_log, run_folder

from .charts import Curve, chart
from .stages import READERS, Recipe, Stage

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
pre { background: #f6f6f4; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
svg { width: 100%; } svg text { font: 12px system-ui, sans-serif; fill: #444; }
.user { color: #3465a4; } .answer { margin: 0 0 .8rem 1.2rem; }
"""
SHOWN = 6  # samples of a stage
NUMBERS = {
    "heldout_loss": "held-out loss, nats per token",
    "heldout_bits_per_byte": "held-out bits per byte",
    "zlib_bits_per_byte": "the same text by zlib -9",
    "heldout_reward_before": "reward of held-out prompts before",
    "heldout_reward": "and after",
    "heldout_prompts": "held-out prompts",
}


def write_report(recipe: Recipe, state: Mapping[str, Any]) -> str:
    """The report as HTML, of the stages that have begun."""
    begun = [stage for stage in recipe.stages if stage.name in state]
    seconds = sum(float(state[stage.name]["seconds"]) for stage in begun)
    rows = [_row(stage, state[stage.name]) for stage in begun]
    head = "<tr><th>stage</th><th>command</th><th>time</th><th></th></tr>"
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(recipe.title)}</title>",
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style>",
        f"<h1>{escape(recipe.title)}</h1><p>{len(begun)} stages in {_time(seconds)}.</p>",
        f"<table>{head}{''.join(rows)}</table>",
        *(_section(recipe, stage) for stage in begun),
        "</html>\n",
    ]
    return "\n".join(parts)


def _row(stage: Stage, entry: Mapping[str, Any]) -> str:
    cells = [f"<a href='#{stage.name}'>{escape(stage.name)}</a>", escape(stage.command), _time(entry["seconds"])]
    cells.append("done" if entry["done"] else "not finished")
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _section(recipe: Recipe, stage: Stage) -> str:
    parts = [f"<h2 id='{stage.name}'>{escape(stage.name)}</h2><pre>{escape(shlex.join(stage.shown))}</pre>"]
    if stage.command in READERS:
        printed = recipe.folder / f"{stage.name}.txt"
        parts.append(f"<pre>{escape(read_text(printed))}</pre>" if printed.exists() else "")
        return "\n".join(parts)
    place = recipe.folder / stage.name
    rows = metrics_log.read_rows(place / run_folder.METRICS)
    parts += _curves(rows)
    summary = run_folder.read_json(place / run_folder.SUMMARY) or {}
    numbers = {text: summary[name] for name, text in NUMBERS.items() if isinstance(summary.get(name), int | float)}
    if tokens := _vocabulary(place):
        numbers = {"tokens of the vocabulary": tokens} | numbers
    cells = (f"<tr><td>{escape(name)}</td><td>{value:,.6g}</td></tr>" for name, value in numbers.items())
    parts.append(f"<table>{''.join(cells)}</table>")
    parts += _samples(summary)
    return "\n".join(parts)


def _curves(rows: list[metrics_log.Row]) -> list[str]:
    """Charts of the losses and of the rewards of a run."""

    def curve(name: str, column: str) -> Curve:
        return Curve(
            name, [(row["step"], float(row[column])) for row in rows if isinstance(row.get(column), int | float)]
        )

    charts = []
    if any("loss" in row for row in rows):
        charts.append(chart([curve("train", "loss"), curve("held out", "heldout_loss")], "step", "loss"))
    if any("reward" in row for row in rows):
        charts.append(chart([curve("reward", "reward")], "update", "mean reward"))
    return charts


def _samples(summary: Mapping[str, Any]) -> list[str]:
    found = summary.get("samples")
    if isinstance(summary.get("sample"), str):
        return [f"<p>A sample:</p><pre>{escape(summary['sample'])}</pre>"]
    if not isinstance(found, list):
        return []
    parts = ["<p>Answers to held-out prompts:</p>"]
    for sample in found[:SHOWN]:
        asked = " ".join(str(message.get("content")) for message in sample["messages"])
        parts.append(
            f"<div class='user'>{escape(asked)}</div><div class='answer'>{escape(str(sample['answer']))}</div>"
        )
    return parts


def _vocabulary(place: Path) -> int | None:
    config = run_folder.read_json(place / "config.json") or {}
    size = config.get("vocab_size")
    return size if isinstance(size, int) else None


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"

"""README.md of a run folder: a model card with the front matter that the Hugging Face Hub reads.

It is a function of the recorded settings and results, like the other files of a run: nothing in it depends on the
clock, and the folders of --data and --init are named without the path that leads to them.
"""

import json
from pathlib import PurePath

import params as P
from fnmodels.errors import printable
from fnmodels.files import write_text

from . import run_folder
from .settings import fixed_settings
from .setup import Job, Json

# Front matter is YAML, of which JSON is a subset.
_CARD = """\
---
{front}
---

# {title}

A {model_type} language model of {count:,} parameters, {origin}.

## Training

{steps} of {settings_steps} steps of {rows} rows of {length} tokens, {fill:.1%} of them text, on {data}
({train:.2f} MB to train on and {heldout:.2f} MB held out).

![training and held-out loss]({picture})

| result | value |
|---|---|
{results}

Each step's loss, learning rate and gradient norm are in `{metrics}`.

## Settings

`fnmodels-train --config {settings_file} --run DIR` starts the same run again.

```json
{settings}
```

## Use

```python
import params as P

config, params = P.load_pretrained("path/to/this/folder")  # transformers' AutoModelForCausalLM reads it too
```
"""


def write(job: Job, step: int, summary: Json | None) -> None:
    """Writes the card of the run after `step` steps. summary: that of summary.json, once the run is complete."""
    settings, sizes = job.settings, (job.dataset.train.bytes / 1e6, job.dataset.heldout.bytes / 1e6)
    text = _CARD.format(
        front="\n".join(f"{name}: {json.dumps(value)}" for name, value in _front(job, summary).items()),
        title=_name(str(job.path.resolve())),
        model_type=job.model.config.model_type,
        count=P.count(job.model.config),
        origin=f"trained further from {_name(settings.init)}" if settings.init else "trained from scratch",
        steps=step,
        settings_steps=settings.steps,
        rows=settings.batch_rows,
        length=job.mixture.length,
        fill=job.mixture.fill,
        data=", ".join(_sources(job)),
        train=sizes[0],
        heldout=sizes[1],
        picture=run_folder.PICTURE,
        results=_results(step, summary),
        metrics=run_folder.METRICS,
        settings_file=run_folder.SETTINGS,
        settings=json.dumps(_without_folders(fixed_settings(settings)), indent=2),
    )
    write_text(job.path / run_folder.CARD, text)


def _front(job: Job, summary: Json | None) -> Json:
    """The entries that the Hub reads; each value is JSON."""
    front: Json = {"tags": ["fnmodels"], "pipeline_tag": "text-generation", "library_name": "transformers"}
    if job.settings.license is not None:
        front = {"license": job.settings.license} | front
    if job.settings.init is not None:
        front["base_model"] = _name(job.settings.init)
    if summary is not None:
        metric = {"type": "bits_per_byte", "value": summary["heldout_bits_per_byte"], "name": "held-out bits per byte"}
        task, dataset = {"type": "text-generation"}, {"type": "text", "name": ", ".join(_sources(job))}
        results = [{"task": task, "dataset": dataset, "metrics": [metric]}]
        front["model-index"] = [{"name": _name(str(job.path.resolve())), "results": results}]
    return front


def _results(step: int, summary: Json | None) -> str:
    if summary is None:
        return f"| held-out loss | the run is at step {step}; the last one measures it |"
    rows = {
        "held-out loss, nats per token": f"{summary['heldout_loss']:.4f}",
        "held-out bits per byte": f"{summary['heldout_bits_per_byte']:.4f}",
        "the same text by zlib -9, bits per byte": f"{summary['zlib_bits_per_byte']:.4f}",
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _sources(job: Job) -> list[str]:
    data = job.settings.data
    return [_name(source) for source in data.split(",")] if data else ["the Python standard library"]


def _name(path: str) -> str:
    """The last part of a path, or of a path with a weight, as one line of printable text."""
    return printable(PurePath(path).name).replace("\n", "\\n")


def _without_folders(settings: Json) -> Json:
    """The settings with files named without their folders, which are of one machine."""
    named = {"data": ",".join(map(_name, (settings["data"] or "").split(","))) or None}
    return settings | named | {"init": _name(settings["init"]) if settings["init"] else None}

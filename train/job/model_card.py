"""README.md of a run folder: a model card with the front matter that the Hugging Face Hub reads.

It is a function of the recorded settings and results, like the other files of a run: nothing in it depends on the
clock, and the folders of --data and --init are named without the path that leads to them.
"""

import json
import math
from pathlib import PurePath

from fnmodels import tree
from fnmodels.errors import printable
from fnmodels.files import write_text
from params.checkpoint.hub import name_of_snapshot

from . import run_folder
from .settings import fixed_settings
from .task import Card, Json, Task
from .watch.trouble import NAMES

# Front matter is YAML, of which JSON is a subset.
_CARD = """\
---
{front}
---

# {title}

A {model_type} {kind} of {count:,} parameters, {origin}.

## Training

{steps} of {settings_steps} steps of {rows}.

![training and held-out loss]({picture})

| result | value |
|---|---|
{results}

Each step's loss, learning rate and gradient norm are in `{metrics}`.

## Settings

`{program} --config {settings_file} --run DIR` starts the same run again.

```json
{settings}
```

## Use

```python
import params as P
from params.checkpoint.hub import name_of_snapshot

{usage}
```
"""


def write(task: Task, step: int, summary: Json | None) -> None:
    """Writes the card of the run after `step` steps. summary: that of summary.json, once the run is complete."""
    settings, card, spec = task.settings, task.card(step, summary), task.blueprint.spec_of_weights
    results = dict(card.results) or {"held-out loss": f"the run is at step {step}; the last one measures it"}
    results |= {NAMES[name]: str(count) for name, count in ((summary or {}).get("trouble") or {}).items() if count}
    text = _CARD.format(
        front="\n".join(f"{name}: {json.dumps(value)}" for name, value in _front(task, card).items()),
        title=name_of(str(task.path.resolve())),
        model_type=task.blueprint.config.model_type,
        kind=card.kind,
        count=sum(math.prod(leaf.shape) for leaf in tree.leaves(spec)),
        origin=f"trained further from {name_of(settings.init)}" if settings.init else "trained from scratch",
        steps=step,
        settings_steps=settings.steps,
        rows=card.rows,
        picture=run_folder.PICTURE,
        results="\n".join(f"| {name} | {value} |" for name, value in results.items()),
        metrics=run_folder.METRICS,
        program=card.program,
        settings_file=run_folder.SETTINGS,
        settings=json.dumps(_without_folders(fixed_settings(settings)), indent=2),
        usage=card.usage,
    )
    write_text(task.path / run_folder.CARD, text)


def _front(task: Task, card: Card) -> Json:
    """The entries that the Hub reads; each value is JSON."""
    front: Json = {"tags": ["fnmodels"]} | card.front
    if task.settings.license is not None:
        front = {"license": task.settings.license} | front
    if task.settings.init is not None:
        front["base_model"] = name_of(task.settings.init)
    return front


def name_of(path: str) -> str:
    """The last part of a path, or of a path with a weight, as one line of text; of a model of the Hub, its name."""
    return printable(name_of_snapshot(path) or PurePath(path).name).replace("\n", "\\n")


def _without_folders(settings: Json) -> Json:
    """The settings with files named without their folders, which are of one machine."""
    named = {"data": ",".join(map(name_of, (settings.get("data") or "").split(","))) or None}
    named["init"] = name_of(settings["init"]) if settings.get("init") else None
    return settings | {name: value for name, value in named.items() if name in settings}

"""Protocols of a task that the loop of `train.job.run` uses: before a run (`TaskModule`), during one (`Task`)."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fnmodels.tree import Tree
from train.batch import Entries

from .blueprint import Blueprint
from .heldout import SumOf
from .mesh_flags import MeshSetup
from .metrics_log import Row
from .settings import RunSettings

Json = dict[str, Any]
Weights = Callable[[], Tree]  # gathers the evaluated parameters; all ranks take part


@dataclass(frozen=True)
class Card:
    """A task's entries in the model card of its run, without the folders of this machine.

    Attributes:
        program: the command that runs this task.
        kind: completes "A llama ...", for example "language model".
        rows: what a batch holds and of which data.
        results: {name: value} of the complete run.
        front: entries of the Hub's front matter beside those of every run.
        usage: lines of Python that load the model.
    """

    program: str
    kind: str
    rows: str
    results: Mapping[str, str]
    front: Json
    usage: str


class Task(Protocol):
    """A run that is ready to train. Functions of a step number steps from 0."""

    @property
    def path(self) -> Path: ...
    @property
    def settings(self) -> RunSettings: ...
    @property
    def identity(self) -> Json:
        """Everything that results depend on, which resuming must find unchanged."""

    @property
    def model_path(self) -> Path:
        """The folder of the model that each save writes."""

    @property
    def blueprint(self) -> Blueprint: ...
    @property
    def sample_every(self) -> int | None: ...
    @property
    def mfu_per_rate(self) -> float | None:
        """MFU for each token per second; None: not known."""

    def batch(self, step: int) -> Entries: ...
    def data_position(self, steps: int) -> Any:
        """The JSON by which a saved step finds the batch after `steps` steps; None: their number is enough."""

    def row(self, steps: int, tokens: int, measured: Mapping[str, Any]) -> Row:
        """The columns of metrics.jsonl after `steps` steps on `tokens` targets, from what the step measured."""

    def evaluated(self, loss: SumOf, *, full: bool) -> Row:
        """The columns of an evaluation on held-out data, all of it or a sample; empty where there are none."""

    def sample(self, weights: Weights) -> str:
        """A sample of the model's output, drawn every `sample_every` steps; None: never."""

    def write(self, folder: Path, params: Tree) -> None:
        """Writes the model as a folder that other libraries read."""

    def finish(self, evaluation: Row, weights: Weights) -> Json:
        """summary.json of the complete run, after writing what only a complete run has."""

    def report(self, seconds: float) -> None:
        """Prints what is trained on what. seconds: that preparing it took."""

    def draw(self, rows: list[Row], costs: list[Row], summary: Json | None) -> None:
        """Draws the curves."""

    def card(self, step: int, summary: Json | None) -> Card: ...


class TaskModule(Protocol):
    """A module of `train.job.tasks`: how a task is chosen, checked and prepared."""

    DATA: str  # what is read

    def check_settings(self, settings: Any) -> None:
        """UserError where settings contradict each other."""

    def preflight(self, settings: Any, mesh_setup: MeshSetup | None, chosen: Collection[str]) -> None:
        """UserError for what cannot work, before data are read. mesh_setup None: a resumed run.

        chosen: the settings that the command line names.
        """

    def prepare(self, path: Path, settings: Any, recorded: Json | None, mesh_setup: MeshSetup) -> Task:
        """Data and model. recorded: the identity of the run that is resumed, and its `data_position`."""

    def is_complete(self, summary: Json | None) -> bool:
        """Whether summary.json, which has no checksum, is complete and valid."""

    def report_result(self, summary: Json, path: Path) -> None: ...

"""Encoders on lines of JSON, the tasks of `fnmodels-documents`: pairs, labels, masked, captions, each in its file."""

import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import check_folder, copy_file
from fnmodels.tree import Tree
from params.io.files import plain_file
from train.batch import Entries
from train.data.examples import chosen, read_examples
from train.job import report
from train.job.blueprint import Blueprint
from train.job.heldout import SumOf
from train.job.mesh_flags import MeshSetup, check_shards
from train.job.metrics_log import Row
from train.job.model_card import name_of
from train.job.task import Card, Json, Weights

from . import examples as common
from .captions import captions, with_files
from .encoder import Encoder, Examples
from .examples import is_complete as is_complete
from .examples import report_result as report_result
from .labels import check_labels, labels
from .masked import masked
from .pairs import pairs
from .settings import DocumentSettings

DATA = "examples"
_ENCODERS = {"pairs": pairs, "labels": labels, "masked": masked, "captions": captions}
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"),
    "preprocessor_config.json",
)


@dataclass(frozen=True)
class DocumentTask:
    """A run of one of these tasks that is ready to train, see `Task`."""

    path: Path
    settings: DocumentSettings
    identity: Json
    blueprint: Blueprint
    encoder: Encoder
    examples: Examples
    heldout: Examples
    rows: int  # of a batch at least
    sample_every: None = None
    mfu_per_rate: None = None

    @property
    def model_path(self) -> Path:
        return self.path / "model"

    def batch(self, step: int) -> Entries:
        settings = self.settings
        some = chosen(self.examples, settings.seed, step, settings.batch)
        return self.encoder.batch(some, common.generator_of(settings.seed, step), self.rows)

    def data_position(self, steps: int) -> None:
        return None

    def row(self, steps: int, tokens: int, measured: Mapping[str, Any]) -> Row:
        return common.columns(self.settings, len(self.examples), steps, measured)

    def evaluated(self, loss: SumOf, *, full: bool) -> Row:
        seed, parts = self.settings.seed, common.chunks(len(self.heldout), self.settings.batch)
        return common.evaluated(
            loss,
            (
                self.encoder.batch([self.heldout[i] for i in part], common.generator_of(seed, ~number), self.rows)
                for number, part in enumerate(parts)
            ),
        )

    def sample(self, weights: Weights) -> str:
        raise NotImplementedError("An encoder says nothing.")

    def write(self, folder: Path, params: Tree) -> None:
        self.encoder.save(folder, params)
        init = Path(str(self.settings.init))
        for name in _COPIED:
            if os.path.lexists(init / name):
                copy_file(plain_file(init, name), folder / name)

    def finish(self, evaluation: Row, weights: Weights) -> Json:
        return common.summary_of(self.settings, evaluation, self.model_path)

    def report(self, seconds: float) -> None:
        settings = self.settings
        report.data(f"data: {settings.data}, {len(self.examples):,} examples of {settings.loss}", seconds)
        report.model(self.blueprint, f"{settings.steps} steps of {settings.batch} examples")

    def draw(self, rows: list[Row], costs: list[Row], summary: Json | None) -> None:
        common.draw(self.path, rows, costs)

    def card(self, step: int, summary: Json | None) -> Card:
        front = {"pipeline_tag": self.encoder.pipeline_tag, "library_name": "transformers"}
        what = f"{self.settings.batch} of {len(self.examples):,} examples in {name_of(str(self.settings.data))}"
        results = common.results(summary)
        return Card("fnmodels-documents", self.encoder.kind, what, results, front, self.encoder.usage)


def check_settings(settings: DocumentSettings) -> None:
    """UserError where a setting that has no default is missing."""
    if settings.init is None:
        raise UserError("--init is needed: a folder with config.json, weights and tokenizer.json")
    if settings.loss is None:
        raise UserError(f"--loss is needed: one of {', '.join(_ENCODERS)}")
    common.check_files(settings)


def preflight(settings: DocumentSettings, mesh_setup: MeshSetup | None, chosen: Collection[str]) -> None:
    """Nothing is left to check: the data are small, and are read at once."""


def prepare(path: Path, settings: DocumentSettings, recorded: Json | None, mesh_setup: MeshSetup) -> DocumentTask:
    """Examples and model. UserError for data or a model that cannot be trained so, or that differ from `recorded`."""
    examples, heldout = _read(settings, settings.data), _read(settings, settings.heldout)
    if settings.loss == "labels":
        check_labels(examples, heldout)
    pictures = [one["file"] for one in (*examples, *heldout) if "file" in one]
    encoder = _ENCODERS[str(settings.loss)](settings, examples)
    check_shards(mesh_setup, settings, encoder.config, encoder.spec, encoder.spec)
    identity = common.begin(path, settings, recorded, pictures)
    check_folder(path / "model")
    one = mesh_setup.mesh.world == 1
    initial = (lambda _: encoder.params) if one else functools.partial(common.shards_of, encoder.load)
    return DocumentTask(
        path,
        settings,
        identity,
        Blueprint(encoder.config, encoder.spec, encoder.loss, encoder.loss, initial),
        encoder,
        examples,
        heldout,
        common.rows_of(mesh_setup, settings),
    )


def _read(settings: DocumentSettings, file: str | None) -> Examples:
    """The examples of a file, with the files of their pictures; none without a file."""
    if file is None:
        return []
    examples = read_examples(Path(file), str(settings.loss))
    return with_files(Path(file), examples) if settings.loss == "captions" else examples

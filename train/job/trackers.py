"""Writes the metrics of a run beside its own files: to TensorBoard, and with --track to MLflow or Weights & Biases.

MLflow and W&B read their own environment variables (MLFLOW_TRACKING_URI, WANDB_MODE, ...). A resumed run that is given
--track again continues the tracked one, whose id is in the run folder.
"""

import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from fnmodels.errors import UserError

from .run_folder import MLFLOW, TENSORBOARD, TENSORBOARD_HELDOUT, TRACKED, read_json, write_json

HELDOUT = "heldout_"  # begins the names of values on held-out data
PROJECT = "fnmodels"  # of W&B, and the experiment of MLflow, where the environment names none


class Tracker(Protocol):
    """Takes the numbers and texts of steps, in the order of the steps."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...
    def text(self, name: str, text: str, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def trackers(run: Path, *, after: int, track: str | None, settings: Mapping[str, Any]) -> list[Tracker]:
    """TensorBoard's, and that of `track` ("mlflow", "wandb" or None). settings: shown by it, as the run's parameters.

    after: the step that the run continues from; what TensorBoard has of later ones is hidden.
    """
    kinds: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {"mlflow": MLflow, "wandb": WandB}
    return [TensorBoard(run, after), *(kinds[name](run, settings) for name in (track,) if name)]


def tracked_by(run: Path) -> str | None:
    """The tracker that has steps of the run, by its folder's record; None where there is none."""
    found = read_json(run / TRACKED) or {}
    return next((name for name in ("mlflow", "wandb") if name in found), None)


# {group of charts in TensorBoard: the names in it, without what follows a slash}
CHARTS = {
    "loss": ("loss", "perplexity", "bits_per_byte"),
    "optimizer": ("lr", "lr_of", "grad_norm"),
    "data": ("tokens", "epochs"),
    "speed": ("tokens_per_second", "seconds", "cpu_seconds", "peak_memory_gib", "mfu"),
    "experts": ("expert_load", "sequence_balance", "router_z"),
}
GROUP_OF = {name: group for group, names in CHARTS.items() for name in names}


class TensorBoard:
    """The run's event files. Held-out values have the tags of the train values in a folder of their own.

    TensorBoard shows the folders as two runs, and so draws both curves in one chart.
    """

    def __init__(self, run: Path, after: int) -> None:
        folders = run / TENSORBOARD, run / TENSORBOARD_HELDOUT
        self.train, self.heldout = (SummaryWriter(str(folder), purge_step=after + 1) for folder in folders)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if "peak_memory" in values:
            values = {name: value for name, value in values.items() if name != "peak_memory"} | {
                "peak_memory_gib": values["peak_memory"] / 2**30
            }
        for name, value in values.items():
            writer = self.heldout if name.startswith(HELDOUT) else self.train
            name = name.removeprefix(HELDOUT)
            group = GROUP_OF.get(name.partition("/")[0])
            writer.add_scalar(f"{group}/{name}" if group else name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        self.train.add_text(name, text, step)

    def flush(self) -> None:
        self.train.flush()
        self.heldout.flush()

    def close(self) -> None:
        self.train.close()
        self.heldout.close()


class MLflow:
    """A run in MLflow's store at MLFLOW_TRACKING_URI, by default the run folder's `mlflow.db`; global state stays."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        store = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(store or f"sqlite:///{run.resolve() / MLFLOW}")
        self.id = _tracked(run, "mlflow") or self._created(run, settings, store)
        self.client.update_run(self.id, status="RUNNING")

    def _created(self, run: Path, settings: Mapping[str, Any], store: str | None) -> str:
        """The id of a new run in the store."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(name)
        files = None if store else (run / "mlruns").resolve().as_uri()  # MLflow's default is the working folder
        experiment = known.experiment_id if known else self.client.create_experiment(name, artifact_location=files)
        made: str = self.client.create_run(experiment, run_name=run.resolve().name).info.run_id
        for key, value in settings.items():
            self.client.log_param(made, key, value)
        _remember(run, "mlflow", made)
        return made

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.id, [Metric(name, value, now, step) for name, value in values.items()])

    def text(self, name: str, text: str, step: int) -> None:
        self.client.log_text(self.id, text, f"{name}/{step}.txt")

    def flush(self) -> None:
        """Nothing is left to write: each call returns when the store has it."""

    def close(self) -> None:
        self.client.set_terminated(self.id)


class WandB:
    """A run of Weights & Biases; its files are in the run folder's `wandb`. WANDB_MODE=offline needs no account."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        if (settings_file := run / "wandb" / "settings").exists():  # could lead the key of an account elsewhere
            raise UserError(f"--track wandb: {settings_file} is not of a run, and W&B would read it: remove it")
        project, known = os.environ.get("WANDB_PROJECT", PROJECT), _tracked(run, "wandb")
        identity = known or uuid.uuid4().hex[:12]
        try:
            self.run: Any = wandb.init(
                project=project,
                name=run.resolve().name,
                id=identity,
                resume="allow" if known else None,
                dir=run,
                config=dict(settings),
            )
        except wandb.errors.Error as error:
            raise UserError(f"--track wandb: {error} WANDB_MODE=offline needs no account.") from error
        _remember(run, "wandb", identity)
        self.close = self.run.finish

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self.run.log({name: text}, step=step)

    def flush(self) -> None:
        """W&B's own process writes what it has been handed, also if this one is killed."""


def _tracked(run: Path, kind: str) -> str | None:
    """The id of the tracked run in the run folder's record. UserError where it is none."""
    found = (read_json(run / TRACKED) or {}).get(kind)
    if found is not None and not (isinstance(found, str) and re.fullmatch(r"[\w-]{1,64}", found, re.ASCII)):
        raise UserError(f"{run / TRACKED}: {kind} is {found!r:.80}, no id of a run: remove the file to begin another")
    return found


def _remember(run: Path, kind: str, identity: str) -> None:
    write_json(run / TRACKED, (read_json(run / TRACKED) or {}) | {kind: identity})

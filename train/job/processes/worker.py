"""A worker process of a run: its shards of the model, and its part of the collective commands (step, loss, save)."""

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from train.checkpoint import sharded
from train.checkpoint.saved_steps import Checkpoint
from train.data.rows import Batch
from train.job import initial_model
from train.job.mesh_flags import MeshSetup
from train.job.recipe import evaluated_params, losses, optimizer_for, step_options
from train.job.settings import Settings
from train.optim.base import with_paths
from train.parallel.pipeline.stages import init_stage, stage_plan
from train.parallel.placement import rules_of
from train.parallel.whole_model import fetching
from train.state import State, init_state
from train.step import make_eval_step, make_step

from .launch import set_timeout


@dataclass(frozen=True)
class WorkerConfig:
    """The facts of a run that a worker needs; sent by the controller."""

    mesh_setup: MeshSetup
    settings: Settings
    config: DecoderConfig
    limit: datetime.timedelta | None = None  # as `launch.process_group` yields it


class Worker:
    """The part of one process in a run. All ranks must call the same methods in the same order."""

    def __init__(self, worker_config: WorkerConfig) -> None:
        settings, self.config, self.mesh = worker_config.settings, worker_config.config, worker_config.mesh_setup.mesh
        family, devices = fnmodels.family_of(self.config), self.mesh.device_mesh()
        if worker_config.limit is not None:
            set_timeout(worker_config.limit, *devices.get_all_groups())
        dtype = getattr(torch, str(settings.dtype))
        strategy = replace(worker_config.mesh_setup.strategy, gather_dtype=None if dtype is torch.float32 else dtype)
        self.plan = P.plan(family.spec(self.config), rules_of(self.mesh, self.config), devices)  # of the weights
        if self.mesh.pp > 1:
            self.plan = stage_plan(self.plan, self.config, devices, strategy)
        self.spec = initial_model.run_spec(self.config, settings)
        self.optimizer = optimizer_for(self.spec, settings)
        loss, train_loss = losses(self.config, settings)
        options = step_options(settings) | {"mesh": self.mesh, "strategy": strategy}
        if self.mesh.pp > 1:
            options["accumulate"] = worker_config.mesh_setup.microbatches
        self._step = make_step(train_loss, self.optimizer, **options)
        self._loss = make_eval_step(loss, mesh=self.mesh, strategy=strategy)
        self.settings = settings
        self.state: State

    def initialize(self, fresh: bool) -> State:
        """Makes the State of step 0, each rank its own shards; not `fresh`: with uninitialized values for `load`."""
        if self.settings.lora is not None or (fresh and self.settings.init is not None):
            _, params = initial_model.load_weights(Path(str(self.settings.init)), self.settings, plan=self.plan)
        elif fresh:
            params = init_stage(self.config, self.settings.seed, self.plan)
        else:
            kinds = tree.flatten(P.abstract(self.config, dtype=torch.float32))

            def empty(path: str, sharding: P.Sharding) -> Tensor:
                part = kinds[path][sharding.local_box()]
                return sharding.distribute(torch.empty(part.shape, dtype=part.dtype))

            params = with_paths(empty, self.plan)
        self.state = init_state(params, self.optimizer)
        return self.state

    def load(self, found: Checkpoint) -> State:
        self.state = initial_model.restore_state(self.state, sharded.load(found, self._state_to_save()), self.settings)
        return self.state

    def step(self, batch: Batch) -> tuple[State, dict[str, Any]]:
        self.state, metrics = self._step(self.state, batch)
        return self.state, metrics

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum, count) of the loss of a batch with any number of rows, with the evaluated parameters."""
        missing = -len(batch["tokens"]) % self.mesh.rows
        if missing:
            padding = tree.map(lambda t: t[:1].expand(missing, *t.shape[1:]), batch)
            padding = {**padding, "labels": torch.full_like(padding["labels"], -100)}
            batch = tree.map(lambda *pair: torch.cat(pair), dict(batch), padding)
        found = self._loss(evaluated_params(self.state, self.settings), batch)
        return found["total"], found["count"]

    def save(self, folder: Path, step: int, progress: dict[str, Any], keep: int) -> None:
        sharded.save(folder, step, self._state_to_save(), progress, keep=keep)

    def gather_weights(self) -> Tree:
        """The evaluated parameters in full on rank 0; None on the others."""
        return self._gather_to_rank_0(self.spec, evaluated_params(self.state, self.settings))

    def gather_checkpoint(self, evaluated: bool) -> Tree:
        """The parameters to save, trained or evaluated (averaged), in full on rank 0; with --lora the adapters only."""
        local_params = evaluated_params(self.state, self.settings) if evaluated else self.state.params
        return self._gather_to_rank_0(initial_model.trained_params(self.spec, self.settings), local_params)

    def _state_to_save(self) -> State:
        return initial_model.state_to_save(self.state, self.settings)

    def _gather_to_rank_0(self, like: Tree, local_params: Tree) -> Tree:
        is_first, (_, fetch) = dist.get_rank() == 0, fetching(local_params)

        def one(path: str, _: Any) -> Tensor | None:
            full = fetch(path)
            return full.clone() if is_first else None  # a copy, as the next step writes into the parameters

        return with_paths(one, like)

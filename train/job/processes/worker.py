"""A process of a run, which may be the only one: its shards of the model, and its part of the collective commands."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import params as P
from fnmodels import tree
from fnmodels.inputs.packing import IGNORE
from fnmodels.tree import Tree
from params.initialize import leaf_dtype
from train.batch import Entries
from train.checkpoint import saved_steps, sharded
from train.checkpoint.saved_steps import Checkpoint
from train.gradients import Metrics
from train.job.blueprint import Blueprint
from train.job.mesh_flags import MeshSetup
from train.job.recipe import computed_in, evaluated_params, optimizer_for, step_options
from train.job.settings import RunSettings
from train.optim.base import Optimizer, with_paths
from train.parallel.padding import entry_of_tokens
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of
from train.parallel.whole_model import fetching
from train.state import State, init_state
from train.step import make_eval_step, make_step
from train.update import StepFunction

from .launch import set_timeout
from .pace import seconds_of_ranks

_NOTHING = {"labels": IGNORE, "segment_ids": 0, "image_ids": 0}  # what rows of padding hold


@dataclass(frozen=True)
class WorkerConfig:
    """The facts of a run that each of its processes needs; sent by the controller to the others."""

    mesh_setup: MeshSetup
    settings: RunSettings
    blueprint: Blueprint
    limit: datetime.timedelta | None = None  # as `launch.process_group` yields it


@dataclass(frozen=True)
class Programs:
    """The optimizer, the step and the evaluation of one process. plan: of the weights over a mesh; None: no mesh."""

    optimizer: Optimizer
    step: StepFunction
    evaluate: Callable[[Tree, Entries], Metrics]
    plan: Tree | None


def programs(run: WorkerConfig) -> Programs:
    """The programs of this process, in one process and over a mesh. All ranks of a mesh call it together."""
    settings, blueprint, (mesh, strategy) = run.settings, run.blueprint, (run.mesh_setup.mesh, run.mesh_setup.strategy)
    optimizer, dtype = optimizer_for(blueprint.spec, settings), getattr(torch, str(settings.dtype))
    losses, plan = (blueprint.train_loss, blueprint.loss), None
    options: dict[str, Any] = step_options(settings) | {"balance_rate": blueprint.balance_rate}
    over: dict[str, Any] = {}
    if mesh.world == 1:
        losses = computed_in(dtype, losses[0], blueprint.spec), computed_in(dtype, losses[1], blueprint.spec)
    else:
        devices = mesh.device_mesh()
        if run.limit is not None:
            set_timeout(run.limit, *devices.get_all_groups())
        strategy = replace(strategy, gather_dtype=None if dtype is torch.float32 else dtype)
        plan = P.plan(blueprint.spec_of_weights, rules_of(mesh, blueprint.config), devices)
        over = {"mesh": mesh, "strategy": strategy}
    if mesh.pp > 1:
        plan = stage_plan(plan, blueprint.config, devices, strategy)
        options["accumulate"] = run.mesh_setup.microbatches
    step = make_step(losses[0], optimizer, **options, **over)
    return Programs(optimizer, step, make_eval_step(losses[1], **over), plan)


class Worker:
    """The part of one process in a run. All ranks must call the same methods in the same order."""

    def __init__(self, run: WorkerConfig) -> None:
        self.settings, self.blueprint, self.mesh = run.settings, run.blueprint, run.mesh_setup.mesh
        self.programs = programs(run)
        self.state: State

    def initialize(self, fresh: bool) -> State:
        """Makes the State of step 0, each rank its own shards; not `fresh`: with values that `load` will replace."""
        plan = self.programs.plan
        if fresh or plan is None or self.blueprint.adapters:
            params = self.blueprint.initial(plan)
        else:
            params = _empty(self.blueprint.spec, plan)
        self.state = init_state(params, self.programs.optimizer)
        return self.state

    def load(self, saved: Checkpoint) -> State:
        one_file = self.programs.plan is None and (saved.path / saved_steps.STATE).exists()
        like = self.blueprint.state_to_save(self.state)
        loaded = saved_steps.load(saved, like) if one_file else sharded.load(saved, like)
        self.state = self.blueprint.restored(self.state, loaded)
        return self.state

    def step(self, batch: Entries) -> tuple[State, Metrics]:
        self.state, metrics = self.programs.step(self.state, batch)
        return self.state, metrics

    def seconds_of_ranks(self) -> list[float]:
        """The time of a small piece of work on each rank."""
        return seconds_of_ranks()

    def loss(self, batch: Entries) -> tuple[Tensor, Tensor]:
        """(sum, count) of the loss of a batch with any number of rows, with the evaluated parameters."""
        missing = -len(entry_of_tokens(batch)) % self.mesh.rows
        if missing:
            padding = tree.map(lambda t: t[:1].expand(missing, *t.shape[1:]), dict(batch))
            names = padding.keys() & _NOTHING.keys()
            padding |= {name: torch.full_like(padding[name], _NOTHING[name]) for name in names}
            batch = tree.map(lambda *pair: torch.cat(pair), dict(batch), padding)
        sums = self.programs.evaluate(evaluated_params(self.state, self.settings), batch)
        return sums["total"], sums["count"]

    def save(self, folder: Path, step: int, progress: dict[str, Any], keep: int) -> None:
        sharded.save(folder, step, self.blueprint.state_to_save(self.state), progress, keep=keep)

    def gather_weights(self) -> Tree:
        """The evaluated parameters in full on rank 0; None on the others."""
        return self._gather_to_rank_0(self.blueprint.spec, evaluated_params(self.state, self.settings))

    def gather_checkpoint(self, averaged: bool) -> Tree:
        """The parameters to save, trained or averaged, in full on rank 0; the adapters only where they are trained."""
        params = evaluated_params(self.state, self.settings) if averaged else self.state.params
        return self._gather_to_rank_0(self.blueprint.saved(self.blueprint.spec), params)

    def _gather_to_rank_0(self, like: Tree, params: Tree) -> Tree:
        if self.programs.plan is None:
            return params
        is_first, (_, fetch) = dist.get_rank() == 0, fetching(params)

        def full(path: str, _: Any) -> Tensor | None:
            x = fetch(path)
            return x.clone() if is_first else None  # a copy, as the next step writes into the parameters

        return with_paths(full, like)


def _empty(spec: Tree, plan: Tree) -> Tree:
    """Parameters in fp32 without values: this rank's shards of a plan."""
    leaves = tree.flatten(spec)

    def empty(path: str, sharding: P.Sharding) -> Tensor:
        full = torch.empty(leaves[path].shape, dtype=leaf_dtype(leaves[path], torch.float32), device="meta")
        shard = full[sharding.local_box()]
        return sharding.distribute(torch.empty(shard.shape, dtype=shard.dtype))

    return with_paths(empty, plan)

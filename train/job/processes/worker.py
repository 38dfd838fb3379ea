"""One of the processes of a run: what it holds of the model, and its part of what all do together."""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.tree import Tree
from train.checkpoint import sharded
from train.checkpoint.saved_steps import Checkpoint
from train.data.rows import Batch
from train.job import initial_model
from train.job.mesh_flags import Sharing
from train.job.recipe import evaluated_params, loss_terms, optimizer_for
from train.job.settings import Settings
from train.job.setup import is_routed, step_options
from train.losses.next_token import next_token_loss
from train.optim.base import with_paths
from train.parallel.pipeline.stages import init_stage, stage_plan
from train.parallel.placement import rules_of
from train.parallel.whole_model import fetching
from train.state import State, init_state
from train.step import make_eval_step, make_step

from .launch import set_limit


@dataclass(frozen=True)
class Work:
    """What every process must know of the run."""

    sharing: Sharing
    settings: Settings
    config: Any
    limit: datetime.timedelta | None = None  # as `joining.joined` yields it


class Member:
    """One process' part of the run. All call the same methods in the same order."""

    def __init__(self, work: Work) -> None:
        settings, self.config, self.mesh = work.settings, work.config, work.sharing.mesh
        family, devices = fnmodels.family_of(self.config), self.mesh.device_mesh()
        if work.limit is not None:
            set_limit(work.limit, *devices.get_all_groups())
        dtype = getattr(torch, str(settings.dtype))
        strategy = replace(work.sharing.strategy, gather_dtype=None if dtype is torch.float32 else dtype)
        self.plan = P.plan(family.spec(self.config), rules_of(self.mesh, self.config), devices)  # of the weights
        if self.mesh.pp > 1:
            self.plan = stage_plan(self.plan, self.config, devices, strategy)
        loss = functools.partial(next_token_loss, config=self.config, aux=is_routed(self.config))
        self.spec = initial_model.run_spec(self.config, settings)
        self.optimizer = optimizer_for(self.spec, settings)
        train_loss = functools.partial(loss, **loss_terms(settings))
        how = step_options(settings) | {"mesh": self.mesh, "strategy": strategy}
        if self.mesh.pp > 1:
            how["accumulate"] = work.sharing.microbatches
        self._step = make_step(train_loss, self.optimizer, **how)
        self._loss = make_eval_step(loss, mesh=self.mesh, strategy=strategy)
        self.settings = settings
        self.state: State

    def begin(self, fresh: bool) -> State:
        """A State at step 0; if it is not `fresh`, without the values that `load` finds. Each makes what it holds."""
        if self.settings.lora is not None:
            _, params = initial_model.load_weights_with_lora(
                Path(str(self.settings.init)), self.settings, plan=self.plan
            )
        elif not fresh:
            kinds = tree.flatten(P.abstract(self.config, dtype=torch.float32))

            def empty(path: str, how: P.Sharding) -> Tensor:
                part = kinds[path][how.local_box()]
                return how.distribute(torch.empty(part.shape, dtype=part.dtype))

            params = with_paths(empty, self.plan)
        elif self.settings.init is not None:
            _, params = initial_model.load_weights(Path(self.settings.init), plan=self.plan)
        else:
            params = init_stage(self.config, self.settings.seed, self.plan)
        self.state = init_state(params, self.optimizer)
        return self.state

    def load(self, found: Checkpoint) -> State:
        self.state = initial_model.restore_state(self.state, sharded.load(found, self._kept()), self.settings)
        return self.state

    def step(self, batch: Batch) -> tuple[State, dict[str, Any]]:
        self.state, metrics = self._step(self.state, batch)
        return self.state, metrics

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum, count) of a batch with any number of rows, by the weights that are evaluated."""
        missing = -len(batch["tokens"]) % self.mesh.rows
        if missing:
            more = tree.map(lambda t: t[:1].expand(missing, *t.shape[1:]), batch)
            more = {**more, "labels": torch.full_like(more["labels"], -100)}
            batch = tree.map(lambda *pair: torch.cat(pair), dict(batch), more)
        found = self._loss(evaluated_params(self.state, self.settings), batch)
        return found["total"], found["count"]

    def save(self, folder: Path, step: int, progress: dict[str, Any], keep: int) -> None:
        sharded.save(folder, step, self._kept(), progress, keep=keep)

    def whole(self) -> Tree:
        """The weights that are evaluated, all of them, in the first process; None in the others."""
        return self._in_first(self.spec, evaluated_params(self.state, self.settings))

    def trained(self, evaluated: bool) -> Tree:
        """Those that training made, or that are evaluated, likewise; of adapters they alone."""
        held = evaluated_params(self.state, self.settings) if evaluated else self.state.params
        return self._in_first(initial_model.trained_params(self.spec, self.settings), held)

    def _kept(self) -> State:
        return initial_model.state_to_save(self.state, self.settings)

    def _in_first(self, like: Tree, held: Tree) -> Tree:
        first, (_, fetch) = dist.get_rank() == 0, fetching(held)

        def one(path: str, _: Any) -> Tensor | None:
            full = fetch(path)
            return full.clone() if first else None  # never the part itself, into which the next step writes

        return with_paths(one, like)

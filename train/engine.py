"""`Engine`: gradients, updates, inference and export as separate calls, for trainers with a loop of their own.

    engine = Engine(config, params, train.adamw(1e-5), clip=1.0)
    for batches in rollouts:                              # lists of microbatches, each cut and packed by the caller
        engine.forward_backward(batches, loss_fn)         # any number of calls: sums only
        metrics = engine.optim_step()                     # one division by the global count, one update
    logps = engine.infer(batches, fn)
    inference.update_weights(engine.export())             # (name, tensor), one at a time

It holds a `State` and summed gradients and no global state, so several engines can coexist.

With `mesh=` all ranks of an existing process group make the same calls, each with the full microbatches, whose rows the
mesh shards; metrics and the results of `infer` and `export` are global on every rank. With
`strategy=Strategy(rows="own")` each rank passes its own microbatches, [1, T] packed or with any rows, equally many on
every rank, and `infer` returns the results for these. params are DTensors, with `pp` those of this rank's layers:
`params.init(config, 0, plan=...)`, `train.parallel.pipeline.stages.init_stage`.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from train import checkpoint
from train.batch import Entries, microbatches
from train.checkpoint import sharded
from train.comm.dtensor import local_tree, placed_like
from train.comm.failures import naming_the_lost
from train.losses.output_loss import needs_full_rows
from train.optim.base import Optimizer, remake, trainable_mask
from train.parallel.agreement import all_ready, check_same
from train.parallel.batch_shards import own_parts
from train.parallel.eval_steps import full_outputs, without_places
from train.parallel.mesh import Mesh, Parallelism, Strategy, warn_of_group, whole_groups
from train.parallel.placement import Placed, place
from train.parallel.step import batch_check, check_compile, sums_over
from train.parallel.update import ShardedUpdate, optimizer_of_shards, over_processes, sharded_update, update_over
from train.parallel.whole_model import aux_of_stages, fetching

from .gradients import LossFn, Metrics, Sums, added_to, gradient_sums, joined
from .handover.exports import Shard, full_tensors, shards
from .handover.offload import offload
from .state import State, init_state, on_all_stages
from .step import make_forward_only
from .step.evaluation import check_strategy
from .update import StepOptions, check_state, update

KEPT = 8  # functions whose compiled code and mesh schedules are kept, the last used ones
T = TypeVar("T")


class NoGradientsError(RuntimeError):
    """`Engine.optim_step` without a `forward_backward` before it."""


class Engine:
    """config: the model's, for `export`. Other arguments: as in `train.make_step`.

    optimizer: None for a reference model or teacher, which infers and exports only; params are then used as they are.
    copy: whether params are copied; False saves the second set, and `optim_step` overwrites the caller's tensors.

    `engine.state`, a `State`, may be read and assigned between updates; so may `engine.optimizer`, by an optimizer with
    the same state and the same trainable parameters (ValueError otherwise).
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Tree,
        optimizer: Optimizer | None,
        *,
        copy: bool = True,
        clip: float | None = None,
        remat: str = "none",
        compile: str = "none",
        balance_rate: float | None = None,
        mesh: Mesh | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self._options = StepOptions(clip=clip, remat=remat, compile=compile, balance_rate=balance_rate)
        check_strategy(mesh, strategy)
        self.config, self.mesh, self.strategy = config, mesh, strategy
        self._optimizer = optimizer
        self._restore: Callable[[], None] | None = None  # while the state is offloaded
        self.state: State = (
            State(torch.zeros((), dtype=torch.int64), params, None)
            if optimizer is None
            else init_state(params, optimizer, copy=copy)
        )
        self._placed: Placed | None = None
        self._updates: ShardedUpdate | None = None
        if mesh is not None:
            warn_of_group()
            trainable = _none_trains if optimizer is None else optimizer.traits.trainable
            self._placed = place(mesh, self.state.params, config, strategy or Strategy(), trainable)
            if optimizer is not None:  # aux is made global by forward_backward
                self._updates = dataclasses.replace(sharded_update(self._placed, optimizer), whole_aux=None)
        self._runs: dict[LossFn, tuple[Callable[..., Sums], Callable[[Tree], Tree] | None]] = {}
        self._infers: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._sums: Sums | None = None  # aux: this rank's, kept only for balance_rate
        self._aux: Tree = None  # global, over all calls since the last update

    @property
    def params(self) -> Tree:
        """The current parameters; `optim_step` overwrites these tensors."""
        self._check_here()
        return self.state.params

    @property
    def optimizer(self) -> Optimizer | None:
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        def updates() -> ShardedUpdate | None:
            params = local_tree(self.params)
            check_state(optimizer, local_tree(self.state))
            ours, given = (trainable_mask(params, one.traits.trainable) for one in (self._trains(), optimizer))
            if tree.flatten(ours) != tree.flatten(given):
                raise ValueError(
                    "The new optimizer trains other parameters than the engine's: make a new Engine for it."
                )
            return self._updates_by(optimizer)

        self._updates = on_all_stages(updates, optimizer, self.params)
        self._optimizer = optimizer

    def _updates_by(self, optimizer: Optimizer) -> ShardedUpdate | None:
        """The `ShardedUpdate` with another optimizer; None without a mesh."""
        if self._updates is None:
            return None
        return dataclasses.replace(self._updates, optimizer=optimizer_of_shards(self._updates.placed, optimizer))

    def _trains(self) -> Optimizer:
        if self._optimizer is None:
            raise RuntimeError("This engine has no optimizer, so it infers and exports only; give it one to train.")
        return self._optimizer

    def _check_here(self) -> None:
        if self._restore is not None:
            raise RuntimeError("The engine's state is offloaded to the host: call engine.onload() first.")

    def forward_backward(self, batches: Sequence[Entries], loss_fn: LossFn) -> Metrics:
        """Add the gradients of a list of microbatches, dicts of [B, S] or [1, T] with any lengths, to those held.

        loss_fn(params, batch) -> (sum, count[, aux]), as in `make_step`; pass the same function object each time,
        because compiled code is cached per function. Returns what this call added: {total, count}, and aux where the
        loss returns one; the metrics of `optim_step` have the sums over all calls, also of different losses. A loss may
        return (sum, count, aux or None, outputs), a tree of tensors [B, S, ...], as `train.logprob_loss` does: the
        result then has "outputs", a list with those of each microbatch. ValueError for an empty list. If the call
        raises, the gradients of the calls before it are as they were.
        """
        self._trains()
        self._check_here()
        if self.mesh is None:  # over a mesh other ranks may have some: all raise alike
            if not batches:
                raise ValueError("forward_backward needs at least one microbatch.")
            batches = microbatches(list(batches))
        run, whole_aux = _kept(self._runs, loss_fn, lambda: self._summing(loss_fn))
        with self._naming_the_lost("gradients"):
            sums = run(self.state.params, batches, divide=False)
        total, count, aux = sums.total, sums.count, sums.aux
        if self._placed is not None:
            total, count, aux = over_processes(self._placed.devices, total, count, aux)
            if aux is not None and whole_aux is not None:
                aux = whole_aux(aux)
        added = {"total": total, "count": count} | ({} if aux is None else {"aux": aux})
        added |= {"outputs": sums.outputs} if sums.outputs else {}
        mine = dataclasses.replace(sums, aux=None if self._options.balance_rate is None else sums.aux, outputs=[])
        self._aux, self._sums = joined(self._aux, aux), mine if self._sums is None else added_to(self._sums, mine)
        return added

    def _naming_the_lost(self, what: str) -> AbstractContextManager[None]:
        """Over a mesh: errors that name the process which raised or ended."""
        if self._placed is None:
            return nullcontext()
        return naming_the_lost(self._placed.ranks, lambda: f"the {what} after step {int(self.state.step)}")

    def _summing(self, loss_fn: LossFn) -> tuple[Callable[..., Sums], Callable[[Tree], Tree] | None]:
        """(`gradient_sums` or its form over the mesh, the map from a pipeline stage's aux to that of all stages)."""
        optimizer, mesh, placed = self._trains(), self.mesh, self._placed
        if mesh is None or placed is None:
            counts = self._options.balance_rate is not None
            options = {"remat": self._options.remat, "compile": self._options.compile}
            return gradient_sums(loss_fn, optimizer, **options, counts=counts), None

        check_compile(Parallelism(mesh, placed.strategy), self._options.compile, self._options.remat)
        run = sums_over(placed, loss_fn, optimizer, self._options)

        def sums(params: Tree, batches: Sequence[Entries], *, divide: bool) -> Sums:
            local = local_tree(params)
            rows = needs_full_rows(loss_fn) and mesh.cp > 1
            check = batch_check(loss_fn, local, placed)
            parts = own_parts(list(batches), placed, check=check, places=mesh.cp > 1, rows=rows)
            bare, places = without_places(parts)
            found = run(local, parts if rows else bare, divide=divide)
            if found.outputs:
                found.outputs = full_outputs(found.outputs, bare, places, batches, placed)
            return found

        return sums, aux_of_stages(placed) if mesh.pp > 1 else None

    def optim_step(self, *, divide_by: float | Tensor | None = None, **values: Any) -> Metrics:
        """One update with the mean over all tokens since the last update; returns the metrics of `make_step`.

        divide_by: what the sums (loss and gradients) are divided by, a number or 0-d tensor above 0; None: the count of
        the losses; 1 for losses that are divided already. values: hyperparameters of this update alone, by the
        optimizer's own names (lr, betas, eps, weight_decay, ...); a rate that a scheduler outside computes is `lr=`.
        RuntimeError without a `forward_backward` since the last update; ValueError for a hyperparameter that the
        optimizer does not have, and on all ranks for arguments that differ between them or that one of them refuses.
        Gradients stay held if it raises for an argument.
        """
        prepare = functools.partial(self._prepared, divide_by, values)
        if self._placed is None:
            optimizer, updates, sums = prepare()
        else:
            with self._naming_the_lost("update"):
                given = {"divide_by": divide_by, **values}
                optimizer, updates, sums = all_ready(prepare, given, self._placed.devices)
        aux = self._aux
        self.zero_grad()
        if updates is None:
            options: dict[str, Any] = {"clip": self._options.clip, "balance_rate": self._options.balance_rate}
            self.state, metrics = update(optimizer, self.state, sums, divide_by=divide_by, **options)
        else:
            with self._naming_the_lost("update"):
                self.state, metrics = update_over(updates, self.state, sums, self._options, divide_by)
        return metrics if aux is None else metrics | {"aux": aux}

    def _prepared(
        self, divide_by: float | Tensor | None, values: dict[str, Any]
    ) -> tuple[Optimizer, ShardedUpdate | None, Sums]:
        """The arguments of `optim_step`'s update: the optimizer with these hyperparameters, and the gradients."""
        optimizer = remake(self._trains(), **values)
        self._check_here()
        number = isinstance(divide_by, Real) or (isinstance(divide_by, Tensor) and divide_by.ndim == 0)
        if divide_by is not None and not (number and 0 < divide_by < float("inf")):
            raise ValueError(f"divide_by is {divide_by!r}; it must be a finite number above 0, or None for the count.")
        if self._sums is None:
            raise NoGradientsError("optim_step comes after forward_backward: there are no gradients yet.")
        return optimizer, self._updates_by(optimizer) if values else self._updates, self._sums

    def gradients(self, *, full: bool = False) -> Tree:
        """{path's names: gradient} of the trainable parameters, summed over all calls since the last update.

        They are sums, in fp32 at least: divide by the count that `forward_backward` returned. Without a mesh, tensors
        that the next call adds to. Over a mesh, DTensors placed as the parameters are, with pp those of this rank's
        layers; full: the tensors of the full model instead, on every rank, for which all ranks make the same call.
        RuntimeError without a `forward_backward` since the last update.
        """
        self._check_here()
        if self._sums is None:
            raise RuntimeError("gradients come after forward_backward: there are none yet.")
        params = tree.flatten(self.state.params)
        trains = tree.flatten(trainable_mask(local_tree(self.state.params), self._trains().traits.trainable))
        paths = [path for path in params if trains[path]]
        found = {path: placed_like(grad, params[path]) for path, grad in zip(paths, self._sums.grads, strict=True)}
        if full and self.mesh is not None:
            leaves, fetch = fetching(tree.unflatten(found))
            found = {path: fetch(path) for path in leaves}
        return tree.unflatten(found)

    def zero_grad(self) -> None:
        """Discard the gradients since the last update."""
        self._sums = self._aux = None

    def infer(self, batches: Sequence[Entries], function: Callable[..., Any]) -> list[Any]:
        """[function(params, batch)] without gradients: log-probabilities, a loss, logits; see `make_forward_only`.

        Over a mesh or with compilation pass the same function object each time, because the prepared call is cached per
        function, for the last 8 functions.
        """
        self._check_here()
        compile = self._options.compile

        def make() -> Callable[..., Any]:
            return make_forward_only(function, compile=compile, mesh=self.mesh, strategy=self.strategy)

        # Cache only compiled code and mesh schedules: a plain function would keep alive what it references.
        prepared = compile != "none" or self.mesh is not None
        run = _kept(self._infers, function, make) if prepared else make()
        if batches or (self.strategy is not None and self.strategy.rows == "own"):
            with self._naming_the_lost("inference"):
                found: list[Any] = run(self.state.params, list(batches))
            return found
        if self._placed is not None:  # other ranks may have some, and would wait
            devices = self._placed.devices
            with self._naming_the_lost("inference"):  # the same number of calls in all of them
                check_same((), devices, whole_groups(devices))
        return []

    def export(self, *, adapters: bool = False, copy: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every tensor of a Hugging Face checkpoint, one at a time; see `params.export`.

        Adapters are merged into their weights; adapters: they alone, under PEFT's names (`params.lora.peft_config` has
        the values beside). Over a mesh tensors are full, on every rank, and all ranks iterate alike. Tensors may be the
        live parameters, which the next update overwrites; copy: they are the caller's. `train.deltas` of this iterator
        keeps what changed since the last export.
        """
        self._check_here()
        found = full_tensors(self.config, self.state.params, adapters=adapters)
        return ((name, tensor.clone()) for name, tensor in found) if copy else found

    def export_shards(self) -> Iterator[tuple[str, Shard]]:
        """(name, `Shard`) of what this rank holds of each tensor; nothing is communicated.

        Adapters are merged. Tensors may be the live parameters. UnsupportedError for a family whose files have fused
        tensors (of q, k and v, for example).
        """
        self._check_here()
        return shards(self.config, self.state.params)

    def save(self, folder: str | os.PathLike[str], progress: Any = None, *, keep: int | None = None) -> None:
        """Save the state as step `engine.state.step` in `folder`, by `train.checkpoint` or over a mesh `train.sharded`.

        progress: JSON to be returned by `load`, such as the position in the data. Gradients that are held are not
        saved. Over a mesh all ranks call it alike, with a folder that all see.
        """
        self._check_here()
        step = int(self.state.step)
        if self.mesh is None:
            checkpoint.save(Path(folder), step, self.state, progress, keep=keep)
        else:
            sharded.save(Path(folder), step, self.state, progress, keep=keep)

    def load(self, folder: str | os.PathLike[str]) -> Any:
        """Load the newest intact step that `save` left in `folder`, on any mesh; returns its `progress`.

        Gradients that are held are discarded. FileNotFoundError where there is no step; MismatchError for the state of
        another model or optimizer.
        """
        self._check_here()
        saved: Any = checkpoint if self.mesh is None else sharded
        found = saved.latest(Path(folder))
        if found is None:
            raise FileNotFoundError(f"{folder} holds no saved step; engine.save(folder) makes one.")
        self.state = saved.load(found, like=self.state)
        self.zero_grad()
        return found.progress

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, which frees the device's; `onload` brings them back.

        Between the two only `zero_grad` may be called. Gradients that are held stay where they are. ValueError where
        params were not copied and do not own their memory.
        """
        if self._restore is None:
            self._restore = offload(self.state)

    def onload(self) -> None:
        """Move parameters and optimizer state back; nothing happens where they are in place."""
        if self._restore is not None:
            self._restore()
            self._restore = None


def _none_trains(params: Tree) -> Tree:
    return tree.map(lambda _: False, params)


def _kept(cache: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """The value of `key`, made if it is not there; the cache keeps the KEPT keys that were used last."""
    value = cache.pop(key) if key in cache else make()
    cache[key] = value
    while len(cache) > KEPT:
        del cache[next(iter(cache))]
    return value

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

import params as P
from fnmodels import tree
from fnmodels.models.common.registry import DecoderConfig
from fnmodels.tree import Tree
from train.dist.dtensor import local_tree
from train.optim.base import Optimizer
from train.parallel.agreement import check_same
from train.parallel.batch_shards import own_parts
from train.parallel.mesh import Mesh, Parallelism, Strategy, warn_of_group, whole_groups
from train.parallel.placement import place
from train.parallel.step import batch_check, check_compile, sums_over
from train.parallel.update import over_processes, sharded_update, update_over
from train.parallel.whole_model import aux_of_stages, fetching

from .gradients import LossFn, Sums, gradient_sums, joined
from .loss_call import Batch
from .state import State, init_state
from .step import check_strategy, make_forward_only
from .update import StepOptions, update


class Engine:
    """config: the model's, for `export`. params are copied. Other arguments: as in `train.make_step`."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Tree,
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        remat: str = "none",
        compile: str = "none",
        balance_rate: float | None = None,
        mesh: Mesh | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self._options = StepOptions(clip=clip, remat=remat, compile=compile, balance_rate=balance_rate)
        check_strategy(mesh, strategy)
        self.config, self.optimizer, self.mesh, self.strategy = config, optimizer, mesh, strategy
        self.state: State = init_state(params, optimizer)
        self._updates: Any = None
        if mesh is not None:
            warn_of_group()
            placed = place(mesh, self.state.params, config, strategy or Strategy(), optimizer.trainable)
            self._updates = dataclasses.replace(sharded_update(placed, optimizer), whole_aux=None)  # global here
        self._runs: dict[LossFn, tuple[Callable[..., Sums], Callable[[Tree], Tree] | None]] = {}
        self._infers: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._sums: Sums | None = None  # aux: this rank's, kept only for balance_rate
        self._aux: Tree = None  # global, over all calls since the last update

    @property
    def params(self) -> Tree:
        """The current parameters; `optim_step` overwrites these tensors."""
        return self.state.params

    def forward_backward(self, batches: Sequence[Batch], loss_fn: LossFn) -> dict[str, Any]:
        """Add the gradients of a list of microbatches, dicts of [B, S] or [1, T] with any lengths, to those held.

        loss_fn(params, batch) -> (sum, count[, aux]), as in `make_step`; pass the same function object each time,
        because compiled code is cached per function. Returns what this call added: {total, count}, and aux where the
        loss returns one; the metrics of `optim_step` have the sums over all calls, also of different losses. ValueError
        for an empty list. If the call raises, all gradients since the last update are discarded.
        """
        if not batches and self.mesh is None:  # over a mesh other ranks may have some: all raise alike
            raise ValueError("forward_backward needs at least one microbatch.")
        if loss_fn not in self._runs:
            self._runs[loss_fn] = self._summing(loss_fn)
        run, whole_aux = self._runs[loss_fn]
        held, held_aux, into = self._sums, self._aux, None
        if held is not None:
            into = dataclasses.replace(held, aux=None)
        self.zero_grad()  # restored below, once the whole call has succeeded
        sums = run(self.state.params, batches, into, divide=False)
        total, count, aux = sums.total, sums.count, sums.aux
        if held is not None:
            total, count = total - held.total, count - held.count
        if self.mesh is not None:
            total, count, aux = over_processes(self._updates.placed.devices, total, count, aux)
            if aux is not None and whole_aux is not None:
                aux = whole_aux(aux)
        mine = None if self._options.balance_rate is None else joined(None if held is None else held.aux, sums.aux)
        self._sums, self._aux = dataclasses.replace(sums, aux=mine), joined(held_aux, aux)
        return {"total": total, "count": count} | ({} if aux is None else {"aux": aux})

    def _summing(self, loss_fn: LossFn) -> tuple[Callable[..., Sums], Callable[[Tree], Tree] | None]:
        """(`gradient_sums` or its form over the mesh, the map from a pipeline stage's aux to that of all stages)."""
        if self.mesh is None:
            counts = self._options.balance_rate is not None
            options = {"remat": self._options.remat, "compile": self._options.compile}
            return gradient_sums(loss_fn, self.optimizer, **options, counts=counts), None

        mesh, placed = self.mesh, self._updates.placed
        check_compile(Parallelism(mesh, placed.strategy), self._options.compile, self._options.remat)
        run = sums_over(placed, loss_fn, self.optimizer, self._options)

        def sums(params: Tree, batches: Sequence[Batch], held: Sums | None, *, divide: bool) -> Sums:
            local = local_tree(params)
            return run(
                local, own_parts(list(batches), placed, check=batch_check(loss_fn, local, mesh)), held, divide=divide
            )

        return sums, aux_of_stages(placed) if mesh.pp > 1 else None

    def optim_step(self) -> dict[str, Any]:
        """One update with the mean over all tokens since the last update; returns the metrics of `make_step`.

        RuntimeError without a `forward_backward` since then.
        """
        if self._sums is None:
            raise RuntimeError("optim_step comes after forward_backward: there are no gradients yet.")
        sums, aux = self._sums, self._aux
        self.zero_grad()
        if self.mesh is None:
            clip, rate = self._options.clip, self._options.balance_rate
            self.state, metrics = update(self.optimizer, self.state, sums, clip=clip, balance_rate=rate)
        else:
            self.state, metrics = update_over(self._updates, self.state, sums, self._options)
        return metrics if aux is None else metrics | {"aux": aux}

    def zero_grad(self) -> None:
        """Discard the gradients since the last update."""
        self._sums = self._aux = None

    def infer(self, batches: Sequence[Batch], function: Callable[..., Any]) -> list[Any]:
        """[function(params, batch)] without gradients: log-probabilities, a loss, logits; see `make_forward_only`.

        Over a mesh or with compilation pass the same function object each time, because the prepared call is cached per
        function.
        """
        compile = self._options.compile
        run = self._infers.get(function)
        run = run or make_forward_only(function, compile=compile, mesh=self.mesh, strategy=self.strategy)
        if compile != "none" or self.mesh is not None:
            # Cache only compiled code and mesh schedules: a plain function would keep alive what it references.
            self._infers[function] = run
        if batches or (self.strategy is not None and self.strategy.rows == "own"):
            found: list[Any] = run(self.state.params, list(batches))
            return found
        if self.mesh is not None:  # other ranks may have some, and would wait
            devices = self._updates.placed.devices
            check_same((), devices, whole_groups(devices))
        return []

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every tensor of a Hugging Face checkpoint, one at a time; see `params.export`."""

        if self.mesh is None:
            return P.export(self.config, self.state.params)

        leaves, fetch = fetching(self.state.params)
        return P.export(self.config, tree.unflatten(leaves), fetch)

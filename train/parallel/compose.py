"""Composes tensor, sequence, context and expert parallelism, FSDP, compilation and remat around one loss.

The step of one stage and the pipeline read the same `Composed`: options for the model's calls, and a map from the
shards that a rank holds to the params that the loss receives. A block is wrapped, from the inside out, in tensor
parallelism, compilation, the FSDP all-gather, and rematerialisation.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import params as P
from fnmodels import family_of
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.carried import shares_rows
from fnmodels.models.common.registry import stack_configs
from fnmodels.options import Block
from fnmodels.tree import Tree
from train.comm.collectives import all_gather, maximum
from train.loss import ModelLoss, as_loss
from train.parallel.context.api import context_kernel, global_length, whole_balance
from train.parallel.tensor.api import TensorParallel, tensor_parallel
from train.remat import layer_fn
from train.run_options import Blocks, Ranks, Reports, RunOptions

from .expert import expert_parallel
from .fsdp import Watch, gather_layers, sharded_params
from .mesh import ROWS, Mesh, mesh_of
from .placement import Placed, rules_of

T = TypeVar("T")


def full_width(size: int, axis: str) -> int:
    """The entries of an axis that a rank has where nothing shards it."""
    return size


@dataclass(frozen=True)
class Composed:
    """options: `RunOptions` of a loss over the mesh. params: maps `local_tree(params)` to the params of the loss.

    full_states: gathers hidden states [B, S, D] that `sequence` shards, for the next stage; None: they are full
    already. remat: whether layers are recomputed in backward. key_heads: how many of a layer's key heads a rank has.
    width: how many of the (entries, along an axis) it has.
    """

    options: RunOptions
    params: Callable[[Tree], Tree]
    full_states: Callable[[Tensor], Tensor] | None
    remat: bool
    key_heads: Callable[[int], int] = int
    width: Callable[[int, str], int] = full_width

    def loss(self, function: Callable[..., Any]) -> ModelLoss:
        """function(params, batch) as a `ModelLoss` of this rank's shards of both."""
        return ModelLoss(as_loss(function).function, self.options, self.params)


def compose(
    placed: Placed, *, remat: str = "none", compile: str = "none", counts: bool = False, watch: Watch | None = None
) -> Composed:
    """The `Composed` of a mesh and strategy.

    remat, compile: as in `train.make_step`; counts: see `Reports`; watch: see `sharded_params`.
    """
    devices, strategy, config = placed.devices, placed.strategy, placed.config
    mesh = mesh_of(devices)
    if config is not None:
        check_family(config, mesh, sequence=strategy.sequence)
    tensor: TensorParallel | None = None
    if mesh.tp > 1:
        shards = placed.shards
        if mesh.pp > 1:  # a stage holds some layers only, and roles are derived from all
            shards = P.plan(family_of(config).spec(config), rules_of(mesh, config), devices)
        tensor = tensor_parallel(config, shards, sequence=strategy.sequence)
    gathered = sharded_params(placed.shards, dtype=strategy.gather_dtype, trains=placed.trains, watch=watch)
    recomputed = layer_fn(remat, "none")

    def outer(block: Block) -> Block:
        gathered_block = gather_layers(block)
        return gathered_block if recomputed is None else recomputed(gathered_block)

    def params(held: Tree) -> Tree:
        given = gathered(held)
        return given if tensor is None else tensor.outside(given)

    around = Blocks(
        inner=layer_fn("none", compile),
        outer=outer,
        tensor=None if tensor is None else tensor.layer_fn,
        compiled=compile == "block",
    )
    reports = Reports(counts=counts, required=f"Over the mesh {mesh} layers are gathered where they run")
    ranks = _over_ranks(placed, mesh, sequence=tensor is not None and strategy.sequence)
    options = RunOptions(around, ranks, reports=reports)
    if tensor is None:
        return Composed(options, params, None, remat != "none")
    return Composed(options, params, tensor.region.join, remat != "none", tensor.key_heads, tensor.width)


def _over_ranks(placed: Placed, mesh: Mesh, *, sequence: bool) -> Ranks:
    devices, strategy = placed.devices, placed.strategy
    ranks = Ranks(
        balance=lambda balance: whole_balance(balance, devices), length=global_length(devices), sequence=sequence
    )
    groups = [devices.get_group(name) for name in ROWS if mesh.sizes[name] > 1]
    if groups:
        ranks = replace(ranks, all_documents=functools.partial(all_documents, groups))
    if mesh.cp > 1:
        kernel = functools.partial(context_kernel, strategy.context, devices.get_group("cp"))
        ranks = replace(ranks, kernel=_around_name("kernel", mesh, kernel))
        ranks = replace(ranks, full_rows=functools.partial(full_rows, devices.get_group("cp")))
    if mesh.ep > 1:
        experts = functools.partial(expert_parallel, devices.get_group("ep"))
        ranks = replace(ranks, experts=_around_name("experts", mesh, experts))
    return ranks


def check_family(config: Any, mesh: Mesh, *, sequence: bool) -> None:
    """ValueError for a mesh over which a model of this family cannot be sharded."""
    family = family_of(config)
    check_pipelined(config, mesh.pp)
    several = hasattr(family, "towers") or stack_configs(config)
    if several and (mesh.cp > 1 or sequence):
        raise ValueError(
            f"A {config.model_type} has two stacks of layers with rows of different lengths, so the mesh {mesh} must "
            "not have cp above 1, nor sequence=True; fsdp, dp, tp and, of an encoder with its decoder, pp work."
        )
    of_rows = shares_rows(family)
    if of_rows and (mesh.cp > 1 or sequence):
        raise ValueError(
            f"The layers of a {config.model_type} read tensors of full rows beside the residual stream, such as the "
            f"distances of tokens, so the mesh {mesh} must not have cp above 1, nor sequence=True; fsdp, dp, tp and pp "
            "work."
        )


def check_pipelined(config: Any, size: int) -> None:
    """ValueError for a model of two towers: neither reads what the other's layers return, so none is a later stage."""
    family = family_of(config)
    if size > 1 and hasattr(family, "towers"):
        raise ValueError(
            f"A {config.model_type} has towers ({' and '.join(family.towers(config))}) that run beside each other, and "
            "the stages of a pipeline run one after the other: shard it over fsdp, dp and tp, with remat where memory "
            "is short, and leave pp out."
        )


def full_rows(group: dist.ProcessGroup, x: Tensor, places: Tensor) -> tuple[Tensor, int]:
    """`Ranks.full_rows`: all-gathered with a gradient, which is summed over the ranks."""
    order = all_gather(places, 1, group).argsort(1)
    x = all_gather(x, 1, group)
    return x[torch.arange(len(x), device=x.device)[:, None], order], int(dist.get_rank(group) == 0)


def all_documents(groups: Sequence[dist.ProcessGroup], x: Tensor) -> Tensor:
    """`Ranks.all_documents`: padded to as many as the rank with most has, and all-gathered with a gradient."""
    for group in groups:
        most = int(maximum(torch.tensor(len(x), device=x.device), group))
        x = all_gather(torch.cat((x, x.new_full((most - len(x), *x.shape[1:]), IGNORE))), 0, group)
    return x


def _around_name(what: str, mesh: Mesh, make: Callable[..., T]) -> Callable[[Any], T]:
    """A function from the loss' name for `what` to its version over the mesh, made once per name."""
    made = functools.cache(lambda inner: make(inner=inner))

    def of(inner: Any) -> T:
        if not isinstance(inner, str):
            raise ValueError(
                f"Over the mesh {mesh} `{what}` is the step's to set, so the loss must leave it, or name how one "
                "process does it."
            )
        return made(inner)

    return of

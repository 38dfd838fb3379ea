"""A mesh with `pp`: the sums of a pipeline in the place of one process' own, over all the other dimensions.

    placements = stage_plan(params.plan(spec, rules_of(mesh, config), devices), config, devices, strategy)
    state = init_state(init_stage(config, 0, placements), optimizer)
    step = make_step(loss_fn, optimizer, accumulate=4, mesh=mesh, strategy=strategy)     # four microbatches

Leaves lie on the whole mesh; those of a layer exist where the layer runs, and are no copies over `pp`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import params as P
from fnmodels import family_of, tree
from fnmodels.options import Block
from fnmodels.tree import Tree
from params.initialize import draw
from train.dist.collectives import broadcast
from train.gradients import Sums
from train.loss_call import Batch
from train.optim.base import Optimizer
from train.parallel.context.api import asks_length, context_kernel, longest, whole_balance
from train.parallel.expert import expert_parallel
from train.parallel.fsdp import gathering_stages
from train.parallel.mesh import Mesh, Strategy, mesh_of
from train.parallel.placement import Placed, rules_of
from train.parallel.tensor.api import tensor_parallel
from train.remat import layer_fn

from .gradients import (
    SPLITTING,
    Pipeline,
    Staged,
    copies,
    gradient_sums,
    loss_sums,
    outputs,
    pipeline,
    share,
    staged,
    staged_outputs,
)
from .joint_node import as_one

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LossFn = Callable[..., Any] | Staged


def pipeline_of(config: Any, mesh: Mesh, strategy: Strategy) -> Pipeline:
    """Which layers are where, as the strategy says."""
    return pipeline(config, mesh.pp, strategy.schedule, virtual=strategy.virtual, split=strategy.split)


def stage_plan(plan: Tree, config: Any, devices: DeviceMesh, strategy: Strategy) -> Tree:
    """This process' part of a plan of the whole model on `devices`."""
    return share(plan, config, pipeline_of(config, mesh_of(devices), strategy), devices.get_local_rank("pp"))


def init_stage(config: Any, seed: int, placements: Tree) -> Tree:
    """`params.init` of the leaves that a `stage_plan` has: each process draws what it holds of its own layers."""
    leaves = tree.flatten(family_of(config).spec(config))
    parts = {
        path: (how, draw(leaves[path], seed, path, how.local_box())) for path, how in tree.flatten(placements).items()
    }
    made = iter(how.distribute(part.to(leaves[path].dtype)) for path, (how, part) in parts.items())
    return tree.map(lambda _: next(made), placements)


def stage_sums(
    loss_fn: LossFn, optimizer: Optimizer, placed: Placed, *, remat: str, compile: str, counts: bool
) -> Callable[..., Sums]:
    """`train.gradients.gradient_sums` of this process."""
    loss, pipe, how = _staged(loss_fn, placed, compile, remat)
    group = placed.devices.get_group("pp")
    return gradient_sums(loss, optimizer, pipe, group, counts=counts or _wants_aux(loss_fn), **how)


def _wants_aux(loss_fn: LossFn) -> bool:
    return not isinstance(loss_fn, Staged) and inspect.signature(loss_fn).parameters["aux"].default is True


def counted_elsewhere(placed: Placed) -> frozenset[str]:
    """The entries of this process' params that another stage counts."""
    pipe = pipeline_of(placed.config, mesh_of(placed.devices), placed.strategy)
    return copies(placed.config, pipe, placed.devices.get_local_rank("pp"))


def stage_loss(
    loss_fn: LossFn, placed: Placed, compile: str
) -> Callable[[Tree, Sequence[Batch]], tuple[Tensor, Tensor, dict[str, Tensor] | None]]:
    """`pipeline.loss_sums` of this process, without gradients."""
    loss, pipe, how = _staged(loss_fn, placed, compile)
    return loss_sums(loss, pipe, placed.devices.get_group("pp"), counts=_wants_aux(loss_fn), **how)


def stage_outputs(function: LossFn, placed: Placed, compile: str) -> Callable[[Tree, Sequence[Batch]], list[Any]]:
    """What `function` returns of each microbatch, in the processes of all stages, without gradients."""
    whole_function, pipe, how = _staged(staged_outputs(function), placed, compile)
    group = placed.devices.get_group("pp")
    columns = placed.devices["tp"].size() if placed.strategy.sequence else 1
    run = outputs(whole_function, pipe, group, **how, multiple=columns)
    last, here = pipe.ranks[-1], placed.devices.get_local_rank("pp")

    def everywhere(params: Tree, parts: Sequence[Batch]) -> list[Any]:
        found = run(params, parts)
        box: list[Any] = [tree.map(lambda x: x.to("meta"), found) if here == last else None]
        dist.broadcast_object_list(box, dist.get_global_rank(group, last), group=group)
        empty = tree.map(lambda x: torch.empty_like(x, device=placed.devices.device_type), box[0])
        return [tree.map(lambda x: broadcast(x.contiguous(), last, group), one) for one in found or empty]

    return everywhere


def _staged(
    loss_fn: LossFn, placed: Placed, compile: str, remat: str = "none"
) -> tuple[Staged, Pipeline, dict[str, Any]]:
    """The loss, where its layers are, and what makes whole what lies in parts.

    Each way of sharing is what it is without stages, from the inside out: attention, experts, parts of layers,
    compilation of these, gathering.
    """
    config, devices, strategy = placed.config, placed.devices, placed.strategy
    mesh, loss = mesh_of(devices), staged(loss_fn)
    loss = dataclasses.replace(loss, balance=whole_balance(loss.balance, devices), compiled=compile == "block")
    if any(asks_length(loss.length, of) for of in (config, loss.teacher_config)):
        loss = dataclasses.replace(loss, length=longest(devices))
    if mesh.cp > 1:
        group = devices.get_group("cp")
        kernel = context_kernel(strategy.context, group, inner=_name("kernel", loss.kernel))
        loss = dataclasses.replace(loss, kernel=kernel)
    if mesh.ep > 1:
        inner = _name("experts", loss.experts)
        loss = dataclasses.replace(loss, experts=expert_parallel(devices.get_group("ep"), inner=inner))
    tensor = None
    if mesh.tp > 1:
        whole = P.plan(family_of(config).spec(config), rules_of(mesh, config), devices)
        tensor = tensor_parallel(config, whole, sequence=strategy.sequence)
    gathers, gathered = gathering_stages(placed.shards, dtype=strategy.gather_dtype, trains=placed.trains)
    wraps = [one for one in (layer_fn("none", compile), gathers, layer_fn(remat, "none")) if one is not None]
    if strategy.schedule in SPLITTING and (mesh.world > mesh.pp or remat != "none"):
        wraps.append(as_one)

    def around(block: Block) -> Block:
        for one in wraps:
            block = one(block)
        return block

    def outside(params: Tree) -> Tree:
        params = gathered(params)
        return params if tensor is None else tensor.outside(params)

    how = {
        "layer_fn": around if tensor is None else functools.partial(tensor.layer_fn, around=around),
        "outside": outside,
        "leaving": None if tensor is None else tensor.whole,
        "dtype": strategy.gather_dtype,
    }
    return loss, pipeline_of(config, mesh, strategy), how


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"Over this mesh `{what}` is the step's to set: the loss must name how one process does it.")
    return value

"""Pipeline stages inside a mesh (`pp`) whose other dimensions shard each stage's layers and batch.

    placements = stage_plan(params.plan(spec, rules_of(mesh, config), devices), config, devices, strategy)
    state = init_state(init_stage(config, 0, placements), optimizer)
    step = make_step(loss_fn, optimizer, accumulate=4, mesh=mesh, strategy=strategy)     # four microbatches

Parameters lie on the full mesh; those of a layer exist on the ranks of its stage only, and are not replicated over
`pp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from fnmodels import family_of, tree
from fnmodels.tree import Tree
from params.initialize import draw
from train.gradients import Sums
from train.losses.model_loss import Batch, ModelLoss
from train.optim.base import Optimizer
from train.parallel.compose import Composed
from train.parallel.mesh import Mesh, Strategy, mesh_of
from train.parallel.placement import Placed

from .gradients import gradient_sums, loss_sums, outputs
from .schedule import SPLITTING, Pipeline, pipeline
from .staged_loss import StageHooks
from .tree_split import copies, share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def pipeline_of(config: Any, mesh: Mesh, strategy: Strategy) -> Pipeline:
    """The `Pipeline` of a mesh and strategy."""
    return pipeline(config, mesh.pp, strategy.schedule, virtual=strategy.virtual, split=strategy.split)


def stage_plan(plan: Tree, config: Any, devices: DeviceMesh, strategy: Strategy) -> Tree:
    """This rank's share of a plan of the full model on `devices`."""
    return share(plan, config, pipeline_of(config, mesh_of(devices), strategy), devices.get_local_rank("pp"))


def init_stage(config: Any, seed: int, placements: Tree) -> Tree:
    """`params.init` of the parameters in a `stage_plan`: each rank draws its shards of its own layers."""
    leaves = tree.flatten(family_of(config).spec(config))
    parts = {
        path: (how, draw(leaves[path], seed, path, how.local_box())) for path, how in tree.flatten(placements).items()
    }
    made = iter(how.distribute(part.to(leaves[path].dtype)) for path, (how, part) in parts.items())
    return tree.map(lambda _: next(made), placements)


def counted_elsewhere(placed: Placed) -> frozenset[str]:
    """The top-level entries of this rank's params that another stage counts (a tied embedding)."""
    pipe = pipeline_of(placed.config, mesh_of(placed.devices), placed.strategy)
    return copies(placed.config, pipe, placed.devices.get_local_rank("pp"))


def stage_sums(loss: ModelLoss, optimizer: Optimizer, placed: Placed, composed: Composed) -> Callable[..., Sums]:
    """`train.gradients.gradient_sums` of this rank's stages."""
    pipe, group, hooks = _stages(placed, composed)
    return gradient_sums(loss, optimizer, pipe, group, hooks=hooks)


def stage_loss(
    loss: ModelLoss, placed: Placed, composed: Composed
) -> Callable[[Tree, Sequence[Batch]], tuple[Tensor, Tensor, dict[str, Tensor] | None]]:
    """`gradients.loss_sums` of this rank's stages, without gradients."""
    pipe, group, hooks = _stages(placed, composed)
    return loss_sums(loss, pipe, group, hooks=hooks)


def stage_outputs(
    function: ModelLoss, placed: Placed, composed: Composed
) -> Callable[[Tree, Sequence[Batch]], list[Any]]:
    """`gradients.outputs` of this rank's stages."""
    pipe, group, hooks = _stages(placed, composed)
    multiple = placed.devices["tp"].size() if placed.strategy.sequence else 1
    return outputs(function, pipe, group, hooks=hooks, multiple=multiple)


def _stages(placed: Placed, composed: Composed) -> tuple[Pipeline, dist.ProcessGroup, StageHooks]:
    devices, strategy = placed.devices, placed.strategy
    split = strategy.schedule in SPLITTING and (devices.size() > devices["pp"].size() or composed.remat)
    hooks = StageHooks(composed.full_states, strategy.gather_dtype, split)
    return pipeline_of(placed.config, mesh_of(devices), strategy), devices.get_group("pp"), hooks

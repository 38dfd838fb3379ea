"""Pipeline stages inside a mesh (`pp`) whose other dimensions shard each stage's layers and batch.

    placements = stage_plan(params.plan(spec, rules_of(mesh, config), devices), config, devices, strategy)
    state = init_state(init_stage(config, 0, placements), optimizer)
    step = make_step(loss_fn, optimizer, accumulate=4, mesh=mesh, strategy=strategy)     # four microbatches

Parameters lie on the full mesh; those of a layer exist on the ranks of its stage only, and are not replicated over
`pp`.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import params as P
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from train.parallel.compose import Composed
from train.parallel.mesh import Mesh, Strategy, mesh_of
from train.parallel.placement import Placed

from .boundary import Sharing
from .schedule import Pipeline, pipeline
from .staged_loss import StageHooks
from .tree_split import copies, share


def pipeline_of(config: DecoderConfig, mesh: Mesh, strategy: Strategy) -> Pipeline:
    """The `Pipeline` of a mesh and strategy."""
    return pipeline(config, mesh.pp, strategy.schedule, virtual=strategy.virtual, split=strategy.split)


def stage_plan(plan: Tree, config: DecoderConfig, devices: DeviceMesh, strategy: Strategy) -> Tree:
    """This rank's share of a plan of the full model on `devices`."""
    return share(plan, config, pipeline_of(config, mesh_of(devices), strategy), devices.get_local_rank("pp"))


def init_stage(config: DecoderConfig, seed: int, placements: Tree) -> Tree:
    """`params.init` of the parameters in a `stage_plan`: each rank draws its shards of its own layers."""
    made: Tree = P.init(config, seed, plan=placements)
    return made


def counted_elsewhere(placed: Placed) -> frozenset[str]:
    """The entries of this rank's params that another stage counts (a tied embedding), see `tree_split`."""
    pipe = pipeline_of(placed.config, mesh_of(placed.devices), placed.strategy)
    return copies(placed.config, pipe, placed.devices.get_local_rank("pp"))


def stages_of(placed: Placed, composed: Composed) -> tuple[Pipeline, dist.ProcessGroup, StageHooks]:
    """The arguments of `gradients.gradient_sums`, `loss_sums` and `outputs` for this rank's stages."""
    devices, strategy = placed.devices, placed.strategy
    multiple = devices["tp"].size() if strategy.sequence else 1
    sharing = Sharing(composed.key_heads, devices["cp"].size(), composed.width)
    hooks = StageHooks(composed.full_states, strategy.gather_dtype, multiple, sharing)
    return pipeline_of(placed.config, mesh_of(devices), strategy), devices.get_group("pp"), hooks

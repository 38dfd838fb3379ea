"""`simulate`: the facts of each pipeline rank."""

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig, field_of, function_of, parsed
from fnmodels.tree import Tree
from params.axes import EXPERT, POSITION
from train.parallel.mesh import Mesh
from train.parallel.pipeline.schedule import check_microbatches, pipeline
from train.parallel.pipeline.timeline import idle, order
from train.parallel.placement import rules_of
from train.parallel.tensor.leaf_roles import sharded_dims
from train.remat import layer_fn

from .activations import ends_kept, layer_kept, microbatch
from .facts import RankFacts, Work
from .memory import held
from .rank import PipelineRank, SimulatedModel, pipeline_rank
from .traffic import messages


def simulate(config: DecoderConfig, mesh: Mesh, work: Work) -> list[RankFacts]:
    """The facts of each pipeline rank. ValueError if mesh, model and batch do not fit together."""
    ranks = pipeline_ranks(config, mesh, work)
    model, orders = ranks[0].model, [rank.actions for rank in ranks]
    waits = idle(model.pipe, orders, [sum(model.recomputes(stage).values()) for stage in range(len(model.pipe.layers))])
    stages = [tuple(model.pipe.layers[stage] for stage in rank.stages) for rank in ranks]
    return [RankFacts(i, stages[i], held(rank), messages(rank), waits[i]) for i, rank in enumerate(ranks)]


def pipeline_ranks(config: DecoderConfig, mesh: Mesh, work: Work) -> list[PipelineRank]:
    """Each pipeline rank, for all that is computed of it. ValueError as in `simulate`."""
    family = fnmodels.family_of(config)
    spec = family.spec(config)
    _check(config, spec, mesh, work)
    schedule, virtual = (work.schedule, work.virtual) if mesh.pp > 1 else ("1F1B", None)
    pipe = pipeline(config, mesh.pp, schedule, virtual=virtual, split=work.split)
    check_microbatches(pipe, work.microbatches)
    plan = P.plan(spec, rules_of(mesh, config), mesh.sizes)
    if mesh.tp > 1:
        sharded_dims(tree.flatten(spec), tree.flatten(plan))  # for its checks
    part, kinds = microbatch(config, mesh, work), family.kinds(config)
    layers = tuple(layer_kept(part, kinds.index(kind)) for kind in kinds)
    model = SimulatedModel(config, spec, plan, mesh, work, pipe, part.shape, layers, ends_kept(part))
    return [pipeline_rank(model, rank, order(pipe, rank, work.microbatches)) for rank in range(mesh.pp)]


def _check(config: DecoderConfig, spec: Tree, mesh: Mesh, work: Work) -> None:
    """ValueError for work that the mesh does not divide, that the model does not support, or that is not simulated."""
    parts = mesh.rows * work.microbatches
    if work.rows % parts or work.rows < 1:
        several = "es" if work.microbatches > 1 else ""
        raise ValueError(
            f"{work.rows} rows do not divide into {work.microbatches} microbatch{several} on each of {mesh.rows} ranks "
            f"with rows of their own: give a multiple of {parts}."
        )
    if work.length % mesh.cp:
        raise ValueError(f"Rows of {work.length} tokens do not divide by cp = {mesh.cp}.")
    if any(kind.source for kind in parsed(fnmodels.family_of(config).kinds(config))):
        raise ValueError("Layers that read the keys and values of earlier ones are not simulated.")
    if field_of(config, "hidden_size_per_layer_input"):
        raise ValueError("Layers that read embeddings of the token ids are not simulated.")
    if function_of(fnmodels.family_of(config), "shared") is not None:
        raise ValueError("Layers that read tensors of the full model beside the residual stream are not simulated.")
    if field_of(config, "passes"):
        raise ValueError("Layers that run several times are not simulated.")
    if field_of(config, "residual_streams"):
        raise ValueError("Residual streams of several rows are not simulated.")
    layer_fn(work.remat, "none")  # for its checks
    if work.remat == "selective":
        raise ValueError(
            'remat="selective" is not simulated: it keeps less than "none" and more than "full", which are.'
        )
    for path, leaf in tree.flatten(spec).items():
        known = dict(zip(leaf.axes, leaf.shape, strict=True)).get(POSITION)
        if known is not None and work.length > known:
            raise ValueError(f"Rows of {work.length} tokens are longer than the {known} positions of {path}.")
    if mesh.ep > 1 and not any(EXPERT in leaf.axes for leaf in tree.leaves(spec)):
        raise ValueError(f"ep is {mesh.ep}, but a {config.model_type} has no experts to shard.")

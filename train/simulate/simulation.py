"""The facts of each place in a pipeline."""

from __future__ import annotations

from typing import Any

import fnmodels
import params as P
from fnmodels import tree
from train.layers import layer_fn
from train.parallel import pipeline as pp
from train.parallel.mesh import Mesh
from train.parallel.order import idle, order
from train.parallel.step import rules_of

from .facts import RankFacts, Work
from .held import held
from .kept import ends_kept, layer_kept
from .place import Model, Place, place
from .sent import messages


def simulate(config: Any, mesh: Mesh, work: Work) -> list[RankFacts]:
    """The facts of each place in the pipeline. ValueError in a sentence where mesh, model and batch do not fit."""
    parts = mesh.rows * work.microbatches
    if work.rows % parts or work.rows < 1:
        raise ValueError(
            f"{work.rows} rows do not divide into {work.microbatches} microbatches on each of {mesh.rows} ranks with "
            f"rows of their own: give a multiple of {parts}."
        )
    if work.length % mesh.cp:
        raise ValueError(f"Rows of {work.length} tokens do not divide by cp = {mesh.cp}.")
    layer_fn(work.remat, "none")  # for what it refuses
    if work.remat == "selective":
        raise ValueError(
            'remat="selective" is not simulated: it keeps less than "none" and more than "full", which are.'
        )
    family = fnmodels.family_of(config)
    spec = family.spec(config)
    if mesh.ep > 1 and not any("expert" in leaf.axes for leaf in tree.leaves(spec)):
        raise ValueError(f"ep is {mesh.ep}, but a {config.model_type} has no experts to divide.")
    schedule = work.schedule if mesh.pp > 1 else "1F1B"
    pipe = pp.pipeline(config, mesh.pp, schedule, virtual=work.virtual if mesh.pp > 1 else None, split=work.split)
    pp.check_microbatches(pipe, work.microbatches)
    plan = P.plan(spec, rules_of(mesh, config), mesh.sizes)
    shape = (work.rows // parts, work.length // mesh.cp)
    kinds = family.kinds(config)
    by_kind = {
        kind: layer_kept(config, spec, plan, kinds.index(kind), shape, mesh, work) for kind in sorted(set(kinds))
    }
    layers, ends = tuple(by_kind[kind] for kind in kinds), ends_kept(config, spec, plan, shape, mesh, work)
    model = Model(config, spec, plan, mesh, work, pipe, shape, layers, ends)
    orders = [order(pipe, rank, work.microbatches) for rank in range(mesh.pp)]
    waits = idle(pipe, orders, [sum(model.again(stage).values()) for stage in range(len(pipe.layers))])
    return [_facts(place(model, rank, orders[rank]), waits[rank]) for rank in range(mesh.pp)]


def _facts(one: Place, waits: float) -> RankFacts:
    layers = tuple(one.model.pipe.layers[stage] for stage in one.stages)
    return RankFacts(one.rank, layers, held(one), messages(one), waits)

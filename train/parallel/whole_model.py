"""Gathers values that differ per pipeline stage (parameters, metrics) so that every rank sees the full tree."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnmodels import family_of, tree
from fnmodels.models.common.family import parsed
from fnmodels.tree import Tree
from train.comm.collectives import broadcast, summed
from train.comm.dtensor import full_tensor, of_all_stages
from train.parallel.pipeline.stages import pipeline_of

from .mesh import mesh_of
from .placement import Placed


def fetching(params: Tree) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """({path: shape and dtype of a parameter, on meta}, fetch) for the parameters of all stages.

    fetch(path) is the full parameter, on every rank; it may share memory with `params`. params: DTensors, of one stage
    or of the full model. All ranks call both alike, in the same order of paths.
    """
    held = tree.flatten(params)
    devices = next(iter(held.values())).device_mesh
    group, size, rank = devices.get_group("pp"), devices["pp"].size(), devices.get_local_rank("pp")
    kinds = of_all_stages(params, {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in held.items()})
    stages = {path: stage for stage in reversed(range(size)) for path in kinds[stage]}
    leaves = {path: kind for of_stage in kinds for path, kind in of_stage.items()}

    def fetch(path: str) -> Tensor:
        if size == 1:
            return full_tensor(held[path])
        shape, dtype = leaves[path]
        here = stages[path] == rank
        x = full_tensor(held[path]) if here else torch.empty(shape, dtype=dtype, device=devices.device_type)
        return broadcast(x, stages[path], group)

    return {path: torch.empty(shape, dtype=dtype, device="meta") for path, (shape, dtype) in leaves.items()}, fetch


def aux_of_stages(placed: Placed) -> Callable[[Tree], Tree]:
    """A function from a stage's aux to that of the full model: counts of all layers, in order.

    The counts of MTP heads, which the last stage holds, follow those of the layers.
    """
    mesh, group = mesh_of(placed.devices), placed.devices.get_group("pp")
    rank, pipe = placed.devices.get_local_rank("pp"), pipeline_of(placed.config, mesh, placed.strategy)
    kinds = family_of(placed.config).kinds(placed.config)
    sparse = [index for index, kind in enumerate(parsed(kinds)) if kind.routed]
    rows = [sparse.index(i) for stage in pipe.stages(rank) for i in range(*pipe.layers[stage]) if i in sparse]
    known: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def whole_aux(aux: dict[str, Tensor]) -> dict[str, Tensor]:
        heads = range(len(sparse), len(sparse) + len(aux["counts"]) - len(rows)) if "counts" in aux else range(0)
        if not known:  # once: a stage without experts has no aux, but takes part in the reductions
            found: list[Any] = [None] * mesh.pp
            here = {name: (x.shape, x.dtype) for name, x in aux.items()}
            if "counts" in aux:
                here["counts"] = torch.Size((len(sparse) + len(heads), aux["counts"].shape[1])), aux["counts"].dtype
            dist.all_gather_object(found, here, group=group)
            known.update(sorted(pair for of_stage in found for pair in of_stage.items()))  # the largest shape wins
        made: dict[str, Tensor] = {}
        for name, (shape, dtype) in known.items():
            x = torch.zeros(shape, dtype=dtype, device=placed.devices.device_type)
            if name == "counts" and name in aux:
                x[[*rows, *heads]] = aux[name]
            elif name in aux:
                x = aux[name]
            made[name] = summed(x, group)
        return made

    return whole_aux

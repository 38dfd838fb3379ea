"""A checkpoint's model for one role of verl: each rank reads its shards."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import params as P
from fnmodels import family_of
from fnmodels.models.common.family import DecoderConfig, field_of, traits_of
from fnmodels.tree import Tree
from params.checkpoint.header_checks import check_folder
from train.parallel.mesh import Mesh, Strategy
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of


@dataclass(frozen=True)
class Placement:
    """The place of parameters: over a mesh, or with devices=None on one device of the type."""

    mesh: Mesh
    strategy: Strategy
    devices: Any
    device_type: str

    def plan(self, config: DecoderConfig) -> Tree | None:
        if self.devices is None:
            return None
        plan = P.plan(family_of(config).spec(config), rules_of(self.mesh, config), self.devices)
        return stage_plan(plan, config, self.devices, self.strategy) if self.mesh.pp > 1 else plan


def load(folder: Path, dtype: torch.dtype, where: Placement) -> tuple[DecoderConfig, Tree]:
    """(config, params) of the text model in a checkpoint folder, without the parts that no loss reads."""
    found = P.load_config(folder, part="text")
    optional = traits_of(family_of(found)).optional
    drop = tuple(part for part, count in optional.items() if getattr(found, count))
    options: dict[str, Any] = {"dtype": dtype, "copy": True, "drop": drop, "part": "text"}
    if where.devices is None:
        return P.load_pretrained(folder, device=where.device_type, **options)
    with ExitStack() as stack:
        config = check_folder(folder, stack, drop, part="text").config
    return P.load_pretrained(folder, plan=where.plan(config), **options)


def with_head(
    config: DecoderConfig, params: Tree, head: str, seed: int, where: Placement
) -> tuple[DecoderConfig, Tree]:
    """The model with a head of one label, where `head` is another than "lm" and the checkpoint has none."""
    if head == "lm" or field_of(config, "head") != "lm":
        return config, params
    fields: dict[str, Any] = {"head": head, "num_labels": 1}
    plan = where.plan(replace(config, **fields))
    return P.new_head(config, params, head=head, num_labels=1, seed=seed, plan=plan)

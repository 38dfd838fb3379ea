"""What a checkpoint of a configuration holds: the one place where our paths and the names on disk meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fnmodels import tree
from fnmodels.disk import Stored, disk_name, disk_shape
from fnmodels.families import family_of
from fnmodels.leaf import Leaf

# Buffers that old checkpoints saved and nobody reads: they follow from the configuration.
LEFTOVERS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Slot:
    """One parameter: its path in our tree, its declaration, and how it lies on disk."""

    path: str
    leaf: Leaf
    stored: Stored

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """The shape of the tensor on disk, of which this may be a part."""
        return disk_shape(self.stored, self.leaf.shape)


def slots(config: Any) -> tuple[Slot, ...]:
    """All parameters, in the order of the spec."""
    family = family_of(config)
    names = family.hf_names(config)
    return tuple(Slot(path, leaf, names[path]) for path, leaf in tree.flatten(family.spec(config)).items())


def by_name(parameters: Iterable[Slot]) -> dict[str, list[Slot]]:
    """{name of a tensor on disk: what it consists of}, usually one parameter."""
    grouped: dict[str, list[Slot]] = {}
    for slot in parameters:
        grouped.setdefault(disk_name(slot.stored), []).append(slot)
    return grouped


def ties(config: Any) -> dict[str, str]:
    """{name that a tied head may have on disk all the same: name of the tensor it must equal}."""
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    names = family_of(config).hf_names(config)
    return {"lm_head.weight": disk_name(names["embed_tokens"])} if "embed_tokens" in names else {}


def dtype_class(dtype: torch.dtype) -> str:
    """Within a class a file may have another dtype than the Leaf declares (a bf16 weight); across, it is a mistake."""
    if dtype == torch.bool:
        return "boolean"
    if dtype.is_complex:
        return "complex"
    if not dtype.is_floating_point:
        return "integer"
    return "floating" if dtype.itemsize > 1 else "8-bit floating"

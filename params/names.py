"""What a checkpoint of a configuration holds: the one place where our paths and the names on disk meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fnmodels import tree
from fnmodels.families import family_of
from fnmodels.leaf import Leaf

# Buffers that old checkpoints saved and nobody reads: they follow from the configuration.
LEFTOVERS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Slot:
    """Where a tensor on disk belongs."""

    path: str
    leaf: Leaf


def slots(config: Any) -> dict[str, Slot]:
    """{name on disk: Slot} of every tensor that a checkpoint must hold, in the order of the spec."""
    family = family_of(config)
    names = family.hf_names(config)
    return {names[path]: Slot(path, leaf) for path, leaf in tree.flatten(family.spec(config)).items()}


def ties(config: Any) -> dict[str, str]:
    """{name that a tied head may have on disk all the same: name of the tensor it must equal}."""
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    names = family_of(config).hf_names(config)
    return {"lm_head.weight": names["embed_tokens"]} if "embed_tokens" in names else {}


def dtype_class(dtype: torch.dtype) -> str:
    """Within a class a file may have another dtype than the Leaf declares (a bf16 weight); across, it is a mistake."""
    if dtype == torch.bool:
        return "boolean"
    if dtype.is_complex:
        return "complex"
    if not dtype.is_floating_point:
        return "integer"
    return "floating" if dtype.itemsize > 1 else "8-bit floating"

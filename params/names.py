"""What a checkpoint of a configuration holds: the one place where our paths and the names on disk meet."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fnmodels import tree
from fnmodels.disk import Stored, disk_name, disk_shape
from fnmodels.families import family_of
from fnmodels.leaf import Leaf


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


def slots(config: Any, prefix: str = "") -> tuple[Slot, ...]:
    """All parameters, in the order of the spec. prefix: what the names in the files lack (`lacking`)."""
    family = family_of(config)
    names, leaves = family.hf_names(config), tree.flatten(family.spec(config))
    return tuple(Slot(path, leaf, _cut(names[path], prefix)) for path, leaf in leaves.items())


def by_name(parameters: Iterable[Slot]) -> dict[str, list[Slot]]:
    """{name of a tensor on disk: what it consists of}, usually one parameter."""
    grouped: dict[str, list[Slot]] = {}
    for slot in parameters:
        grouped.setdefault(disk_name(slot.stored), []).append(slot)
    return grouped


def lacking(config: Any, found: Container[str]) -> str:
    """The first part of the names of `config`, with its dot, if the files `found` go without it; else "".

    OpenAI's GPT-2 and models that were saved without a head begin at `wte` or `layers`, not `transformer` or `model`.
    """
    names = [disk_name(stored) for path, stored in family_of(config).hf_names(config).items() if path != "lm_head"]
    prefix = names[0].partition(".")[0] + "."
    common = all(name.startswith(prefix) for name in names)
    bare = not any(name in found for name in names) and any(name.removeprefix(prefix) in found for name in names)
    return prefix if common and bare else ""


def is_leftover(config: Any, name: str) -> bool:
    """Whether `name` is a buffer that old files of the family hold and nobody reads: see its LEFTOVERS, if any."""
    return any(re.fullmatch(pattern, name) for pattern in getattr(family_of(config), "LEFTOVERS", ()))


def ties(config: Any, prefix: str = "") -> dict[str, str]:
    """{name that a tied head may have on disk all the same: name of the tensor it must equal}; prefix as in `slots`."""
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    names = family_of(config).hf_names(replace(config, tie_word_embeddings=False))
    if not names.keys() >= {"lm_head", "embed_tokens"}:  # a family of someone's own, with a head of its own
        return {}
    return {disk_name(names["lm_head"]): disk_name(_cut(names["embed_tokens"], prefix))}


def _cut(stored: Stored, prefix: str) -> Stored:
    if isinstance(stored, str):
        return stored.removeprefix(prefix)
    return replace(stored, name=stored.name.removeprefix(prefix))


def dtype_class(dtype: torch.dtype) -> str:
    """Within a class a file may have another dtype than the Leaf declares (a bf16 weight); across, it is a mistake."""
    if dtype == torch.bool:
        return "boolean"
    if dtype.is_complex:
        return "complex"
    if not dtype.is_floating_point:
        return "integer"
    return "floating" if dtype.itemsize > 1 else "8-bit floating"

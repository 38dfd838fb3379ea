"""Modules that hold the adapter of each parameter in PEFT's files, by their names in files and in memory."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import traits_of
from fnmodels.models.common.registry import family_of, hf_names, text_config
from fnmodels.models.common.spec import Leaf
from fnmodels.models.common.storage import (
    Single,
    Stack,
    Stored,
    TensorSlice,
    disk_name,
    disk_names,
    disk_shape,
    extract,
    join,
)
from params.checkpoint.module_names import module_names
from params.checkpoint.tensor_map import duplicate_names, untied_config

from .leaves import may_read_adapter

PREFIX = "base_model.model."
INNER = ".base_layer"


@dataclass(frozen=True)
class Place:
    """A parameter, or one expert of it, in the weight of a module.

    path: "lm_head" of a tied model is the second use of its embedding. stored: where it lies in the module's weight.
    """

    path: str
    leaf: Leaf  # without the dimension of experts, if `expert` is given
    stored: Single
    expert: int | None = None

    @property
    def rows(self) -> Single:
        """Its region in the module's weight [out, in], or [E, out, in], whichever way that is stored."""
        return self.stored if isinstance(self.stored, str) else replace(self.stored, transposed=False)

    @property
    def module_shape(self) -> tuple[int, ...]:
        """[out, in] or [E, out, in] of the module."""
        return disk_shape(self.rows, self.leaf.shape)


@dataclass(frozen=True)
class Modules:
    """The modules of one way of naming them.

    linear: by name, the parameters in the module's weight. stacked: by name, those in each of its parameters, which
    PEFT adapts as nested modules, the first inside. tensors: by name, what each tensor holds.
    """

    linear: dict[str, list[Place]] = field(default_factory=dict)
    stacked: dict[str, dict[str, list[Place]]] = field(default_factory=dict)
    tensors: dict[str, list[Place]] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """The names of a model's modules in memory and in files, and the paths of an embedding that is the head too.

    leaves: of the parameters, an lm_head of its own among them. tied: (path of the embedding, of that head), or None.
    copies: {name of a duplicate tensor: the parameter's}. says_transposed: whether the module of experts has
    `is_transposed`.
    """

    memory: Modules
    files: Modules
    leaves: dict[str, Leaf]
    tied: tuple[str, str] | None
    copies: dict[str, str]
    says_transposed: bool

    def a_reads_out(self, place: Place, version: str = "") -> bool:
        """Whether A of stacked experts reads the size out, and B gives in, in a release of PEFT ("": today's).

        A is of the last size of the tensor [E, ., .] since 0.19.1, except where the module says that it is transposed.
        """
        transposed = isinstance(place.stored, TensorSlice) and place.stored.transposed
        if len(place.leaf.shape) == 2:  # one matrix, which no release turns
            return transposed
        if version.startswith("0.19.0"):
            return self.says_transposed or not transposed
        if re.match(r"0\.(\d|1[0-8])\.", version):
            return not transposed
        return transposed and not self.says_transposed


def layout_of(config: Any) -> Layout:
    """The layout of a model; TypeError if a user's family has no names."""
    untied, at = untied_config(config)
    leaves = tree.flatten(family_of(untied).spec(untied))
    tied = (f"{at}embed_tokens", f"{at}lm_head") if untied != config else None
    if tied and tied[1] not in leaves:  # a model without a head
        tied = None
    says = traits_of(family_of(text_config(untied))).says_transposed
    copies, stored = duplicate_names(config), hf_names(untied)
    several = {path for path, s in stored.items() if "layers." in path and {*disk_names(s)} & {*copies.values()}}
    several |= {path for path, s in stored.items() if isinstance(s, Stack) and len({*disk_names(s)}) == 1}
    memory, files = (_modules(names, leaves, several) for names in (module_names(untied), stored))
    return Layout(memory, files, leaves, tied, copies, says)


def _modules(names: Mapping[str, Stored], leaves: Mapping[str, Leaf], several: Collection[str]) -> Modules:
    """several: parameters that several modules have, for each of which PEFT has an adapter of its own, and those whose
    experts lie in one matrix, which PEFT cannot adapt (DBRX)."""
    found = Modules()
    for path, leaf in leaves.items():
        for place in _places(path, leaf, names[path]):
            name = disk_name(place.stored)
            found.tensors.setdefault(name, []).append(place)
            module, _, last = name.rpartition(".")
            if not may_read_adapter(path, leaf) or getattr(place.stored, "columns", False) or path in several:
                continue
            if last == "weight":
                found.linear.setdefault(module, []).append(place)
            else:
                found.stacked.setdefault(module, {}).setdefault(last, []).append(place)
    for parameters in found.stacked.values():  # PEFT nests them in the order of the module, where down comes last
        ordered = sorted(parameters, key=lambda name: name.startswith("down"))
        parameters |= {name: parameters.pop(name) for name in ordered}
    return found


def _places(path: str, leaf: Leaf, stored: Stored) -> Iterable[Place]:
    if not isinstance(stored, Stack):
        return [Place(path, leaf, stored)]
    if stored.rows:  # of a table, which has no adapter
        return []
    one = replace(leaf, shape=leaf.shape[1:], axes=leaf.axes[1:])
    return [Place(path, one, single, expert) for expert, single in enumerate(stored.tensors)]


@dataclass(frozen=True)
class Factors:
    """An adapter b a of a weight [out, in] or [E, out, in]: a [(E,) rank, in], b [(E,) out, rank].

    magnitude: [out], of DoRA, else None.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None


def cut(places: list[Place], factors: Factors, rank: int) -> dict[str, Factors]:
    """{path: factors} of the parameters that are slices of one module's weight, from the module's.

    A component of the rank that one slice alone reads is that slice's; others are shared, as copies. A slice without
    any, beside others, has no adapter. rank: of the adapter of a slice where `joined` made the module's.
    """
    if len(places) == 1 and isinstance(places[0].stored, str):
        return {places[0].path: factors}
    ordered = sorted(places, key=lambda place: place.stored.start)  # type: ignore[union-attr]
    rows = [extract(place.rows, factors.b) for place in ordered]
    kept = _components(rows, rank, dora=factors.magnitude is not None)
    found: dict[str, Factors] = {}
    for place, b, own in zip(ordered, rows, kept, strict=True):
        if bool(own.any()):
            magnitude = None if factors.magnitude is None else extract(place.rows, factors.magnitude)
            found[place.path] = Factors(factors.a[..., own, :], b[..., own], magnitude)
    return found


def _components(rows: list[Tensor], rank: int, *, dora: bool) -> Tensor:
    """[slices, rank of the module] bool: the components of each slice's adapter."""
    read = torch.stack([(b != 0).flatten(0, -2).any(0) for b in rows])
    count, total = read.shape
    blocks = torch.eye(count, dtype=torch.bool).repeat_interleave(total // count, 1) if total % count == 0 else read
    if total == count * rank and not bool((read & ~blocks).any()):
        return blocks
    separate = bool(read.any()) and int(read.sum(0).max()) == 1 and not dora
    return read if separate else torch.ones_like(read)


def joined(places: list[Place], parts: Mapping[str, Factors]) -> Factors:
    """The module's factors from those of the parameters in it: the inverse of `cut`, with zeros between the slices."""
    if len(places) == 1 and isinstance(places[0].stored, str):
        return parts[places[0].path]
    ranks = {path: part.a.shape[-2] for path, part in parts.items()}
    first = next(iter(parts.values()))
    empty = first.b.new_zeros(())
    a = torch.cat([parts[place.path].a for place in places if place.path in parts], -2)
    slices: list[tuple[Single, Tensor]] = []
    start, total = 0, sum(ranks.values())
    for place in places:
        b = empty.expand(*place.leaf.shape[:-1], total).clone()
        if place.path in parts:
            stop = start + ranks[place.path]
            b[..., start:stop], start = parts[place.path].b, stop
        slices.append((place.rows, b))
    if first.magnitude is None:
        return Factors(a, join(slices))
    norms = [(place.rows, part.magnitude) for place in places if (part := parts[place.path]).magnitude is not None]
    return Factors(a, join(slices), join(norms))


def whole(places: list[Place], values: Mapping[str, Tensor], *, stored: bool = True) -> Tensor:
    """The module's tensor from the parameters in it, as it is stored, or as a weight [out, in]."""
    return join((place.stored if stored else place.rows, values[place.path]) for place in places)

"""Which part of each parameter a rank holds: the leaves' logical axes, and rules from those to the mesh's dimensions.

    rules = Rules({"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}, spread="fsdp")
    placements = plan(family.spec(config), rules, mesh)
    print(describe(placements))

There is no plan per family: a spec names what its dimensions are, and the rules say once where such dimensions go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.spec import Leaf
from fnmodels.tree import Tree

if TYPE_CHECKING:  # hundreds of modules, which a plan does not need
    from torch.distributed.device_mesh import DeviceMesh

Sizes = Mapping[str, int]
HEADS = ("heads", "kv_heads")  # the axes that are divided between heads only, of `Leaf.unit` numbers each


@dataclass(frozen=True, init=False)
class Rules:
    """Logical axis -> the mesh dimensions that divide it, outermost first; what is not named is not divided.

    spread: mesh dimensions which, on top of that, divide the first dimension of every leaf that nothing else divides
    and that they fit; where none fits, the leaf is replicated over them (norms smaller than the mesh). This is FSDP:
    without other rules every leaf is divided by rows, which lie together in a file.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...]
    spread: tuple[str, ...]

    def __init__(
        self, axes: Mapping[str, str | tuple[str, ...]] | None = None, *, spread: str | tuple[str, ...] = ()
    ) -> None:
        given = {axis: _names(dims) for axis, dims in (axes or {}).items()}
        object.__setattr__(self, "axes", tuple(sorted(given.items())))
        object.__setattr__(self, "spread", _names(spread))
        twice = set(self.spread) & {dim for dims in given.values() for dim in dims}
        if twice:
            raise ValueError(
                f"The mesh dimension {min(twice)!r} is in `spread` and has an axis of its own; choose one."
            )


@dataclass(frozen=True)
class Sharding:
    """How one leaf lies on the mesh.

    dims: for each mesh dimension the dimension of the leaf that it divides, or None where it holds copies. sizes: the
    mesh's names and sizes, in its order. shape, itemsize: of the whole leaf. mesh: None where a plan was made without.
    """

    dims: tuple[int | None, ...]
    sizes: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    itemsize: int
    mesh: DeviceMesh | None = None

    @property
    def placements(self) -> tuple[Any, ...]:
        """The same in DTensor's words, one per mesh dimension."""
        from torch.distributed.tensor import Replicate, Shard

        return tuple(Replicate() if dim is None else Shard(dim) for dim in self.dims)

    def box_at(self, coordinate: tuple[int, ...]) -> tuple[slice, ...]:
        """What the rank at this coordinate of the mesh holds, as slices of the whole; DTensor's own division.

        Each mesh dimension in turn divides what the ones before it left, in chunks of ceil(n / size).
        """
        starts, stops = [0] * len(self.shape), list(self.shape)
        for dim, (_, size), index in zip(self.dims, self.sizes, coordinate, strict=True):
            if dim is not None:
                chunk = -(-(stops[dim] - starts[dim]) // size)
                low = min(starts[dim] + index * chunk, stops[dim])
                starts[dim], stops[dim] = low, min(low + chunk, stops[dim])
        return tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))

    def local_box(self) -> tuple[slice, ...]:
        """What this process holds."""
        coordinate = self._mesh().get_coordinate()
        if coordinate is None:
            raise ValueError("This process is not in the plan's mesh.")
        return self.box_at(tuple(coordinate))

    def rank_and_count(self) -> tuple[int, int]:
        """(number of this process among those of the mesh, how many they are), for what each does a share of."""
        index, count = 0, 1
        for place, size in zip(self._mesh().get_coordinate() or (), self._mesh().shape, strict=True):
            index, count = index * size + place, count * size
        return index, count

    def distribute(self, local: Tensor) -> Tensor:
        """This process' part as the DTensor that all of them make up; nothing is communicated."""
        from torch.distributed.tensor import DTensor

        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        made: Tensor = DTensor.from_local(
            local,
            self._mesh(),
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(strides),
        )
        return made

    def _mesh(self) -> DeviceMesh:
        if self.mesh is None:
            raise ValueError("The plan was made from sizes alone; make it with a DeviceMesh to hold tensors by it.")
        return self.mesh

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the first rank's part, which is the largest."""
        return tuple(s.stop - s.start for s in self.box_at((0,) * len(self.sizes)))


def sharding_of(leaf: Any) -> Sharding | None:
    """How a DTensor lies, which it may not by other placements than Shard and Replicate; None for other tensors."""
    if not hasattr(leaf, "to_local"):  # without importing what they are
        return None
    from torch.distributed.tensor import Replicate, Shard

    other = [placement for placement in leaf.placements if type(placement) not in (Shard, Replicate)]
    if other:
        raise ValueError(f"is placed by {other[0]!r}; parameters are divided (Shard) or copied (Replicate).")
    dims = tuple(p.dim if isinstance(p, Shard) else None for p in leaf.placements)
    mesh = leaf.device_mesh
    sizes = tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return Sharding(dims, sizes, tuple(leaf.shape), leaf.dtype.itemsize, mesh)


def plan(spec: Tree, rules: Rules, mesh: DeviceMesh | Sizes) -> Tree:
    """A `Sharding` for each Leaf of `spec`. mesh: a DeviceMesh with names, or {name: size} to plan without processes.

    Heads stay whole. Where there are fewer KV heads than parts, each of which needs one of them, k and v are not
    divided: every rank holds them all (`describe` shows it), and who runs on parts of heads reads its own there.
    ValueError in a sentence: a mesh dimension that is not there, one that two dimensions of a leaf ask for, and a
    dimension that does not divide (naming the leaf).
    """
    sizes = _sizes(mesh)
    device_mesh = None if isinstance(mesh, Mapping) else mesh
    for dim in (*rules.spread, *(dim for _, dims in rules.axes for dim in dims)):
        if dim not in sizes:
            raise ValueError(f"The rules name the mesh dimension {dim!r}; the mesh has {', '.join(sizes)}.")
    unused = [axis for axis, _ in rules.axes if not any(axis in leaf.axes for leaf in tree.leaves(spec))]
    if unused:
        known = sorted({axis for leaf in tree.leaves(spec) for axis in leaf.axes})
        raise ValueError(f"The rules name the axis {unused[0]!r}, which no leaf has; there are {', '.join(known)}.")
    flat = {
        path: Sharding(
            _place(path, leaf, rules, sizes), tuple(sizes.items()), leaf.shape, leaf.dtype.itemsize, device_mesh
        )
        for path, leaf in tree.flatten(spec).items()
    }
    return tree.unflatten(flat)


def _place(path: str, leaf: Leaf, rules: Rules, sizes: Sizes) -> tuple[int | None, ...]:
    where: dict[str, int] = {}
    table = dict(rules.axes)
    for dim, axis in enumerate(leaf.axes):
        names = table.get(axis, ())
        parts, whole = math.prod(sizes[name] for name in names), leaf.shape[dim]
        units = whole // leaf.unit if axis in HEADS else whole
        if axis == "kv_heads" and parts > units and parts % units == 0:
            continue
        if units % parts:
            kind = "" if units == whole else f" heads of {leaf.unit}"
            raise ValueError(f"{path}: {axis} is {units}{kind}, not a multiple of {parts} ({', '.join(names)}).")
        for name in names:
            if name in where:
                raise ValueError(f"{path}: both {leaf.axes[where[name]]!r} and {axis!r} go to {name!r}; only one can.")
            where[name] = dim
    for name in rules.spread:
        free = [d for d, n in enumerate(leaf.shape) if d not in where.values() and n % sizes[name] == 0]
        if free:
            where[name] = free[0]
    return tuple(where.get(name) for name in sizes)


def plan_by_path(placements: Tree, leaves: Mapping[str, Leaf]) -> dict[str, Sharding]:
    """The plan of these leaves by path. ValueError where it is another model's."""
    flat: dict[str, Sharding] = tree.flatten(placements)
    if flat.keys() != leaves.keys():
        raise ValueError(f"The plan is of another model: {min(flat.keys() ^ leaves.keys())} is in only one of them.")
    for path, sharding in flat.items():
        if sharding.shape != leaves[path].shape:
            here = f"{path} is {list(leaves[path].shape)}"
            raise ValueError(f"The plan is of another model: {here}, and there {list(sharding.shape)}.")
    return flat


def describe(placements: Tree) -> str:
    """A table of a plan: leaf, shape, the shape that one rank holds, and its bytes; equal layers in one line."""
    lines = [("leaf", "shape", "local", "bytes per rank", "mesh: dimension")]
    total = 0
    for path, sharding, layers in _grouped(placements):
        local = sharding.local_shape
        size = math.prod(local) * sharding.itemsize
        total += size * layers
        divided = [f"{n}: {d}" for d, (n, _) in zip(sharding.dims, sharding.sizes, strict=True) if d is not None]
        where = ", ".join(divided)
        name = path if layers == 1 else f"{path} (x{layers})"
        lines.append((name, str(list(sharding.shape)), str(list(local)), f"{size * layers:,}", where or "replicated"))
    lines.append(("total", "", "", f"{total:,}", ""))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    rows = [
        (a.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(b, widths[1:], strict=True)), c) for a, *b, c in lines
    ]
    return "\n".join("  ".join(row).rstrip() for row in rows)


def _grouped(placements: Tree) -> Iterator[tuple[str, Sharding, int]]:
    """(path with * for the layer, sharding, how many layers are like this)."""
    counts: dict[tuple[str, Sharding], int] = {}
    for path, sharding in tree.flatten(placements).items():
        parts = path.split(".")
        name = ".".join([parts[0], "*", *parts[2:]]) if parts[0] == "layers" else path
        counts[name, sharding] = counts.get((name, sharding), 0) + 1
    return ((name, sharding, n) for (name, sharding), n in counts.items())


def _names(dims: str | tuple[str, ...]) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else tuple(dims)


def _sizes(mesh: DeviceMesh | Sizes) -> dict[str, int]:
    if isinstance(mesh, Mapping):
        return dict(mesh)
    if mesh.mesh_dim_names is None:
        raise ValueError("The mesh must name its dimensions: init_device_mesh(..., mesh_dim_names=(...)).")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))

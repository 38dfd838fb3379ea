"""Sharding plans: rules from the leaves' logical axes to mesh dimensions decide which shard of a leaf each rank holds.

    rules = Rules({"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}, spread="fsdp")
    placements = plan(family.spec(config), rules, mesh)
    print(describe(placements))

No family has a plan of its own: its spec names the logical axis of every dimension, and one set of rules serves all.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fnmodels import tree
from fnmodels.models.common.spec import Leaf
from fnmodels.tree import Tree

from .axes import KEYS, has_whole_heads, may_be_uneven

Sizes = Mapping[str, int]


@dataclass(frozen=True, init=False)
class Rules:
    """Rules that map logical axes of parameters to the mesh dimensions that shard them.

    Args:
        axes: {logical axis: the mesh dimensions that shard it, outermost first}; axes that are not named are not
            sharded. None: {}.
        spread: Further mesh dimensions. Each shards the first dimension of a leaf that is not sharded yet and whose
            size it divides; where there is none, the leaf is replicated (norms smaller than the mesh). This is FSDP:
            without other rules every leaf is sharded by rows, which are contiguous in a file. Rows of a table of
            n-grams need not divide.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...]
    spread: tuple[str, ...]

    def __init__(
        self, axes: Mapping[str, str | tuple[str, ...]] | None = None, *, spread: str | tuple[str, ...] = ()
    ) -> None:
        table = {axis: _names(dims) for axis, dims in (axes or {}).items()}
        object.__setattr__(self, "axes", tuple(sorted(table.items())))
        object.__setattr__(self, "spread", _names(spread))
        twice = set(self.spread) & {dim for dims in table.values() for dim in dims}
        if twice:
            raise ValueError(
                f"The mesh dimension {min(twice)!r} is in `spread` and has an axis of its own; choose one."
            )


@dataclass(frozen=True)
class Sharding:
    """The sharding of one leaf over the mesh.

    Args:
        dims: For each mesh dimension the dimension of the leaf that it shards, or None where the leaf is replicated.
        sizes: (name, size) of each mesh dimension.
        shape: Of the full leaf.
        itemsize: Bytes of an element.
        mesh: The mesh of processes; None in a plan made from sizes.
    """

    dims: tuple[int | None, ...]
    sizes: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    itemsize: int
    mesh: DeviceMesh | None = None

    @property
    def placements(self) -> tuple[Any, ...]:
        """The DTensor placements, one per mesh dimension."""
        from torch.distributed.tensor import Replicate, Shard

        return tuple(Replicate() if dim is None else Shard(dim) for dim in self.dims)

    def box_at(self, coordinate: tuple[int, ...]) -> tuple[slice, ...]:
        """The shard of the rank at a mesh coordinate, as in DTensor.

        Each mesh dimension in turn splits the shard left by the ones before it into chunks of ceil(n / size).

        Args:
            coordinate: An index along each mesh dimension.

        Returns:
            One slice of the full leaf per dimension.
        """
        starts, stops = [0] * len(self.shape), list(self.shape)
        for dim, (_, size), index in zip(self.dims, self.sizes, coordinate, strict=True):
            if dim is not None:
                chunk = -(-(stops[dim] - starts[dim]) // size)
                low = min(starts[dim] + index * chunk, stops[dim])
                starts[dim], stops[dim] = low, min(low + chunk, stops[dim])
        return tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))

    def local_box(self) -> tuple[slice, ...]:
        """The slices of the full leaf that this process holds.

        Returns:
            One slice per dimension.

        Raises:
            ValueError: This process is not in the plan's mesh.
        """
        coordinate = self._mesh().get_coordinate()
        if coordinate is None:
            raise ValueError("This process is not in the plan's mesh.")
        return self.box_at(tuple(coordinate))

    def rank_and_count(self) -> tuple[int, int]:
        """The place of this process in the mesh, to split work between the processes.

        Returns:
            Its flat index, and the size of the mesh.
        """
        index, count = 0, 1
        for position, size in zip(self._mesh().get_coordinate() or (), self._mesh().shape, strict=True):
            index, count = index * size + position, count * size
        return index, count

    def distribute(self, local: Tensor) -> Tensor:
        """The DTensor that has a tensor as this process's shard; nothing is communicated.

        Args:
            local: The shard, of the shape of `local_box`.

        Returns:
            The DTensor of the full shape.
        """
        from torch.distributed.tensor import DTensor

        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        tensor: Tensor = DTensor.from_local(
            local, self._mesh(), self.placements, run_check=False, shape=torch.Size(self.shape), stride=tuple(strides)
        )
        return tensor

    def _mesh(self) -> DeviceMesh:
        if self.mesh is None:
            raise ValueError("The plan was made from sizes alone; make it with a DeviceMesh to shard tensors.")
        return self.mesh

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the first rank's shard, which is the largest."""
        return tuple(s.stop - s.start for s in self.box_at((0,) * len(self.sizes)))


def sharding_of(leaf: Any) -> Sharding | None:
    """The sharding of a DTensor; None for other tensors. ValueError for placements other than Shard and Replicate.

    A weight kept as a file stores it knows its own.
    """
    if hasattr(leaf, "sharding"):
        kept: Sharding | None = leaf.sharding
        return kept
    if not hasattr(leaf, "to_local"):  # no DTensor, found out without importing it
        return None
    from torch.distributed.tensor import Replicate, Shard

    other = [placement for placement in leaf.placements if type(placement) not in (Shard, Replicate)]
    if other:
        raise ValueError(f"is placed by {other[0]!r}; parameters are sharded (Shard) or replicated (Replicate).")
    dims = tuple(p.dim if isinstance(p, Shard) else None for p in leaf.placements)
    mesh = leaf.device_mesh
    sizes = tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return Sharding(dims, sizes, tuple(leaf.shape), leaf.dtype.itemsize, mesh)


def plan(spec: Tree, rules: Rules, mesh: DeviceMesh | Sizes) -> Tree:
    """Plans the sharding of every leaf of a model over a mesh.

    Heads are never split. Where the shards outnumber the KV heads (by a multiple), k and v are replicated: `describe`
    shows it, and tensor-parallel attention reads the KV heads that its query heads need.

    Args:
        spec: The tree of `family.spec(config)`.
        rules: Which mesh dimensions shard which logical axes.
        mesh: A DeviceMesh with names, or {name: size} to plan without processes.

    Returns:
        A `Sharding` for each Leaf.

    Raises:
        ValueError: The rules name a mesh dimension or an axis that does not exist, two dimensions of a leaf map to one
            mesh dimension, or a dimension is not divisible by its shards (naming the leaf).
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
        shards, size = math.prod(sizes[name] for name in names), leaf.shape[dim]
        units = size // leaf.unit if has_whole_heads(axis) else size
        if axis in KEYS and shards > units and shards % units == 0:
            continue
        if units % shards and not may_be_uneven(axis):
            kind = "" if units == size else f" heads of {leaf.unit}"
            raise ValueError(f"{path}: {axis} is {units}{kind}, not a multiple of {shards} ({', '.join(names)}).")
        if _leaves_empty(units, shards):
            raise ValueError(
                f"{path}: {axis} is {units}, of which {shards} processes ({', '.join(names)}) have "
                f"{-(-units // shards)} each and the last ones none: take fewer processes."
            )
        for name in names:
            if name in where:
                raise ValueError(f"{path}: both {leaf.axes[where[name]]!r} and {axis!r} go to {name!r}; only one can.")
            where[name] = dim
    for name in rules.spread:
        left = [d for d in range(len(leaf.axes)) if d not in where.values()]
        free = [d for d in left if leaf.shape[d] % sizes[name] == 0 or may_be_uneven(leaf.axes[d])]
        free = [d for d in free if not _leaves_empty(leaf.shape[d], sizes[name])]
        if free:
            where[name] = free[0]
    return tuple(where.get(name) for name in sizes)


def _leaves_empty(units: int, shards: int) -> bool:
    """Whether the last of so many shards, each of as many units as the first, has none."""
    return shards > 1 and units > 0 and -(-units // shards) * (shards - 1) >= units


def plan_by_path(placements: Tree, leaves: Mapping[str, Leaf]) -> dict[str, Sharding]:
    """{path: Sharding} of a plan, which must fit these leaves; that of pipeline stages fits those that it names.

    ValueError where it was made for another model.
    """
    flat: dict[str, Sharding] = tree.flatten(placements)
    if is_stage_share(placements):
        leaves = {path: leaf for path, leaf in leaves.items() if path in flat}
    if flat.keys() != leaves.keys():
        raise ValueError(f"The plan is of another model: {min(flat.keys() ^ leaves.keys())} is in only one of them.")
    for path, sharding in flat.items():
        if sharding.shape != leaves[path].shape:
            in_model = f"{path} is {list(leaves[path].shape)}"
            raise ValueError(f"The plan is of another model: {in_model}, and there {list(sharding.shape)}.")
    return flat


def is_stage_share(values: Tree) -> bool:
    """Whether a tree holds some layers alone, as a pipeline stage does: "layers", of the model or of an encoder or a
    decoder, is then a dict by number in place of a list.
    """

    def numbered(node: Any) -> bool:
        return isinstance(node, Mapping) and isinstance(node.get("layers"), Mapping)

    return numbered(values) or (isinstance(values, Mapping) and any(map(numbered, values.values())))


def describe(placements: Tree) -> str:
    """A plan as a table: leaf, shape, local shape and bytes per rank, sharded dims. Equal layers share a line.

    Args:
        placements: The tree of `plan`.

    Returns:
        Lines of text.
    """
    lines = [("leaf", "shape", "local", "bytes per rank", "mesh: dimension")]
    total = 0
    for path, sharding, layers in _grouped(placements):
        local = sharding.local_shape
        size = math.prod(local) * sharding.itemsize
        total += size * layers
        sharded = [f"{n}: {d}" for d, (n, _) in zip(sharding.dims, sharding.sizes, strict=True) if d is not None]
        where = ", ".join(sharded)
        name = path if layers == 1 else f"{path} (x{layers})"
        lines.append((name, str(list(sharding.shape)), str(list(local)), f"{size * layers:,}", where or "replicated"))
    lines.append(("total", "", "", f"{total:,}", ""))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    rows = [
        (a.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(b, widths[1:], strict=True)), c) for a, *b, c in lines
    ]
    return "\n".join("  ".join(row).rstrip() for row in rows)


def _grouped(placements: Tree) -> Iterator[tuple[str, Sharding, int]]:
    """(path with * for the layer index, sharding, number of layers with this path and sharding)."""
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
